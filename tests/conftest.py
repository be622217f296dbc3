"""Settings of torch and hypothesis for tests, and shared fixtures."""

from __future__ import annotations

import contextlib
import difflib
import functools
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# Set before torch is imported, which fails where torch_npu is installed without CANN (npucompile's __init__.py does the same).
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# Containers often set it, and without `make` nobody unsets it: every process that a test starts would compile all of torch, for 2 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import torch
from support import examples, ranks, servers, tiny
from support import kernels as native_kernels
from support.once import made_once
from transformers.utils import import_utils

# Workers of pytest-xdist share the cores; alone, a process may take two.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, torch.get_num_threads()))

# Where torch_npu is installed without CANN, transformers would import it and fail; here it is the oracle on the CPU.
_available = import_utils._is_package_available
import_utils._is_package_available = lambda name, *rest, **named: (
    (False, "N/A") if name == "torch_npu" else _available(name, *rest, **named)
)

examples.register()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    examples.seed(config)  # before hypothesis reads the option


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    examples.scale_all(items)
    examples.mark_long_cases(items)


def pytest_collection_finish() -> None:
    # Modules and tests stay to the end: each collection of garbage that looked through all of them would take a second or two. Graphs
    # and their texts are seldom garbage, so that collections after every 700 objects find little, too.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.write_line(f"property tests drew their examples with {examples.repeated_by(config)}")


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.getoption("--say-what-ran") and (reporter := config.pluginmanager.get_plugin("terminalreporter")):
        print(examples.what_ran(reporter.stats, config))


@pytest.fixture(scope="session")
def courses() -> Callable[[str], Any]:
    """`speculators.Course` by the model's name in oracle.py, made once per model; not to be changed."""
    from support import oracle, speculators  # after transformers has been told that there is no torch_npu

    return functools.cache(lambda name: speculators.Course(oracle.drafting(name)))


@pytest.fixture(scope="session")
def kernels() -> Iterator[ModuleType]:
    """tests/support/kernels.py, with every native operator bound for the session."""
    native_kernels.bind()
    yield native_kernels
    native_kernels.unbind()


def _variant_case(level: str, variant: int) -> Any:
    """The level that is not this machine's own has kernels of its own to compile, of the same source."""
    marks = () if level == native_kernels.LEVELS[0] else (pytest.mark.long,)
    return pytest.param((level, variant), id=f"{level}-{variant}", marks=marks)


@pytest.fixture(scope="module", params=[_variant_case(*case) for case in native_kernels.every_variant()])
def variant(request: pytest.FixtureRequest, kernels: ModuleType) -> Iterator[ModuleType]:
    """The kernels at each level that packages are compiled for, in each variant that this machine runs."""
    level, most = request.param
    with kernels.compiled_for(level), kernels.limited(most) as used:
        if used != most:
            pytest.skip(f"this CPU runs variant {used} at most")
        yield kernels


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint directory of two layers whose draft head is now and then right; not to be changed."""
    folder = made_once(tmp_path_factory, "checkpoint", lambda to: tiny.write_checkpoint(to / "tiny", seed=7, agreeing=True))
    return folder / "tiny"


@pytest.fixture(scope="session")
def tiny_artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint built uncompiled in float32: decode batches 1, 2, 4, three drafts, prefill 4 and 16, context 64; not to be changed."""
    return made_once(tmp_path_factory, "artifact", lambda to: tiny.built(tiny.planned(tiny_checkpoint), to / "tiny")) / "tiny"


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Artifacts of one random checkpoint by mesh, "" being one device; built once, not to be changed."""
    return _by_mesh(tmp_path_factory, "sharded", ranks.build, **ranks.SIZES)


@pytest.fixture(scope="session")
def npu_artifact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Artifacts of one random mixture of experts for NPUs by mesh, "" being one device; built once, not to be changed."""
    return _by_mesh(tmp_path_factory, "npu", ranks.build_npu, seed=7, agreeing=True, **ranks.NPU_SIZES)


def _by_mesh(factory: pytest.TempPathFactory, name: str, build: Callable[[Path, Path, str], Path], **sizes: Any) -> Callable[[str], Path]:
    """Artifacts of one random checkpoint of these sizes."""
    checkpoint = made_once(factory, f"{name}-checkpoint", lambda to: tiny.write_checkpoint(to / "checkpoint", **sizes)) / "checkpoint"

    def find(mesh: str) -> Path:
        out = f"mesh-{mesh}"
        return made_once(factory, f"{name}-{out}", lambda to: build(checkpoint, to / out, mesh)) / out

    return functools.cache(find)


@pytest.fixture
def server() -> Iterator[Callable[..., servers.Server]]:
    """Starts `servers.Server`s, and ends them after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(contextlib.closing(servers.Server(*arguments, **options)))


@pytest.fixture
def own_artifact(tiny_artifact: Path, tmp_path: Path) -> Path:
    """A copy of `tiny_artifact` that the test may change, where `npucompile` looks for artifacts if NPUCOMPILE_HOME is `tmp_path`."""
    return Path(tiny.copied(tiny_artifact, tmp_path / "artifacts" / "tiny"))


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores torch's thread count, which ranks divide among themselves."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def face_home(monkeypatch: pytest.MonkeyPatch) -> Path:
    """$NPUCOMPILE_HOME of functions that are compiled; its cache of kernels and stub libraries is kept for later runs."""
    home = Path(tempfile.gettempdir()) / f"npuc-face-{os.getuid()}"
    native_kernels.keep_native(home / "cache")
    monkeypatch.setenv("NPUCOMPILE_HOME", str(home))
    return home


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend of `tiny.Stub`, known under its name in this process."""
    return tiny.Stub().install(monkeypatch)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the code makes now")
    parser.addoption("--say-what-ran", action="store_true", help="print the numbers of tests that ran as the last line")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares text with the file of that name in tests/golden, or writes it there under --update-golden."""

    def compare(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if not path.is_file():
            pytest.fail(f"{path} does not exist; --update-golden writes it")
        stored = path.read_text(encoding="utf-8")
        if stored != text:
            lines = (stored.splitlines(keepends=True), text.splitlines(keepends=True))
            difference = "".join(difflib.unified_diff(*lines, f"golden/{name}.txt", "made now"))
            pytest.fail(f"{difference}\nif this is meant: pytest --update-golden, and read the diff of what it writes", pytrace=False)

    return compare
