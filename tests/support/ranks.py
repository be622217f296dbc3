"""Artifacts for several ranks, and real processes that run them, all with timeouts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest import mock

from support import tiny

from npucompile.runtime.distributed.messages import RankMessage, receive
from npucompile.tools.builder import driver, pool

SIZES = {
    "num_key_value_heads": 2,
    "num_attention_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""Head counts of the tiny model that tp=2 divides."""

NPU_SIZES = tiny.NPU_SIZES | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
"""Sizes that four NPUs can share, in as few layers as have both kinds."""

TIMEOUT_S = 120


def build(checkpoint: Path, out: Path, mesh: str = "") -> Path:
    """An uncompiled artifact of a checkpoint of these sizes for a mesh."""
    plan = tiny.planned(checkpoint, buckets=(1, 2), prefill=(4,), max_model_len=32, mesh=mesh)
    tiny.built(plan, out, fresh=True)
    return out


def build_npu(checkpoint: Path, out: Path, mesh: str = "") -> Path:
    """An artifact for NPUs of a checkpoint of `NPU_SIZES`: decode batches 1 and 2 with one draft, prefill 4, context 128."""
    plan = tiny.planned_device(checkpoint, mesh=mesh, buckets=(1, 2), max_model_len=128)
    with mock.patch.object(pool, "run", tiny.compile_once):
        driver.build(plan, out, out.parent / "cache", tiny.QUIET, jobs=1)
    return out


def environment(home: Path | None = None, **changes: str) -> dict[str, str]:
    """The environment of a process that a test starts, without what a launcher of the test itself may have set."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    own = {"NPUCOMPILE_HOME": str(home)} if home else {}
    return {**inherited, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1", **own, **changes}


def command(*arguments: object) -> list[str]:
    """`npucompile` in a process of its own."""
    return [sys.executable, "-m", "npucompile.tools.cli", *map(str, arguments)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        return near, far


def next_message(stream: socket.socket) -> RankMessage:
    """The next message that is no heartbeat."""
    while (message := receive(stream)).kind == "heartbeat":
        pass
    return message


def eventually(true: Callable[[], object], seconds: float = 20.0) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not true within {seconds} s"
        time.sleep(0.01)


def finished(process: subprocess.Popen[str], seconds: float = TIMEOUT_S) -> tuple[int, str, str]:
    """Status and output of a process, which is killed if it does not end in time."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"it did not end within {seconds} s; it said {out!r} and {err!r}") from None
    return process.returncode, out, err


def spawn(arguments: Sequence[object], environment: Mapping[str, str], given: bytes = b"") -> subprocess.Popen[str]:
    """Starts a process with its output piped, and `given` as its standard input."""
    with tempfile.TemporaryFile() as stdin:
        stdin.write(given)
        stdin.seek(0)
        pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(list(map(str, arguments)), env=dict(environment), text=True, **pipes)


def children_of(pid: int) -> list[int]:
    """Processes that a process started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
