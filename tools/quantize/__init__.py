"""Quantising a float checkpoint ahead of time, in the layout that ModelSlim writes."""
