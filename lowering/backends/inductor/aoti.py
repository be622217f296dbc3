"""Reproducible AOTInductor compiles: turns a flat aten graph into the library of a body, with equal bytes for equal graphs.

Torch does not fix the location of its caches, generated names, paths inside the code and the instruction set; this file does.
It uses private parts of torch, so the project depends on one exact version of torch.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.fx import GraphModule

from ....graphs.errors import LoweringError
from ... import isa
from . import in_place, native, shortcuts

MODEL = "model"
"""Name of the one model in a package."""

WRAPPER_OPT_LEVEL = "O1"
"""With hundreds of operands -O0 doubles the cost of a call; without operand checks -O1 compiles as fast as -O0 does with them."""


def instruction_set() -> str | None:
    """Architecture level to compile for: that of torch's own kernels on this CPU, so that the artifact runs on every machine of that
    level. None on architectures without levels, where torch chooses.
    """
    level = isa.in_use()
    return isa.LEVELS[level].march if level else None


def cpu_features() -> tuple[str, ...]:
    """CPU features that compiled code may use, by their names in `torch.cpu.get_capabilities()`."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    with _vectors():
        flags = re.findall(r"-m(\S+)", pick_vec_isa().build_arch_flags())
    named = {re.sub(r"^avx512", "avx512_", flag).replace("-", "_").replace("fma", "fma3") for flag in flags}
    return tuple(sorted({*isa.compiled_features(), *(named & isa.features())}))


def compiler() -> tuple[str, str]:
    """Path and version text of the C++ compiler that torch will call.

    Raises:
        LoweringError: when there is none.
    """
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        path = get_cpp_compiler()
    except InvalidCxxCompiler as error:
        named = config.cpp.cxx[-1]
        why = "install g++ (apt install g++) or name one in the variable CXX"
        if named != "g++":
            why = f"CXX is {named!r}, which is no program; legal is one name or path, without options and without what wraps it"
        raise LoweringError(f"the inductor backend needs a C++ compiler and found none: {why}") from error
    versions = re.findall(r"(?:gcc|clang) version [^_()]+", get_compiler_version_info(path))
    return path, versions[-1].strip() if versions else path


def compile_files(graph: GraphModule, operands: Sequence[torch.Tensor], name: str, *, cache_dir: Path, threads: int) -> dict[str, bytes]:
    """Compiles a graph for the CPU; the compiled code, too, writes in place the state operands that the graph writes.

    Args:
        graph: flat, aten and native operators only.
        operands: one tensor per placeholder, real or fake; only shapes, dtypes and strides are read.
        name: letters, digits and underscores; part of paths inside the code; concurrent compiles must have different names.
        cache_dir: absolute; keeps headers and probes between compiles.
        threads: number of threads that loops are specialised for; 0 asks at run time.

    Returns:
        File name to content: the shared library, which exports the functions of lowering/cpp/stitched/body.h, and torch's metadata.

    Raises:
        Exception: any error of torch or the C++ compiler.
    """
    import torch._inductor

    target = cache_dir / "graphs" / name
    # File names are fixed and torch keeps a file that exists, so files of an interrupted compile must be deleted.
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    try:
        with _settings(cache_dir):
            files = torch._inductor.aot_compile(graph, tuple(operands), options=options(cache_dir, name, threads))
        assert isinstance(files, list)
        paths = [Path(file) for file in files if isinstance(file, str)]
        return {path.name: path.read_bytes() for path in paths if path.suffix in (".so", ".json")}
    finally:
        shutil.rmtree(target, ignore_errors=True)


