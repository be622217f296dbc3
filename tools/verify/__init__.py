"""Proofs that what was built computes what the model means."""
