"""Responses: prepared, run, stored, and told as events in OpenAI's format."""
