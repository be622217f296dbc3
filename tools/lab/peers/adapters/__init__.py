"""Adapters of other inference engines, run by `loop.py` in the engines' own Python environments."""
