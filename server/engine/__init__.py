"""Requests go to the engine, and its events come back as text."""
