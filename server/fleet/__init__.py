"""Prefill and decode servers that work together: the connection between them, and who asks whom."""
