"""Parsers of what models write: reasoning and tool calls, out of text that arrives in pieces."""
