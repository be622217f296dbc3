"""Conversations: chat templates, and the form of what a model writes."""
