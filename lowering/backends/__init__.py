"""The backends, one file or package each."""
