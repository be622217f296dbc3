"""Graphs of torch operators for NPUs, captured once and replayed (ACL graphs)."""
