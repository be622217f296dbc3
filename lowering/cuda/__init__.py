"""Graphs for NVIDIA GPUs: the file that an artifact has, and the device that compiles, captures and runs it."""
