"""legality/threads.py: the file of reports is valid, and what devices refused is refused by the rule that the report names."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from support import legal_graph
from support.ge_threads import OPERATOR, file_of, refused_by

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.legality import threads as module
from npucompile.lowering.ascend.legality.threads import read, threads
from npucompile.lowering.platform import Platform
from npucompile.tools.builder.memory import dispatch_window_bytes
from npucompile.tools.builder.targets import target

ROWS = json.loads(Path(module.__file__).with_name("threads.json").read_text())["rows"]
REFUSED = [thread for thread in threads() if thread.refused_by]


def test_there_are_reports_from_several_stacks_each_with_its_own_link():
    assert len(threads()) >= 30
    assert all(link.startswith("https://github.com/") for thread in threads() for link in (thread.link, *thread.also))
    assert len({thread.link.split("/")[4] for thread in threads()}) >= 5


@pytest.mark.parametrize("thread", REFUSED, ids=lambda thread: thread.id)
def test_what_a_device_refused_is_refused_by_the_rule_that_the_report_names(thread):
    refused = refused_by(thread)
    assert thread.refused_by in refused, refused
    assert "legal" in refused[thread.refused_by]


@pytest.mark.parametrize("name", ["attention-tnd-width-256", "delta-rule-state-f32", "swiglu-quant-running-sums", "dispatch-aiv-parallel"])
def test_a_refusal_names_the_report(name):
    thread = next(thread for thread in threads() if thread.id == name)
    violations = [each for each in legal_graph.violations(file_of(thread), Platform("ascend910_93", "8.5")) if each.operator == OPERATOR]
    assert [thread.link in violation.source for violation in violations].count(True) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows[0].pop("stack"), "lacks ['stack']"),
        (lambda rows: rows[0].update(colour="red"), "has ['colour']"),
        (lambda rows: rows[0].update(id=rows[1]["id"]), "the name"),
        (lambda rows: rows[0].update(also=[rows[1]["link"]]), "the link"),
        (lambda rows: rows[0].update(refused_by=None), "both or neither"),
        (lambda rows: rows[0].update(answered="smoke"), "'smoke'; legal are error"),
        (lambda rows: rows[0].update(answer=""), "says nothing in ['answer']"),
        (lambda rows: rows[0]["given"].update(inputs={}), "no inputs"),
    ],
)
def test_a_row_that_contradicts_itself_or_another_is_refused(change, words):
    rows = copy.deepcopy(ROWS)
    assert read(rows) == threads()
    change(rows)
    with pytest.raises(LoweringError) as error:
        read(rows)
    assert words in str(error.value)


def test_the_planned_window_of_dispatch_is_what_a_device_asked_for():
    # The report "dispatch-window" quotes the message: maxBs 512, h 2048, epWorldSize 2, 64 experts a rank, k 8 need 609 MB.
    thread = next(thread for thread in threads() if thread.id == "dispatch-window")
    assert "609MB" in thread.answer
    needed = dispatch_window_bytes(target("ascend-a3"), tokens=512, hidden_size=2048, experts=128, experts_per_token=8, ranks=2)
    # The plan counts a shared expert, as the operator does unless told otherwise: 4 MB more than the message.
    assert 609 <= needed / (1 << 20) <= 613
