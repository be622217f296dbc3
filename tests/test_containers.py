"""docs/container: files of images are without faults of a linter, and what the one for CPUs runs works in a plain environment."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support import wheels

from npucompile.server.engine.lifecycle import Lifecycle
from npucompile.server.pages import probes
from npucompile.tools.commands import serve

FOLDER = wheels.ROOT / "docs/container"
FILES = sorted(FOLDER.glob("*.Dockerfile"))
HADOLINT = Path(sys.executable).with_name("hadolint")
READY_S = 400.0


def instructions(file: Path) -> list[tuple[str, str]]:
    """Instructions with their arguments, on one line each; comments are left out."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(name, rest) for line in joined.splitlines() if line.strip() for name, _, rest in [line.partition(" ")]]


def only(file: Path, name: str) -> str:
    (found,) = (rest for each, rest in instructions(file) if each == name)
    return found


def health(file: Path) -> list[str]:
    words: list[str] = json.loads(only(file, "HEALTHCHECK").partition(" CMD ")[2])
    return words


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_linter_finds_nothing(file: Path, tmp_path: Path) -> None:
    done = subprocess.run([HADOLINT, "--no-color", file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    worse = tmp_path / "worse.Dockerfile"
    worse.write_text(re.sub(r"(?m)^USER 10001$", "USER root", file.read_text()))
    assert "DL3002" in subprocess.run([HADOLINT, "--no-color", worse], capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_image_serves_as_nobody_and_says_how_it_is(file: Path) -> None:
    command, *words = json.loads(only(file, "CMD"))
    assert command == "serve"
    options = serve.command.make_context("serve", words).params
    assert (options["host"], str(options["port"])) == ("0.0.0.0", only(file, "EXPOSE"))
    (path,) = re.findall(rf"http://127\.0\.0\.1:{options['port']}(/\w+)", " ".join(health(file)))
    assert path in {route.path for route in probes.routes(Lifecycle(), lambda: 0)}
    assert only(file, "USER") == "10001"
    assert not [rest for name, rest in instructions(file) if name in ("ARG", "ENV") and re.search(r"key|token|secret|password", rest, re.I)]


def test_the_image_for_npus_installs_an_extra_that_there_is_and_passes_its_arguments(tmp_path: Path) -> None:
    file = FOLDER / "npu.Dockerfile"
    arguments = dict(rest.partition("=")[::2] for name, rest in instructions(file) if name == "ARG")
    extras = tomllib.loads((wheels.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*arguments["EXTRAS"].split(","), "kv-transfer-npu"} <= set(extras)
    (tool := tmp_path / "npucompile").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    tool.chmod(0o755)
    words = [*json.loads(only(file, "ENTRYPOINT")), *json.loads(only(file, "CMD")), "a b"]
    done = subprocess.run(words, env={"PATH": f"{tmp_path}:{os.defpath}"}, capture_output=True, text=True, check=True)
    assert done.stdout == "serve|--host|0.0.0.0|a b|"


@pytest.mark.long
def test_what_the_image_for_cpus_runs_serves(tmp_path: Path) -> None:
    """Its installation, from a wheel into an environment that has the dependencies alone, its command and its health check.

    The packages of the system and the user are the image's own: they need root.
    """
    file = FOLDER / "cpu.Dockerfile"
    venv, dist = tmp_path / "venv", tmp_path / "dist"
    dist.mkdir()
    (tmp_path / "built").mkdir()
    wheel = wheels.built(tmp_path / "built")
    wheel.rename(dist / wheel.name)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    (purelib,) = venv.glob("lib/python*/site-packages")
    dependencies = tmp_path / "dependencies"
    dependencies.mkdir()
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        # All but an editable installation of the tree.
        if "npucompile" not in package.name:
            (dependencies / package.name).symlink_to(package)
    # Before the environment's own packages, of which setuptools may be too old.
    (purelib / "dependencies.pth").write_text(f"import sys; sys.path.insert(1, {str(dependencies)!r})\n")
    environment = {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path), "NPUCOMPILE_HOME": str(tmp_path / "home"),
                   "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1"}  # fmt: skip
    (install,) = (rest for name, rest in instructions(file) if name == "RUN" and "pip install" in rest)
    steps = re.sub(r"--mount=\S+", "", install).replace("/dist/", f"{dist}/")
    subprocess.run(["sh", "-c", steps], env=environment, cwd=tmp_path, check=True, capture_output=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    check = [word.replace(f":{only(file, 'EXPOSE')}/", f":{port}/") for word in health(file)]

    def healthy() -> bool:
        return subprocess.run(check, env=environment, check=False, capture_output=True).returncode == 0

    assert not healthy()
    words = [*json.loads(only(file, "ENTRYPOINT")), *json.loads(only(file, "CMD")), "--port", port]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(words, env=environment, cwd=tmp_path, stderr=log) as server:
        try:
            awaited(server, f"http://127.0.0.1:{port}/ready")
            assert healthy()
            said = (tmp_path / "log").read_text()
            server.send_signal(signal.Signals[only(file, "STOPSIGNAL")])
            assert server.wait(60) == 0, said
        finally:
            server.kill()


def awaited(server: subprocess.Popen[bytes], url: str) -> None:
    """Waits until a URL answers 200."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        assert server.poll() is None
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.5)
    raise AssertionError(f"{url} is not ready after {READY_S} s")
