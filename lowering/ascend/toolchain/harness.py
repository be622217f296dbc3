"""Loads torchair so that it converts graphs in this process, with CANN or without."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import importlib.metadata
import io
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....graphs.errors import LoweringError
from .stubs import INSTALL, cann, find_compiler, stub_libraries, wheel_path

# What converters are told about CANN's release and the chip where there is neither.
ASSUMED_CANN = "8.5.0"
ASSUMED_DEVICE = "Ascend910_9391"
_ASSUMED_SOC = 250
_FOREACH_DEVICES = ("cuda", "xpu", "mtia")
# The distributions that torch_npu and torchair import; their metadata does not list all of them.
DISTRIBUTIONS = ("torch_npu", "protobuf", "packaging", "PyYAML", "numpy")
# What lowering imports besides; it leaves no trace in a graph.
_OWN = ("pyelftools",)
OLDEST_PROTOBUF = 4


@dataclass(frozen=True)
class Torchair:
    """The parts of torchair that conversion uses; its modules have no type annotations.

    Attributes:
        torchair: the package, all of it loaded.
        torch_npu: the package; its `npu::` and torchair's `air::` operators are in `torch.ops`.
        ge: one function per GE op with a Python wrapper.
        ge_pb2: messages of a serialised graph; a graph's bytes are a `ModelDef`.
        register_converter: `register_converter(op)(function)`; replaces an earlier converter of the op.
        get_compiler: `get_compiler(config)(graph_module, example_inputs)`, inside the inputs' FakeTensorMode.
        CompilerConfig: its configuration.
        decompositions: those torchair wants in `make_fx`, by op.
        find_converter: op -> its converter or None; one that only raises counts as a converter.
        cann: how CANN was found, or None where stub libraries replace it.
    """

    torchair: Any
    torch_npu: Any
    ge: Any
    ge_pb2: Any
    register_converter: Callable[[Any], Callable[[Callable[..., Any]], Any]]
    get_compiler: Callable[..., Callable[..., Any]]
    CompilerConfig: Callable[[], Any]
    decompositions: dict[Any, Callable[..., Any]]
    find_converter: Callable[[Any], Any]
    cann: str | None


_LOADED: dict[None, Torchair] = {}


def available(ascend_home: str | None = None) -> str | None:
    """Why graphs cannot be converted to GE here, or None; imports nothing heavy.

    Args:
        ascend_home: where CANN is installed, or None.
    """
    if reason := lacking(installed()):
        return reason
    if cann(ascend_home) is None and not _LOADED:
        try:
            find_compiler()
        except LoweringError as error:
            return str(error)
    return None


def installed() -> dict[str, str]:
    """Versions of the distributions that conversion imports, by name, where installed."""
    versions = {}
    for name in (*DISTRIBUTIONS, *_OWN, "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def lacking(versions: Mapping[str, str]) -> str | None:
    """Why distributions of these versions cannot convert graphs together, or None."""
    if missing := [name for name in (*DISTRIBUTIONS, *_OWN) if name not in versions]:
        return f"lowering to Ascend needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; {INSTALL}"
    if int(versions["protobuf"].split(".")[0]) < OLDEST_PROTOBUF:
        return f"protobuf is {versions['protobuf']}, lowering to Ascend needs {OLDEST_PROTOBUF} or newer; {INSTALL}"
    # A torch_npu release works with the minor version of torch whose number it has.
    ours, torch = versions["torch_npu"], versions.get("torch", "not installed")
    if ours.split(".")[:2] != torch.split(".")[:2]:
        return f"torch_npu is {ours} and torch {torch}: legal is the same version of both; {INSTALL}"
    return None


def load(cache_dir: Path, ascend_home: str | None = None) -> Torchair:
    """Imports torchair so that its converter works in this process; later calls return the same record.

    Without CANN, stub libraries are built in `cache_dir` and loaded, and functions of torchair that ask CANN are replaced.

    Args:
        cache_dir: for the stub libraries.
        ascend_home: where CANN is installed, or None.

    Raises:
        LoweringError: something is missing, versions disagree, or torch_npu cannot be imported.
    """
    if not _LOADED:
        _LOADED[None] = _load(cache_dir, ascend_home)
    return _LOADED[None]


def _load(cache_dir: Path, ascend_home: str | None) -> Torchair:
    if reason := lacking(installed()):
        raise LoweringError(reason)
    installation = cann(ascend_home)
    if installation is None:
        preload(stub_libraries(cache_dir, ascend_home))
    try:
        with _quiet():
            torch_npu = importlib.import_module("torch_npu")
            importlib.import_module("torch_npu.dynamo")
            torchair = importlib.import_module("torchair")
            # The package is lazy: reading an attribute imports it.
            _ = torchair.CompilerConfig
            # Importing this file registers the attention operator that takes lengths as tensors.
            importlib.import_module("torchair.ops._npu_fused_infer_attention_score")
            converter = importlib.import_module("torchair._ge_concrete_graph.fx2ge_converter")
            ge = importlib.import_module("torchair._ge_concrete_graph.ge_apis")
            pb2 = importlib.import_module("torchair._ge_concrete_graph.ge_ir_pb2")
            utils = importlib.import_module("torchair._utils")
            # The first conversion would import these, with SyntaxWarnings where they have not been compiled to bytecode.
            importlib.import_module("torchair.patterns._recover_view_inplace_pattern")
            importlib.import_module("torchair._ge_concrete_graph.graph_pass")
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        raise LoweringError(f"torch_npu at {wheel_path()} cannot be imported: {error}") from error
    if installation is None:
        _replace_cann_queries()
    return Torchair(
        torchair=torchair,
        torch_npu=torch_npu,
        ge=ge,
        ge_pb2=pb2,
        register_converter=torchair.register_fx_node_ge_converter,
        get_compiler=torchair.get_compiler,
        CompilerConfig=torchair.CompilerConfig,
        decompositions=utils.get_npu_default_decompositions(),
        find_converter=converter._get_converter,
        cann=installation,
    )


def preload(libraries: list[Path]) -> None:
    """Loads libraries into the process, so that later loads by their SONAMEs find them.

    Raises:
        LoweringError: one cannot be loaded; the cache is damaged.
    """
    for path in libraries:
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            raise LoweringError(f"{path} cannot be loaded: {error}; remove {path.parent} and it is made again") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the side effects of the import: prints, warnings about torch, and handlers for SIGINT and SIGTERM."""
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for number, handler in handlers.items():
            # A handler that was not set from Python reads as None, and cannot be put back.
            if main and handler is not None:
                signal.signal(number, handler)


