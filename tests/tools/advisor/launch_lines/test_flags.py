"""tools/advisor/launch_lines/flags.py: flags and values are those that argparse reads."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from npucompile.tools.advisor.launch_lines.flags import GivenFlag, read_flags
from npucompile.tools.advisor.launch_lines.tables import ProgramFlags, Row, engine


class Recorded(argparse.Action):
    """Notes every occurrence in order."""

    def __call__(self, parser, namespace, values, option_string=None):
        namespace.seen.append((self.dest, self.value(values, option_string)))

    def value(self, values: Any, option_string: str | None) -> Any:
        if self.nargs != 0:
            return values
        name = option_string or ""
        off = name.startswith("--no-")
        pair = {"--enable-", "--disable-"}
        begun = {
            next((each for each in pair if one.startswith(each)), "") for one in (f"--{name[5:]}" if off else name, self.option_strings[0])
        }
        # As vLLM's EnableDisableAction: the inverse of the first name, or its --no- form, turns it off.
        return off == (begun == pair)


def parser_of(table: ProgramFlags) -> argparse.ArgumentParser:
    """argparse's own parser of the flags of the newest release."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for row in table.rows:
        if row.old or row.name in ("-h", "--help"):
            continue
        names = [*row.names, *(f"--no-{name[2:]}" for name in row.names if row.kind == "switch" and name.startswith("--"))]
        fewest, most = row.count
        nargs = 0 if most == 0 else None if (fewest, most) == (1, 1) else "?" if most == 1 else "+" if fewest else "*"
        kinds = {"int": int, "float": float, "json": json.loads}
        kind = {} if most == 0 else {"type": kinds.get(row.type, str)}
        parser.add_argument(*names, dest=row.name, action=Recorded, nargs=nargs, **kind)
    return parser


TABLES = {name: engine(name) for name in ("sglang", "vllm")}
PARSERS = {name: parser_of(table) for name, table in TABLES.items()}
VALUES = {
    "int": st.integers(-5, 10**6).map(str),
    "float": st.floats(-2, 2, allow_nan=False).map(lambda x: f"{x:.3f}"),
    "size": st.integers(1, 10**6).map(str),
    "json": st.sampled_from(['{"a": 1}', '{"b": {"c": [1, 2]}}', "[1]", "3"]),
    "str": st.sampled_from(["x", "a/b", "w8a8", "-1", "{}", "http://h:80", "none", "a=b"]),
}


@st.composite
def occurrences(draw: Any, table: ProgramFlags) -> list[str]:
    row: Row = draw(st.sampled_from([row for row in table.rows if not row.old and row.name not in ("-h", "--help")]))
    name = draw(st.sampled_from(row.names))
    if row.kind == "switch" and name.startswith("--") and draw(st.booleans()):
        name = f"--no-{name[2:]}"
    if len(name) > 5 and draw(st.booleans()):
        name = name[: draw(st.integers(4, len(name)))]
    fewest, most = row.count
    values = draw(st.lists(VALUES[row.type] if most != 0 else st.nothing(), min_size=fewest, max_size=3 if most is None else most))
    if name.startswith("--") and len(values) == 1 and draw(st.booleans()):
        return [f"{name}={values[0]}"]
    return [name, *values]


@pytest.mark.parametrize("name", ["sglang", "vllm"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_shuffled_and_shortened_flags_are_read_as_argparse_reads_them(name, data):
    table = TABLES[name]
    words = [word for each in data.draw(st.lists(occurrences(table), max_size=5)) for word in each]
    namespace, read = argparse.Namespace(seen=[]), read_flags(words, table)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            PARSERS[name].parse_args(words, namespace)
    except (argparse.ArgumentError, SystemExit):
        # A name may have been shortened to one that several flags, or an earlier release's flag, begin with, or to another flag's
        # whole name, which takes no value: the value is then a stray word; or to what both names of one flag begin with.
        assert any(e.problem or not e.row or e.row.old or sum(n.startswith(e.name) for n in e.row.names) > 1 for e in read)
        return
    # A name may have been shortened to the whole one of a topic, which the parser has none of.
    assume(not any(each.row and each.row.old for each in read))
    assert [(each.row.name, _value(each)) for each in read if each.row] == [(dest, _plain(value)) for dest, value in namespace.seen]
    assert not [each for each in read if each.problem or not each.row]


def _value(each: GivenFlag) -> Any:
    return None if each.value is True and each.row and each.row.count == (0, 1) else _plain(each.value)


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() else [_plain(v) for v in value] if isinstance(value, list) else value


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_misspelt_flag_is_refused_with_the_one_that_was_meant(data):
    table = TABLES[data.draw(st.sampled_from(["sglang", "vllm"]))]
    name = data.draw(st.sampled_from([row.name for row in table.rows if len(row.name) > 12]))
    at = data.draw(st.integers(4, len(name) - 2))
    typo = name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    (read,) = read_flags([typo], table)
    if typo in table.flags or read.row:
        return
    assert f"no flag {typo}" in read.problem or "may be" in read.problem
    assert "the nearest is --" in read.problem or "may be" in read.problem


def test_names_that_several_flags_begin_with_are_refused_with_all_of_them():
    (several,) = read_flags(["--disaggregation-d", "5"], TABLES["sglang"])
    assert "may be --disaggregation-decode-" in several.problem
    assert several.texts == ("5",)


def test_vllm_takes_underscores_and_keys_of_json():
    table = TABLES["vllm"]
    read = read_flags(
        ["m", "--max_model_len", "4K", "--speculative-config.method", "mtp", "--compilation-config.x.y=1", "-O3", "-tp", "4"], table
    )
    assert [(each.row.name if each.row else "", each.value) for each in read] == [
        ("", "m"), ("--max-model-len", 4096), ("--speculative-config", {"method": "mtp"}), ("--compilation-config", {"x": {"y": 1}}),
        ("--optimization-level", ["3"]), ("--tensor-parallel-size", 4),
    ]  # fmt: skip
    (read,) = read_flags(["--tp_size", "4"], TABLES["sglang"])
    assert read.problem == "sglang has no flag --tp_size; the nearest is --tp-size"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--tp-size"], "--tp-size has no value; it takes a whole number"),
        (["--tp-size", "four"], "--tp-size takes a whole number, here it has 'four'"),
        (
            ["--port", "$PORT"],
            "--port takes a whole number, here it has '$PORT'; the script does not say $PORT (--set PORT=VALUE does)",
        ),
        (["--enable-multimodal=1"], "--enable-multimodal takes no value, here it has '1'"),
    ],
)
def test_values_that_cannot_be_read_are_named(words, problem):
    (read,) = read_flags(words, TABLES["sglang"])
    assert (read.problem, read.value) == (problem, None)
