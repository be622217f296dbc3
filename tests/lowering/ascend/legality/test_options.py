"""lowering/ascend/legality/options.py: options that GE or torchair do not know, and values that they do not take, are refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.legal_graph import violations

from npucompile.lowering.ascend.legality.options import check_options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ge.tiling_schedule_optimize": "0"}, r"actual_seq_lengths_kv are computed in the step and ge.tiling_schedule_optimize is '0'"),
        ({"ge.tiling_schedule_optimize": "yes"}, r"option ge.tiling_schedule_optimize: is 'yes'; legal are '0', '1'"),
        ({"ge.fastest": "1"}, r"option ge.fastest: no such option of a graph is known"),
        ({"ge.inputHintShape": "0:[-1, 4]"}, r"option ge.inputHintShape: is '0:\[-1, 4\]'"),
    ],
)
def test_options(legal, options, message):
    told = [str(violation) for violation in violations(replace(legal, options={**legal.options, **options}))]
    assert any(re.search(message, line) for line in told), told


def test_options_of_the_engine_are_none_of_a_graph():
    told = list(check_options({"ge.oo.level": "O3"}, {"ge.oo.level": "O2"}))
    assert [name for name, *_ in told] == ["ge.oo.level", "ge.oo.level"]
    assert "no such option of a graph" in told[0][1]
    assert "is 'O2'; legal are 'O1', 'O3'" in told[1][1]
