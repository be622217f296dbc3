"""Turns a flat aten graph into the files of an AOTInductor package, the same bytes for the same graph.

What torch leaves open is pinned here: where caches live, generated names, paths inside the code, the instruction set.
Uses private parts of torch, which is why the project depends on one exact version of it.
"""

from __future__ import annotations

import re
import shlex
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from ....graphs.errors import LoweringError
from . import in_place, native

MODEL = "model"
"""Name of the one model in a package."""

WRAPPER_OPT_LEVEL = "O1"
"""With hundreds of operands -O0 doubles the cost of a call; without the operand checks -O1 compiles as fast as -O0 with them."""


def instruction_set() -> str | None:
    """Architecture level to compile for: as low as torch's own choice of kernels on this CPU, so that the artifact runs on
    every machine of that level; None leaves it to torch where there are no levels.
    """
    levels = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3", "DEFAULT": "x86-64"}
    return levels.get(torch.backends.cpu.get_cpu_capability()) if torch.cpu.get_capabilities().get("architecture") == "x86_64" else None


def cpu_features() -> tuple[str, ...]:
    """CPU features that compiled code uses, by their names in `torch.cpu.get_capabilities()`."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    levels = {
        "x86-64-v3": ("avx2", "bmi", "bmi2", "f16c", "fma3", "lzcnt"),
        "x86-64-v4": ("avx2", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_f", "avx512_vl", "bmi", "bmi2", "f16c", "fma3", "lzcnt"),
    }
    flags = re.findall(r"-m(\S+)", pick_vec_isa().build_arch_flags())
    named = {re.sub(r"^avx512", "avx512_", flag).replace("-", "_").replace("fma", "fma3") for flag in flags}
    known = torch.cpu.get_capabilities()
    return tuple(sorted({*levels.get(instruction_set() or "", ()), *(name for name in named if known.get(name))}))


def compiler() -> tuple[str, str]:
    """Path and version text of the C++ compiler torch will call.

    Raises:
        LoweringError: when there is none.
    """
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise LoweringError(
            "the inductor backend needs a C++ compiler and found none: install g++ (apt install g++) or name one in the variable CXX"
        ) from error
    versions = re.findall(r"(?:gcc|clang) version [^_()]+", get_compiler_version_info(compiler))
    return compiler, versions[-1].strip() if versions else compiler


def compile_files(graph: GraphModule, operands: Sequence[torch.Tensor], name: str, *, cache_dir: Path, threads: int) -> dict[str, bytes]:
    """Compiles a graph for the CPU; state operands the graph writes are written in place by the result too.

    Args:
        graph: flat, aten operators only.
        operands: one tensor per placeholder, real or fake; only shapes, dtypes and strides are read.
        name: letters, digits and underscores; decides paths inside the code, and two compiles at once must not share it.
        cache_dir: absolute; holds headers and probes between compiles.
        threads: specialise loops for that many threads; 0 asks at run time.

    Returns:
        File name to content: the shared library and the metadata that torch's loader reads.

    Raises:
        Exception: whatever torch or the C++ compiler raises.
    """
    import torch._inductor

    target = cache_dir / "graphs" / name
    # Names are fixed, and torch does not write a file that exists: an interrupted compile must leave nothing to be found.
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
    """Inductor's configuration for one compile; the archive of kernels that it links is compiled where it is not there yet.

    Raises:
        LoweringError: the kernels do not compile.
    """
    # Generated code names its own source and torch's headers in error messages: mapped, no path of this machine is left in it.
    # Applied through the architecture flag, the one compiler flag that inductor lets a caller choose; -s strips symbols.
    prefixes = {cache_dir: ".", Path(torch.__file__).parent: "torch"}
    mapped = " ".join(f"-ffile-prefix-map={shlex.quote(str(path))}={name}" for path, name in prefixes.items())
    level = instruction_set() or "native"
    kernels = native.archive(compiler()[0], level, cache_dir)
    return {
        "aot_inductor.package": True,
        "aot_inductor.output_path": str(cache_dir / "graphs" / name),
        # Also the name of torch's lock: a fixed one would let only one process compile at a time.
        "aot_inductor.model_name_for_generated_files": name,
        "aot_inductor.compile_wrapper_opt_level": WRAPPER_OPT_LEVEL,
        "aot_inductor.enable_line_tables": False,
        # A pool that every draft pass writes would otherwise be copied.
        "post_grad_custom_post_pass": in_place.write_in_place,
        # Torch identifies a precompiled header by running the openssl command.
        "aot_inductor.precompile_headers": shutil.which("openssl") is not None,
        # What a package calls of the kernels is linked into it.
        "aot_inductor.custom_ops_to_c_shims": native.shims(),
        "aot_inductor.custom_op_libs": [f":{kernels.name}"],
        "cpp.march": f"{level} {mapped} -s -L{shlex.quote(str(kernels.parent))}",
        "cpp.vec_isa_ok": True,
        "cpp.dynamic_threads": threads == 0,
        "cpp.threads": threads or -1,
    }


@contextmanager
def _settings(cache_dir: Path) -> Iterator[None]:
    """Torch settings that are no options: cache directories, and wrappers without their operand checks."""
    from torch._inductor import codecache
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.runtime import cache_dir_utils

    headers = cache_dir / "headers"
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if cache_dir_utils.cache_dir() != str(cache_dir):
            stack.enter_context(cache_dir_utils.temporary_cache_dir(str(cache_dir)))
        stack.enter_context(_replaced(codecache, "_HEADER_DIR", str(headers)))
        stack.enter_context(_replaced(codecache, "_HEADER_LOCK_DIR", str(headers / "locks")))
        # A third of the generated C++ checks operands, and only when an environment variable says so; check_operands does it here.
        stack.enter_context(_replaced(CppWrapperCpu, "generate_input_output_runtime_checks", _no_checks))
        yield


def _no_checks(wrapper: Any) -> None:
    wrapper.prefix.splice(
        """
        static constexpr bool _check_aoti_runtime_check_inputs_env() { return false; }
        static inline void __check_inputs_outputs(AtenTensorHandle*, AtenTensorHandle*) {}
        """
    )


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
