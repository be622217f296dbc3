"""A partitioned graph becomes an executable and a file on disk."""
