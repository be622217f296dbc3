"""Proofs that what was built computes what its model computes."""
