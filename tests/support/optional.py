"""What a test needs beside the package: missing it is a skip that says how to get it, and a failure where CI should have brought it.

`.ci/run` sets `CI_COULD_NOT_INSTALL` to the names of what the machine's package manager did not give it, and says so aloud.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

CLIENTS = Path(__file__).resolve().parents[2] / ".venv-clients"
"""Clients that nobody here wrote, and the tests that run them."""
PYTHON = CLIENTS / "bin" / "python"
RUNS_CLIENTS = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="`make clients` installs the clients that nobody here wrote; CI does"),
]

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def needs_module(name: str, brought_by: str) -> None:
    """Skips the test where a module is not installed."""
    try:
        found = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        _missing(f"{name} is not installed: {brought_by}")


def browser() -> str:
    """Path of a Chromium; skips the test where there is none."""
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        _missing("no Chromium is installed: apt-get install chromium", "chromium")
    return str(path)


def curl() -> str:
    """Path of curl; skips the test where there is none."""
    return _program("curl", "curl")


def haproxy() -> str:
    """Path of haproxy; skips the test where there is none."""
    return _program("haproxy", "haproxy")


def nginx() -> str:
    """Path of nginx; skips the test where there is none."""
    return _program("nginx", "nginx-light")


def transfer_engine() -> None:
    """Skips the test where Mooncake's transfer engine cannot be imported."""
    needs_module("mooncake", "the extra kv-transfer")
    if ctypes.util.find_library("ibverbs") is None:
        _missing("Mooncake's transfer engine needs libibverbs: apt-get install libibverbs1", "libibverbs1")


def has_transfer_engine() -> bool:
    """Whether it can be imported, for a test that judges more than what it does."""
    try:
        transfer_engine()
    except pytest.skip.Exception:
        return False
    return True


def network_namespaces() -> None:
    """Skips the test where this process cannot make network namespaces."""
    lacking = [name for name in ("ip", "unshare", "hostname") if shutil.which(name) is None]
    if lacking:
        _missing(f"network namespaces need {' and '.join(lacking)}: apt-get install iproute2 util-linux hostname", "network-namespaces")
    probe = ["unshare", "--net", "ip", "link", "add", "probe", "type", "bridge"]
    # `ip netns` mounts what `unshare` does not need, and wants root itself.
    if os.geteuid() != 0 or subprocess.run(probe, capture_output=True, check=False).returncode:
        _missing("this process may not make network namespaces: root with CAP_NET_ADMIN and CAP_SYS_ADMIN may", "network-namespaces")


def _program(name: str, package: str) -> str:
    # Debian keeps servers where only root looks.
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if path is None:
        _missing(f"{name} is not installed: apt-get install {package}", package)
    return str(path)


def _missing(what: str, package: str = "") -> None:
    if os.environ.get("CI") and (not package or package not in os.environ.get("CI_COULD_NOT_INSTALL", "").split()):
        pytest.fail(what)
    pytest.skip(what)
