"""What stands in for NPUs on a CPU: kernels with documented semantics, and runs of all ranks in one process."""
