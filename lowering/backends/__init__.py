"""Executors of lowered graphs, one file a backend."""
