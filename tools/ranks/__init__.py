"""The ranks of an artifact: their processes, devices, weights and executors."""
