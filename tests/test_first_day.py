"""What an engineer runs on the first day, over what builds differ in: build, verify, explain, inspect, and a bring-up on emulated ranks.

Options have tests of their own, and commands have; most faults that these found first are of one command over what another option built.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny

pytestmark = pytest.mark.long

SMALL = ("qwen3.5-tiny", "--buckets", "1,2", "--prefill", "64")
FOUR = ("--mesh", "dp=2,tp=2")

QUANTISED = {
    "none": (),
    "w8a8": (),
    "w8a8-all": ("--expert-combine-dtype", "int8"),
    "w4a8": ("--draft-vocab-size", "256"),
    "w4a8-all": ("--prefetch-weights", "--draft-vocab-size", "256"),
}
ON_NPUS = {
    **{
        f"{form} {each}": ("--backend", form, *FOUR, "--quantization", each, *more)
        for form in ("ge", "aclgraph")
        for each, more in QUANTISED.items()
    },
    "serial": ("--no-overlap", *FOUR),
    "score": ("--score", "64"),
    "int8 caches": ("--kv-cache-dtype", "int8"),
    "captured int8 caches": ("--kv-cache-dtype", "int8", "--backend", "aclgraph", "--mesh", "dp=4"),
    "CANN 8.3": ("--cann", "8.3"),
    "CANN 8.5, captured": ("--cann", "8.5", "--backend", "aclgraph"),
    "packages": ("--cann", "9.1", "--operator-packages", "sgl-kernel-npu,vllm-ascend", "--mesh", "dp=2"),
    "prebuilt kernels": ("--ge-kernels", "prebuilt"),
    "no drafts": ("--speculative-tokens", "0"),
    "counts": ("--expert-counts", "--mesh", "dp=2"),
    "answers": ("--structured-outputs", "0", "--logit-adjustments", "4", "--max-logprobs", "5"),
    "bound": ("--weights", "bound"),
    "several prompts": ("--prefill", "2x32,64"),
    "A2": ("--target", "ascend-a2", "--mesh", "tp=2"),
}  # fmt: skip
ON_CPUS = {
    f"{each}{' int8 caches' if more else ''}": ("--quantization", each, *more)
    for each in QUANTISED
    for more in ((), ("--draft-vocab-size", "256", "--kv-cache-dtype", "int8"))
} | {
    "float32": ("--dtype", "float32", "--quantization", "w8a8"),
    "ranks": (*FOUR, "--quantization", "w8a8-all"),
    "score": ("--score", "32"),
    "widths": ("--draft-widths", "1,2,4"),
    "answers": ("--structured-outputs", "0", "--logit-adjustments", "0", "--max-logprobs", "0"),
}


def run(home: Path, *arguments: object) -> None:
    result = tiny.cli(home, *arguments)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("options", ON_NPUS.values(), ids=ON_NPUS.keys())
def test_what_is_built_for_npus_is_proved_explained_and_brought_up(options: tuple[str, ...], tmp_path: Path) -> None:
    built = tmp_path / "built"
    run(tmp_path, "build", *SMALL, "--target", "ascend-a3", *options, "--out", built)
    run(tmp_path, "verify", built)
    run(tmp_path, "explain", built)
    for what in ("--json", "--cost", "--memory", "--collectives", "--assumptions", "--environment"):
        run(tmp_path, "inspect", built, what)
    run(tmp_path, "bringup", built, "--device", "emulated", "--report", tmp_path / "report")


@pytest.mark.parametrize("options", ON_CPUS.values(), ids=ON_CPUS.keys())
def test_what_is_built_for_this_machine_is_proved_and_generates(options: tuple[str, ...], tmp_path: Path) -> None:
    built = tmp_path / "built"
    run(tmp_path, "build", *SMALL, *options, "--out", built)
    run(tmp_path, "verify", built)
    run(tmp_path, "inspect", built, "--json")
    run(tmp_path, "generate", built, "--prompt", "In the beginning", "--max-tokens", 8)
