"""lowering/platform.py: what a platform offers to lowerings, and what is no platform."""

from __future__ import annotations

from dataclasses import replace

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.lowering.platform import CPU, Platform


def test_a_newer_release_offers_what_older_ones_do() -> None:
    older, newer = (Platform("ascend910_93", cann).features("ge") for cann in ("8.3", "9.0"))
    assert older == {"ge", "ascend910_93", "cann>=8.3"}
    assert newer == older | {"cann>=8.5", "cann>=9.0"}
    assert Platform("ascend910b", "8.3", ("vllm-ascend",)).features("aclgraph") >= {"aclgraph", "ascend910b", "vllm-ascend"}
    assert CPU.features("inductor") == {"inductor"}


def test_what_a_manifest_says_is_the_platform_again() -> None:
    platform = Platform("ascend910_93", "8.5", ("sgl-kernel-npu", "vllm-ascend"))
    assert Platform.of({**platform.as_dict(), "packages": list(platform.packages)}) == platform
    assert platform.as_dict().keys() == {"chip", "cann", "packages"}
    prebuilt = replace(platform, kernels="prebuilt")
    assert Platform.of(prebuilt.as_dict()) == prebuilt
    assert Platform.of({}) == CPU


@pytest.mark.parametrize(
    ("cann", "packages", "named"),
    [("8.4", (), "'8.4'"), ("8.5", ("mystery",), "mystery"), ("8.5", ("vllm-ascend", "sgl-kernel-npu"), "alphabetical")],
)
def test_what_is_not_known_is_refused_by_name(cann: str, packages: tuple[str, ...], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        Platform("ascend910_93", cann, packages)


def test_kernels_of_another_origin_are_refused() -> None:
    with pytest.raises(SpecError, match="kernels are 'jit'; legal are online, prebuilt"):
        Platform("ascend910_93", "9.1", kernels="jit")
