"""Compiles a graph for a GPU with AOTInductor, on the machine that has the GPU."""

from __future__ import annotations

import importlib.util
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from ...graphs import compile_count
from ...graphs.errors import LoweringError
from ..artifact import graph_io
from ..backends.inductor import in_place

MODEL = "model"
"""Name of the one model in a package."""


def options(name: str, directory: Path) -> dict[str, Any]:
    """Inductor's configuration for one compile.

    Args:
        name: letters, digits and underscores; graphs that are compiled at the same time have different ones.
    """
    return {
        "aot_inductor.package": True,
        "aot_inductor.output_path": str(directory),
        "aot_inductor.model_name_for_generated_files": name,
        # Without this pass a pool that is written several times, once per draft, is copied; the same one serves the CPU.
        "post_grad_custom_post_pass": in_place.write_in_place,
        # The device captures the whole step; inductor's own CUDA graphs are for torch.compile.
        "triton.cudagraphs": False,
    }


def lacking() -> str | None:
    """What compiling for a GPU needs and this machine lacks; None where all is there."""
    if importlib.util.find_spec("triton") is None:
        return "compiling for a GPU needs triton, and this Python has none; install the release that torch's CUDA wheel asks for"
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None:
        release = torch.version.cuda or "of a release that torch's CUDA wheels are built for"
        return f"compiling for a GPU needs the CUDA toolkit, and this machine has none; install CUDA {release} and set CUDA_HOME"
    return None


def graph_of_reads(graph: bytes, reads: Sequence[int]) -> GraphModule:
    """A serialised graph whose placeholders are the operands that it reads, without recorded values."""
    module = graph_io.decode(graph)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for position, node in enumerate(placeholders):
        if position not in reads:
            module.graph.erase_node(node)
    module.recompile()
    return module


def compile_package(graph: bytes, reads: Sequence[int], name: str, directory: Path, device: torch.device) -> Path:
    """Compiles a graph into a package that torch's loader reads.

    Args:
        graph: serialised, as in a `.cuda` file.
        reads: operands that it reads, in order; the package takes these alone.
        directory: of the package and of what the compiler writes; existing.

    Raises:
        LoweringError: naming what is missing, or quoting the compiler's error.
    """
    if reason := lacking():
        raise LoweringError(reason)
    from torch._inductor import aot_compile
    from torch._inductor.package.package import package_aoti

    module = graph_of_reads(graph, reads)
    with FakeTensorMode():
        values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
        operands = [torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device) for value in values]
    # Inductor would take recorded values for its operands.
    for node in module.graph.nodes:
        node.meta.clear()
    work = directory / name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    compile_count.record("compile")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            files = aot_compile(module, tuple(operands), options=options(name, work))
        assert isinstance(files, list)
        package = Path(str(package_aoti(str(directory / f"{name}.building.pt2"), {MODEL: files})))
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise LoweringError(f"inductor could not compile {name}: {type(error).__name__}: {lines[0] if lines else 'no message'}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return package
