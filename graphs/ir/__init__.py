"""Graphs of programs: recording, bodies, flattening, outlining."""
