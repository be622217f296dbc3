"""An artifact and a queue of requests become tokens."""
