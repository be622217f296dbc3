"""Structured output: grammars compiled into masks over the vocabulary."""
