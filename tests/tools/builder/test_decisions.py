"""tools/builder/decisions.py: who decided each setting is recorded, also where a build is repeated by its arguments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tiny

from npucompile.graphs.errors import SpecError
from npucompile.tools.builder import plan as planning
from npucompile.tools.builder.decisions import format_decided, read_decided
from npucompile.tools.builder.plan import Options
from npucompile.tools.builder.settings.record import DECIDERS
from npucompile.tools.builder.settings.table import EXPLAINED


@given(st.fixed_dictionaries(dict.fromkeys(EXPLAINED, st.sampled_from(DECIDERS))))
def test_what_is_written_is_read_back(who):
    text = format_decided(tuple(who.items()))
    assert read_decided(text) == who
    assert "=flag" not in text


@pytest.mark.parametrize("text", ["bucket=plan", "buckets=me", "buckets"])
def test_what_is_neither_is_refused(text):
    with pytest.raises(SpecError, match=f"--decided-by {text}: legal are deployment, phase"):
        read_decided(text)


def test_flags_rows_plans_and_defaults(tiny_checkpoint):
    who = dict(tiny.planned(tiny_checkpoint, buckets=(1, 2), dtype="float32", max_model_len=64).decided_by)
    assert {name for name, by in who.items() if by == "flag"} >= {"buckets", "dtype", "max-model-len"}
    assert (who["max-num-seqs"], who["max-total-tokens"], who["weights"], who["prefill"]) == ("plan", "plan", "plan", "flag")
    assert (who["target"], who["deployment"], who["cann"]) == ("default", "default", "default")
    row = dict(planning.plan(Options("qwen3.5-397b", num_speculative_tokens=2)).decided_by)
    assert {row[name] for name in ("mesh", "target", "buckets", "prefill", "quantization", "max-model-len")} == {"row"}
    assert (row["speculative-tokens"], row["deployment"]) == ("flag", "default")
    draft = dict(planning.plan(Options("qwen3-32b", deployment="qwen3-32b-a3x2-mix-2k-2k-50ms")).decided_by)
    assert (draft["draft-model"], draft["deployment"], draft["speculative-tokens"]) == ("plan", "flag", "row")
