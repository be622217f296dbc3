"""lowering/backends/inductor/aoti.py: everything that decides a package's bytes is fixed; torch's settings are restored."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
import torch
from torch._inductor import config, cpp_builder

from npucompile.graphs.errors import LoweringError
from npucompile.lowering import isa
from npucompile.lowering.backends.inductor import aoti, native


@pytest.fixture(autouse=True)
def archive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the archive of kernels, which test_native.py tests."""
    monkeypatch.setattr(native, "archive", lambda compiler, level, cache_dir: cache_dir / "native" / f"kernels-{level}.a")


def capability(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: name)


X86 = torch.cpu.get_capabilities().get("architecture") == "x86_64"


@pytest.mark.skipif(not X86, reason="levels are x86-64's")
@pytest.mark.parametrize(("name", "level"), [("AVX512", "x86-64-v4"), ("AVX2", "x86-64-v3"), ("DEFAULT", "x86-64"), ("NEW", None)])
def test_code_is_for_a_level_and_not_for_one_machine(monkeypatch: pytest.MonkeyPatch, name: str, level: str | None) -> None:
    capability(monkeypatch, name)
    every = {feature: True for each in isa.LEVELS.values() for feature in each.features}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", **every})
    assert aoti.instruction_set() == level


def test_a_machine_has_the_features_that_are_compiled_for() -> None:
    known = torch.cpu.get_capabilities()
    assert all(known.get(name) is True for name in aoti.cpu_features())
    assert list(aoti.cpu_features()) == sorted(set(aoti.cpu_features()))


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs a CPU with AVX512")
def test_a_level_names_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"avx512_f", "avx512_vl", "fma3", "bmi2"} <= set(aoti.cpu_features())


def test_the_compiler_is_named_with_its_version() -> None:
    path, version = aoti.compiler()
    assert path
    assert any(character.isdigit() for character in version)


def test_a_variable_with_words_is_named() -> None:
    """torch runs what CXX says as one program, and says nothing of it."""
    cpp_builder.cpp_compiler_search.cache_clear()
    words = config.patch({"cpp.cxx": (None, "ccache g++")})
    with words, pytest.raises(LoweringError, match=r"found none: CXX is 'ccache g\+\+', which is no program; legal is one name or path"):
        aoti.compiler()
    cpp_builder.cpp_compiler_search.cache_clear()


def test_a_missing_compiler_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.cpp_builder as builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(builder, "get_cpp_compiler", none)
    with pytest.raises(LoweringError, match="needs a C\\+\\+ compiler and found none: install g\\+\\+"):
        aoti.compiler()


@pytest.mark.parametrize(("threads", "dynamic", "fixed"), [(0, True, -1), (1, False, 1), (4, False, 4)])
def test_threads_are_asked_for_or_fixed(threads: int, dynamic: bool, fixed: int) -> None:
    options = aoti.options(Path("/cache"), "g_1", threads)
    assert (options["cpp.dynamic_threads"], options["cpp.threads"]) == (dynamic, fixed)


def test_paths_are_mapped_away_even_with_blanks_in_them() -> None:
    flags = shlex.split(f"-march={aoti.options(Path('/my cache'), 'g_1', 0)['cpp.march']}")
    assert "-ffile-prefix-map=/my cache=." in flags
    assert flags[0].startswith("-march=")


def test_packages_are_linked_with_the_kernels_of_their_architecture() -> None:
    options = aoti.options(Path("/my cache"), "g_1", 0)
    architecture, *flags = shlex.split(options["cpp.march"])
    assert options["aot_inductor.custom_op_libs"] == [f":kernels-{architecture}.a"]
    assert "-L/my cache/native" in flags
    assert options["aot_inductor.custom_ops_to_c_shims"] == native.shims()


@pytest.mark.parametrize(("openssl", "headers"), [(None, False), ("/usr/bin/openssl", True)])
def test_headers_are_precompiled_only_where_torch_can(monkeypatch: pytest.MonkeyPatch, openssl: str | None, headers: bool) -> None:
    monkeypatch.setattr(aoti.shutil, "which", lambda name: openssl)
    assert aoti.options(Path("/cache"), "g_1", 0)["aot_inductor.precompile_headers"] is headers


def test_an_interrupted_compile_leaves_torch_and_the_cache_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor
    from torch._inductor import codecache
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    before = (cache_dir(), codecache._HEADER_DIR, CppWrapperCpu.generate_input_output_runtime_checks)
    names = []

    def interrupted(graph: object, operands: object, options: object) -> None:
        names.append((cache_dir(), codecache._HEADER_DIR, [p.name for p in (tmp_path / "graphs").iterdir()]))
        raise KeyboardInterrupt

    monkeypatch.setattr(torch._inductor, "aot_compile", interrupted)
    (tmp_path / "graphs" / "g_1").mkdir(parents=True)
    (tmp_path / "graphs" / "g_1" / "left.cpp").write_text("of an earlier compile")
    with pytest.raises(KeyboardInterrupt):
        aoti.compile_files(torch.fx.GraphModule({}, torch.fx.Graph()), [], "g_1", cache_dir=tmp_path, threads=0)
    assert names == [(str(tmp_path), str(tmp_path / "headers"), ["g_1"])]
    assert (cache_dir(), codecache._HEADER_DIR, CppWrapperCpu.generate_input_output_runtime_checks) == before
    assert os.listdir(tmp_path / "graphs") == []


def test_vectors_whose_flags_the_compiler_does_not_know_are_none_of_its_vectors() -> None:
    class Vectors:
        def __init__(self, flags: str) -> None:
            self.build_arch_flags = lambda: flags

    assert aoti._compiles(Vectors(""), "")
    assert not aoti._compiles(Vectors("-mno-such-vectors"), "")
