"""lowering/ascend/sources.py: a change of what makes or judges a GE graph is another key."""

from __future__ import annotations

from pathlib import Path

from npucompile.lowering.ascend import sources
from npucompile.lowering.backend import backend


def test_what_makes_or_judges_a_graph_counts_and_what_reads_it_does_not(tmp_path: Path) -> None:
    for name in ("convert.py", "legality/products.json", "emulator/kernels.py", "cost/work.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    fresh = sources.digest.__wrapped__
    before = fresh(tmp_path)
    for name in ("emulator/kernels.py", "cost/work.py"):
        (tmp_path / name).write_text("2")
        assert fresh(tmp_path) == before
    for name in ("convert.py", "legality/products.json"):
        (tmp_path / name).write_text("2")
        assert fresh(tmp_path) != before
        before = fresh(tmp_path)


def test_both_backends_for_npus_compile_by_it() -> None:
    for name in ("ge", "aclgraph"):
        assert backend(name).options(0) == {"sources": sources.digest()}
