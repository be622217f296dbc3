"""tools/serve/child.py: a process that ends with its parent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support import ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the signal of a parent's death is Linux's")

PARENT = """
import os, subprocess, sys, time
command = [sys.executable, "-c", "import os, sys, time; from npucompile.tools.serve.child import end_with; "
           f"end_with({os.getpid()}); print('ready', flush=True); time.sleep(600)"]
child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_parent_that_is_killed_takes_its_child_along():
    process = ranks.spawn([sys.executable, "-c", PARENT], ranks.environment())
    try:
        child = int(process.stdout.readline())
        assert os.path.exists(f"/proc/{child}")
    finally:
        process.kill()
        process.communicate()
    ranks.eventually(lambda: not os.path.exists(f"/proc/{child}"))


def test_a_parent_that_has_ended_already_is_noticed():
    command = [sys.executable, "-m", "npucompile.tools.serve.child", "1", "models"]
    done = subprocess.run(command, env=ranks.environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (143, "")
    command[3] = str(os.getpid())
    assert "qwen3.5-tiny" in subprocess.run(command, env=ranks.environment(), capture_output=True, text=True, check=True).stdout
