"""`npucompile` as a process that ends with the one that started it, however that one ends; nobody types its command line."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from ..cli import main

PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Has Linux send SIGTERM to this process when its parent's main thread ends; ends at once where it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    sys.argv[1:] = sys.argv[2:]
    main(prog_name="npucompile")
