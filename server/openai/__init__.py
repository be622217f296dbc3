"""OpenAI's HTTP API, and the routes that bench tools of the field expect beside it."""
