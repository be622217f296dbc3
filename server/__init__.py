"""Tokens become a stream to a client."""
