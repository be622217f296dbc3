"""tools/advisor/launch_lines/tables.py: every row says one thing, and names only what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest

from npucompile.tools.advisor import launch_lines
from npucompile.tools.advisor.launch_lines.rules import RULES
from npucompile.tools.advisor.launch_lines.tables import engine, of_topic, topics, variables
from npucompile.tools.commands import build, serve

ENGINES = ("sglang", "vllm", "router")
FOLDER = Path(launch_lines.__file__).parent
KNOWN = json.loads(Path(__file__).with_name("known_names.json").read_text())
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


@pytest.mark.parametrize("of", KNOWN)
def test_what_releases_are_known_to_read_is_of_the_topic_that_was_chosen_for_it(of):
    """Names of the releases in the tables' `source`, each with the topic that it had by a row of its own."""
    known = variables() if of == "variables" else engine(of).flags
    wanted = {name: topic for topic, names in KNOWN[of].items() for name in names.split()}
    assert {name: (known.get(name) or of_topic(name)).topic for name in wanted} == wanted


def test_a_name_that_no_topic_has_a_word_of_is_unknown():
    assert of_topic("VLLM_SOMETHING_NEW") is None
    assert of_topic("SGLANG_NEW_LORA_CACHE").topic == of_topic("--new-lora-cache").topic == "lora"
    assert of_topic("MY_LORA_PATH") is of_topic("HCCL_SOMETHING_NEW") is of_topic("--something-new") is None


@pytest.mark.parametrize("file", [*FOLDER.glob("*.json"), Path(__file__).with_name("corpus.json")], ids=lambda path: path.name)
def test_no_path_of_a_machine_is_in_the_data(file):
    text = file.read_text()
    json.loads(text)
    assert not re.search(r"/work\b|/tmp/|/home/|/Users/|C:\\\\", text.replace("/tmp/profile", "").replace("/tmp/vllm", ""))
