"""Processes that serve an artifact."""
