"""tools/launch_lines/arithmetic.py: numbers are those of bash, expr and seq."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.tools.launch_lines.arithmetic import counted, evaluate, numbers_of

leaves = st.one_of(st.integers(0, 99).map(str), st.sampled_from(["a", "b", "0x1f", "017", "$a", "-3", "~b", "!a", "(a)"]))
signs = st.sampled_from(["+", "-", "*", "/", "%", "**", "<<", ">>", "<", "<=", ">", ">=", "==", "!=", "&", "|", "^", "&&", "||", ","])
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, signs, inner).map(" ".join),
        inner.map(lambda text: f"({text})"),
        st.tuples(inner, inner, inner).map(lambda three: f"({three[0]}) ? ({three[1]}) : ({three[2]})"),
        st.tuples(st.sampled_from(["a =", "b +=", "a *="]), inner).map(lambda two: f"({' '.join(two)})"),
    ),
    max_leaves=6,
)


@settings(max_examples=15, deadline=None)
@given(st.lists(expressions, min_size=8, max_size=8))
def test_numbers_are_those_of_bash(texts):
    script = "".join(f"a=7; b=2; (printf '%s ' \"$(({text}))\" || printf 'none ') 2>/dev/null; printf '\\n'\n" for text in texts)
    printed = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    for text, wanted in zip(texts, printed, strict=True):
        value = evaluate(text.replace("$a", "7"), {"a": "7", "b": "2"})
        # What is not known here stays in the words as it is written; what is known is right.
        assert value is None or str(value) == wanted.strip(), text


@pytest.mark.parametrize(
    "text", ["", "1 +", "(1", "1 / 0", "1 % 0", "2 ** 64", "2 ** -1", "c + 1", "1 2", "x y", "9223372036854775807 + 1", "a b c", "08"]
)
def test_what_is_no_number_is_not_guessed(text):
    assert evaluate(text, {"x": "y", "y": "x"}) is None


def test_an_expression_sets_variables():
    variables = {"a": "1", "b": "a + 1"}
    assert [evaluate(text, variables) for text in ("a += 4", "b", "c = a++ * 2", "--a", "c")] == [5, 6, 10, 5, 10]
    assert variables == {"a": "5", "b": "a + 1", "c": "10"}


@pytest.mark.parametrize(
    "command",
    [
        "expr 2 + 3 * 4", "expr ( 2 + 3 ) * 4", "expr 7 / 2 - 010", "expr 3 = 3", "expr 5 % 3",
        "seq 3", "seq 2 5", "seq 10 -3 1", "seq 5 1",
    ],
)  # fmt: skip
def test_expr_and_seq_print_what_they_print(command):
    words = command.split()
    assert numbers_of(words) == subprocess.run(words, capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize("command", ["expr a : b", "expr length x", "expr 1 +", "seq 1 0 3", "seq 0.5", "seq 1 100000", "nproc", "echo 1"])
def test_other_commands_are_not_run(command):
    assert numbers_of(command.split()) is None
    assert counted(0, 10, 0) is None
