"""From an artifact to processes that serve it."""
