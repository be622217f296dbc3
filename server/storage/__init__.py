"""Responses that are kept for later requests, and their events."""
