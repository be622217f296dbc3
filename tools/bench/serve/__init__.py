"""The load of a running server: what is sent, when, and what came of it."""
