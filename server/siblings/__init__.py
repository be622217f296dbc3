"""The other doors of a server: processes that speak with its clients as this one does."""
