from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from npucompile.tools.lab.peers import process as processes
from npucompile.tools.lab.peers.process import NotInstalled, PeerError, PeerProcess

BUSY = """
import json, sys, threading
threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
print(json.dumps({"version": 3}), flush=True)
for line in sys.stdin:
    print(json.dumps({"echo": json.loads(line)}), flush=True)
"""


def child(code: str) -> PeerProcess:
    return PeerProcess([sys.executable, "-c", code], os.environ)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_process_runs_only_while_it_owes_an_answer() -> None:
    with child(BUSY) as peer:
        pid = peer._process.pid
        assert peer.version == "3"
        assert peer.ask("sing", tune=[1, 2]) == {"echo": {"do": "sing", "tune": [1, 2]}}
        deadline = time.monotonic() + 30
        while state(pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        before = processor_s(pid)
        time.sleep(0.2)
        assert processor_s(pid) == before
        assert peer.ask("again") == {"echo": {"do": "again"}}
    assert not Path(f"/proc/{pid}").exists()


def test_a_process_that_ends_says_how() -> None:
    code = "print('{\"version\": 1}', flush=True); input(); import os; os.write(2, b'out of memory'); os._exit(9)"
    with child(code) as peer:
        with pytest.raises(PeerError, match="ended with status 9: out of memory"):
            peer.ask("load")
        with pytest.raises(PeerError, match="ended with status 9"):
            peer.ask("load")


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ('{"missing": "No module named vllm"}', NotInstalled, ": No module named vllm"),
        ("Welcome!", PeerError, r"answered 'Welcome!\\n'; legal is one JSON object a line"),
        ("[1]", PeerError, "legal is one JSON object a line"),
        ('{"loaded": ""}', PeerError, "legal is its version"),
    ],
)
def test_another_first_line_is_refused(line: str, error: type[PeerError], message: str) -> None:
    with pytest.raises(error, match=message):
        child(f"print({line!r}, flush=True); input()")


def test_an_error_of_the_engine_is_the_reason_in_one_line() -> None:
    code = 'print(\'{"version": 1}\', flush=True); input(); print(\'{"error": "ValueError: no\\\\n such model"}\', flush=True); input()'
    with child(code) as peer, pytest.raises(PeerError, match=r"^ValueError: no such model$"):
        peer.ask("load")


def test_a_stopped_process_does_not_outlive_its_parent(tmp_path: Path) -> None:
    loop = Path(processes.__file__).with_name("loop.py")
    (tmp_path / "adapter.py").write_text("class E:\n    version = '1'\ndef open_engine():\n    return E()\n")
    parent = (
        "import os; from npucompile.tools.lab.peers.process import PeerProcess\n"
        f"peer = PeerProcess([{sys.executable!r}, '-I', {str(loop)!r}, {str(tmp_path / 'adapter.py')!r}], os.environ)\n"
        "print(peer._process.pid, flush=True); os._exit(0)"
    )
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    run = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True, env=environment)
    pid = int(run.stdout)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and state(pid) != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists() or state(pid) == "Z"
