"""lowering/toolchain.py: differences between the building and the running machine are named with both values."""

from __future__ import annotations

import importlib.metadata
import platform

import pytest
import torch

import npucompile
from npucompile.lowering import toolchain as module
from npucompile.lowering.backend import Backend, backend
from npucompile.lowering.toolchain import differences, missing_features, toolchain


def test_versions_are_this_process() -> None:
    assert toolchain() == {"npucompile": npucompile.__version__, "torch": torch.__version__, "machine": platform.machine()}


def test_nothing_differs_from_itself() -> None:
    assert differences(toolchain()) == []


@pytest.mark.parametrize("field", ["npucompile", "torch", "machine"])
def test_a_difference_is_named(field: str) -> None:
    assert differences({**toolchain(), field: "other"}) == [(field, "other", toolchain()[field])]


def test_fields_of_one_side_only_differ() -> None:
    built = toolchain()
    del built["torch"]
    assert differences({**built, "cann": "8.5"}) == [("cann", "8.5", "not installed"), ("torch", "not recorded", str(torch.__version__))]


def test_what_only_some_backends_build_with_is_compared_with_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = importlib.metadata.version("protobuf")
    assert differences({**toolchain(), "protobuf": here}) == []
    assert differences({**toolchain(), "protobuf": "1.0"}) == [("protobuf", "1.0", here)]

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module.importlib.metadata, "version", absent)
    assert differences({**toolchain(), "torch_npu": "2.13.0"}) == [("torch_npu", "2.13.0", "not installed")]


def test_what_knows_no_processor_opens_on_another_and_only_with_the_torch_npu_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ge, inductor = backend("ge"), backend("inductor")
    there = {"torch_npu": "2.13.0", "protobuf": "6.0", "numpy": "2.0"}
    monkeypatch.setattr(module, "_installed", there.__getitem__)
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    built = {**toolchain(), **there, "machine": "x86_64", "torch": "2.13.0+cpu", "protobuf": "5.0", "numpy": "1.26"}

    def of(chosen: Backend, built: dict[str, str]) -> list[tuple[str, str, str]]:
        return differences(built, host_bound=chosen.host_bound, build_only=chosen.build_only)

    assert of(ge, built) == []
    assert of(ge, {**built, "torch_npu": "2.12.0"}) == [("torch_npu", "2.12.0", "2.13.0")]
    assert of(ge, {**built, "torch": "2.12.0+cpu"}) == [("torch", "2.12.0", "2.13.0")]
    assert [name for name, *_ in of(inductor, built)] == ["machine", "numpy", "protobuf", "torch"]


def test_features_of_this_cpu_are_not_missing() -> None:
    here = [name for name, value in torch.cpu.get_capabilities().items() if value is True]
    assert missing_features(here) == []
    assert missing_features([*here, "zz_quantum", "aa_quantum"]) == ["aa_quantum", "zz_quantum"]
