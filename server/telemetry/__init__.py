"""Access log and traces of requests."""