def _replace_cann_queries() -> None:
    """Replaces the functions with which conversion queries CANN: the answer of a stub library would crash torchair."""
    replacements: dict[str, Callable[..., Any]] = {
        "torchair._ge_concrete_graph.fx2ge_converter.initialize_graph_engine": lambda *_, **__: None,
        "torchair._ge_concrete_graph.compat_ir.is_cann_compat": lambda *_, **__: "",
        "torchair.core._torchair.get_registered_ir_def": _registered,
        "torch_npu.npu.get_device_name": lambda *_: ASSUMED_DEVICE,
        "torch_npu.op_plugin.meta._meta_registrations.get_soc_version": lambda: _ASSUMED_SOC,
        # Optimizers call this in every step, and torch_npu's version of it queries a device.
        "torch.optim.optimizer._get_foreach_kernels_supported_devices": lambda: list(_FOREACH_DEVICES),
        "torch_npu.npu.utils._is_gte_cann_version": lambda wanted, module="CANN": _release(wanted) <= _release(ASSUMED_CANN),
    }
    for path, replacement in replacements.items():
        module, _, name = path.rpartition(".")
        if not hasattr(sys.modules.get(module), name):
            raise LoweringError(f"torch_npu {wheel_path()} has no {path}; it is of another version than this npucompile was written for")
        setattr(sys.modules[module], name, replacement)
    # It would finalize an engine that was never started.
    atexit.unregister(importlib.import_module("torchair.core._backend").finalize_graph_engine)


def _registered(op_type: str) -> tuple[str, list[Any], list[Any], list[Any]]:
    # torchair tries an op without a converter under its torch name in CamelCase, a name that no CANN registers.
    return "NOT_FOUND" if op_type.startswith("Npu") else "SUCCESS", [], [], []


def _release(version: str) -> tuple[int, ...]:
    """(8, 2) of "8.2.RC1": a release candidate counts as its release."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())
