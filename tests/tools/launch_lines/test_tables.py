"""tools/launch_lines/tables.py: every row says one thing, and names only what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest

from npucompile.tools import launch_lines
from npucompile.tools.commands import build, serve
from npucompile.tools.launch_lines.rules import RULES
from npucompile.tools.launch_lines.tables import engine, topics, variables

ENGINES = ("sglang", "vllm", "router")
FOLDER = Path(launch_lines.__file__).parent
ROWS = [*(row for name in ENGINES for row in engine(name).rows), *variables().values()]


def options(command: click.Command) -> dict[str, click.Parameter]:
    return {name: option for option in command.params for name in option.opts}


def test_every_row_says_one_thing_that_there_is():
    for row in ROWS:
        assert bool(row.topic) + bool(row.carry) + bool(row.rule) == 1, row
        assert not row.topic or row.topic in topics(), row
        assert not row.off or row.off in topics(), row
        assert not row.rule or row.rule in RULES, row
    assert {topic.status for topic in topics().values()} == {"unnecessary", "refused"}
    assert set(RULES) == {row.rule for row in ROWS if row.rule}


def test_what_is_carried_is_an_option_of_ours_and_takes_the_values():
    ours = {"build": options(build.command), "serve": options(serve.command)}
    for row in ROWS:
        if not row.carry or row.carry == "env":
            continue
        command, option = row.carry.split(" ")
        assert option in ours[command], row
        if isinstance(ours[command][option].type, click.Choice):
            assert set(row.values.values()) <= set(ours[command][option].type.choices), row


@pytest.mark.parametrize("name", ENGINES)
def test_no_name_is_of_two_rows(name):
    names = [each for row in engine(name).rows for each in row.names]
    assert len(names) == len(set(names))
    assert all(each.startswith("-") for each in names)
    assert sum(row.old for row in engine(name).rows) < len(engine(name).rows) / 4


@pytest.mark.parametrize("file", [*FOLDER.glob("*.json"), Path(__file__).with_name("corpus.json")], ids=lambda path: path.name)
def test_no_path_of_a_machine_is_in_the_data(file):
    text = file.read_text()
    json.loads(text)
    assert not re.search(r"/work\b|/tmp/|/home/|/Users/|C:\\\\", text.replace("/tmp/profile", "").replace("/tmp/vllm", ""))


WORDS = {
    "lora": {"LORA"}, "elastic": {"ELASTIC"}, "ray": {"RAY"}, "grpc": {"GRPC"}, "pipeline": {"PP"}, "watermark": set(),
    "events": {"EVENTS"}, "session": {"SESSION"}, "simulate": {"SIMULATE", "FORCE", "PROB"}, "logprobs_mode": {"LOGPROB", "LOGPROBS"},
    "deterministic": {"DETERMINISTIC", "BATCH"}, "expert_balance": {"EPLB", "EXPERT", "WATERFILL", "BALANCEDNESS"},
    "long_context": {"LONG", "LONGER"}, "drafting": {"DSPARK", "DFLASH", "NGRAM"}, "thinking_limit": {"THINK", "REASONING"},
    "weights_update": {"WEIGHTS", "WEIGHT", "SLEEP"},
}  # fmt: skip
"""Of topics that refuse variables: words of whose names one must be in each."""


def test_a_variable_is_refused_for_a_whole_word_of_its_name():
    refused = [row for row in variables().values() if row.topic in WORDS]
    assert {row.name for row in refused if not WORDS[row.topic] & set(row.name.split("_"))} == set()
    assert variables()["SGLANG_USE_AG_AFTER_QLORA"].topic == "layout"
