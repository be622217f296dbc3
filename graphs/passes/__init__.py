"""Passes over partitioned graphs, in one ordered list."""
