"""Pure decisions over request records: what the next step is, and what it changes."""
