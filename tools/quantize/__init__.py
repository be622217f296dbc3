"""Quantising a float checkpoint ahead of time, in the layouts that ModelSlim and compressed-tensors write."""
