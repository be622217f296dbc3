"""Serving on several ranks: rendezvous, process groups, control plane, workers."""
