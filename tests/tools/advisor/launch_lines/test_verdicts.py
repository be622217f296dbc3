"""tools/advisor/launch_lines/verdicts.py: what a rule says of a subject and of an option."""

from __future__ import annotations

import pytest

from npucompile.tools.advisor.launch_lines.facts import LaunchFacts
from npucompile.tools.advisor.launch_lines.proposal import propose
from npucompile.tools.advisor.launch_lines.verdicts import Context


@pytest.mark.parametrize(("values", "said"), [({"vllm_requests": 8}, "--buckets 1,2,4,8"), ({}, "the default of --buckets")])
def test_an_option_is_written_as_the_build_has_it(values, said):
    facts = LaunchFacts("vllm", {"model": "qwen3-8b", "vllm_tp": 1, **values})
    assert Context(facts, propose(facts)).option("buckets") == said
