"""The primitive table, one file a primitive."""
