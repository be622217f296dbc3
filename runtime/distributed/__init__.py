"""Ranks of one job: rendezvous, process groups, control plane, workers."""
