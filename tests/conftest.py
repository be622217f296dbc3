"""Turns torch and hypothesis into test settings: few threads, no deadlines, the same examples every time."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

# Workers of pytest-xdist share the cores; alone, a process may take two.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)

settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")