def options(cache_dir: Path, name: str, threads: int) -> dict[str, Any]:
    """Inductor's configuration for one compile. Compiles the archive of kernels that packages link if it is not in the cache.

    Raises:
        LoweringError: the kernels do not compile.
    """
    # Error messages in generated code contain the paths of its source and of torch's headers; -ffile-prefix-map removes this
    # machine's paths. It goes into the architecture flag, the only compiler flag that inductor lets a caller set; -s strips symbols.
    prefixes = {cache_dir: ".", Path(torch.__file__).parent: "torch"}
    mapped = " ".join(f"-ffile-prefix-map={shlex.quote(str(path))}={name}" for path, name in prefixes.items())
    level = instruction_set() or "native"
    kernels = native.archive(compiler()[0], level, cache_dir)
    return {
        "aot_inductor.package": True,
        "aot_inductor.output_path": str(cache_dir / "graphs" / name),
        # Also the name of torch's lock file: with one name for all, only one process could compile at a time.
        "aot_inductor.model_name_for_generated_files": name,
        "aot_inductor.compile_wrapper_opt_level": WRAPPER_OPT_LEVEL,
        "aot_inductor.enable_line_tables": False,
        # Without this pass a pool that is written several times, once per draft, is copied.
        "post_grad_custom_post_pass": in_place.write_in_place,
        # Torch runs the openssl command to identify a precompiled header.
        "aot_inductor.precompile_headers": shutil.which("openssl") is not None,
        # The kernels that a package calls are linked into it.
        "aot_inductor.custom_ops_to_c_shims": native.shims(),
        "aot_inductor.custom_op_libs": [f":{kernels.name}"],
        "cpp.march": f"{level} {mapped} -s -L{shlex.quote(str(kernels.parent))}",
        "cpp.vec_isa_ok": True,
        "cpp.dynamic_threads": threads == 0,
        "cpp.threads": threads or -1,
    }


@contextmanager
def _settings(cache_dir: Path) -> Iterator[None]:
    """Sets for one compile what torch has no options for: cache directories, wrappers without operand checks, and what they export."""
    from torch._inductor import codecache, lowering
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.runtime import cache_dir_utils

    headers = cache_dir / "headers"
    with ExitStack() as stack:
        stack.enter_context(_vectors())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(shortcuts.taken())
        if cache_dir_utils.cache_dir() != str(cache_dir):
            stack.enter_context(cache_dir_utils.temporary_cache_dir(str(cache_dir)))
        stack.enter_context(patch.object(codecache, "_HEADER_DIR", str(headers)))
        stack.enter_context(patch.object(codecache, "_HEADER_LOCK_DIR", str(headers / "locks")))
        # A third of the generated C++ would check operands, if an environment variable is set; `check_operands` does so instead.
        stack.enter_context(patch.object(CppWrapperCpu, "generate_input_output_runtime_checks", _no_checks))
        stack.enter_context(patch.object(CppWrapperCpu, "_write_aoti_interface_header", _body_interface))
        stack.enter_context(patch.object(codecache, "_get_cpp_wrapper_header", lambda device, aot_mode=False: str(native.PREFIX)))
        # Its own rule, for GPUs, asks first whether there are fewer than 32,767 elements, and then calls the same function.
        stack.enter_context(patch.dict(lowering.lowerings, {torch.ops.aten.sort.stable: lowering.sort_fallback}))
        yield


@contextmanager
def _vectors() -> Iterator[None]:
    """Hides from torch's choice of vectors those that need hidden features: its own switch hides widths only."""
    from torch._inductor import cpu_vec_isa

    hidden = set(torch.cpu.get_capabilities()) - isa.features() if isa.ISA else set()

    def legal(known: Sequence[Any]) -> list[Any]:
        return [vectors for vectors in known if not hidden & set(str(vectors).split())]

    known = patch.object(cpu_vec_isa, "supported_vec_isa_list", legal(cpu_vec_isa.supported_vec_isa_list))
    # Torch would compile and load a library for each before it says that it is valid, which takes 2 s.
    with known, patch.object(cpu_vec_isa.VecISA, "check_build", _compiles):
        valid = legal(cpu_vec_isa.valid_vec_isa_list())
    with patch.object(cpu_vec_isa, "valid_vec_isa_list", lambda: valid):
        yield


def _compiles(vectors: Any, code: str) -> bool:
    """Whether the compiler knows the flags of vectors, which this processor has."""
    command = [compiler()[0], *shlex.split(vectors.build_arch_flags()), "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _no_checks(wrapper: Any) -> None:
    wrapper.prefix.splice(
        """
        static constexpr bool _check_aoti_runtime_check_inputs_env() { return false; }
        static inline void __check_inputs_outputs(AtenTensorHandle*, AtenTensorHandle*) {}
        """
    )


def _body_interface(wrapper: Any) -> None:
    wrapper.header.splice(native.BODY.read_text(encoding="utf-8"))
