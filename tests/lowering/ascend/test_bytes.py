"""Bytes, legality and costs of graphs for NPUs are those that are stored: a change to any of them is meant, or is an error.

`--update-golden` rewrites tests/golden/npu_graphs.json; with `-m "long or not long"` all of it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from support import encode_graphs, golden_emulation, golden_graphs
from support.ge_threads import OPERATOR, file_of
from support.golden_graphs import Case
from support.legal_graph import violations

from npucompile.lowering.ascend.legality.threads import threads
from npucompile.lowering.platform import Platform

GOLDEN = Path(__file__).parents[2] / "golden" / "npu_graphs.json"
CASES = [pytest.param(case, id=case.name, marks=() if case.quick else pytest.mark.long) for case in golden_graphs.cases()]
Compare = Callable[[str, Mapping[str, str]], None]


@pytest.fixture
def digests(request: pytest.FixtureRequest) -> Compare:
    """Compares digests with those stored under a name, or stores them."""

    def compare(name: str, current: Mapping[str, str]) -> None:
        stored = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.is_file() else {}
        if request.config.getoption("--update-golden"):
            GOLDEN.write_text(json.dumps(stored | {name: current}, sort_keys=True, indent=1) + "\n", encoding="utf-8")
        else:
            assert current == stored.get(name), f"{name}: if this is meant, pytest --update-golden, and say in the commit what differs"

    return compare


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads_before, level = torch.get_num_threads(), logging.getLogger("torch").level
    yield tmp_path_factory.mktemp("golden")
    torch.set_num_threads(threads_before)
    logging.getLogger("torch").setLevel(level)


@pytest.mark.parametrize("case", CASES)
def test_graphs_and_what_is_said_of_them_are_the_stored_ones(case: Case, home: Path, digests: Compare) -> None:
    for bucket, parts in golden_graphs.texts(case, home):
        digests(f"{case.name} {bucket}", {what: golden_graphs.digest(data) for what, data in parts.items()})


ENCODED = [pytest.param(case, id=case.name, marks=() if case.depth else pytest.mark.long) for case in encode_graphs.cases()]


@pytest.mark.parametrize("case", ENCODED)
def test_graphs_of_towers_are_legal_and_the_stored_ones(case: encode_graphs.Case, home: Path, digests: Compare) -> None:
    parts = case.texts(home)
    digests(case.name, {what: golden_graphs.digest(data) for what, data in parts.items()})


@pytest.mark.parametrize("chip", ["ascend910_93", "ascend910b"])
def test_refusals_of_what_devices_refused_are_the_stored_ones(chip: str, digests: Compare) -> None:
    texts = {}
    for thread in threads():
        if thread.given.inputs:
            for platform in (Platform(chip, "8.3"), Platform(chip, "9.1", ("sgl-kernel-npu", "vllm-ascend"))):
                refused = [str(violation) for violation in violations(file_of(thread), platform) if violation.operator == OPERATOR]
                texts[f"{thread.id} {platform.cann}"] = golden_graphs.digest("\n".join(refused).encode())
    digests(f"threads {chip}", texts)


@pytest.mark.long
@pytest.mark.parametrize("backend", golden_graphs.BACKENDS)
@pytest.mark.parametrize("quantization", ["none", "w8a8", "w4a8"])
def test_every_runner_computes_the_stored_tokens(backend: str, quantization: str, home: Path, digests: Compare) -> None:
    runs = dict(golden_emulation.runs(backend, quantization, home))
    tokens = {name: golden_emulation.digest(golden_emulation.integers(tensors)) for name, tensors in runs.items()}
    digests(f"emulated {backend} {quantization}", tokens)
