"""Measurements: builds, loads, steps, streams, speculation, peers."""
