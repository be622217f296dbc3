"""What of a tensor's memory is resident, as the kernel counts it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch

_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


def resident_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Resident bytes of the mappings that the tensors lie in; the kernel may have joined them with neighbours, so compare differences."""
    ranges = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if header := _HEADER.match(line):
            start, end = int(header[1], 16), int(header[2], 16)
            inside = any(first < end and start < last for first, last in ranges)
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total
