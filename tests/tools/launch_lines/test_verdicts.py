"""tools/launch_lines/verdicts.py: what a rule says of a subject and of an option."""

from __future__ import annotations

import pytest

from npucompile.tools.launch_lines.facts import Facts
from npucompile.tools.launch_lines.proposal import propose
from npucompile.tools.launch_lines.tables import topics
from npucompile.tools.launch_lines.verdicts import RULES, Context, rule, topic


def test_a_topic_says_the_same_of_all_its_flags():
    for name, entry in topics().items():
        assert (topic(name).status, topic(name).why) == (entry.status, entry.why)


def test_a_rule_is_known_by_its_function():
    def other(value, context):
        return topic("router")

    try:
        assert rule(other) is RULES["other"] is other
    finally:
        del RULES["other"]


@pytest.mark.parametrize(("values", "said"), [({"vllm_requests": 8}, "--buckets 1,2,4,8"), ({}, "the default of --buckets")])
def test_an_option_is_written_as_the_build_has_it(values, said):
    facts = Facts("vllm", {"model": "qwen3-8b", "vllm_tp": 1, **values})
    assert Context(facts, propose(facts)).option("buckets") == said
