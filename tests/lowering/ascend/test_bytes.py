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
from support import encode_graphs, golden_graphs
from support.golden_graphs import Case

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
