"""tools/advisor/launch_lines/shell_words.py: words, operators and where substitutions end."""

from __future__ import annotations

import pytest

from npucompile.tools.advisor.launch_lines.shell_words import SUBSTITUTION, Word, tokens


def cut(text: str) -> list[str]:
    return [token.bare if isinstance(token, Word) else token for token in tokens(text)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a 'b c' d # no\ne", ["a", "b c", "d", "\n", "e"]),
        ("for ((i=0; i<3; i++)); do x; done", ["for", "((i=0; i<3; i++))", ";", "do", "x", ";", "done"]),
        ('x "$(expr "$A" + 1)" y', ["x", '$(expr "$A" + 1)', "y"]),
        ("(a; b)", ["(", "a", ";", "b", ")"]),
        ("((a) && b)", ["(", "(", "a", ")", "&&", "b", ")"]),
        ("x > log 2>&1 &", ["x", "&"]),
    ],
)
def test_a_script_is_cut_where_a_shell_cuts_it(text, wanted):
    assert cut(text) == wanted


def test_an_array_is_the_words_in_its_parentheses():
    (word,) = tokens("A=('x y' $(seq 2) # said\n z)")
    assert (word.bare, [each.bare for each in word.array]) == ("A=", ["x y", "$(seq 2)", "z"])


@pytest.mark.parametrize("text", ["$A", "${A[$i]}", "$((1+(2)))", "$(a $(b))", "`a b`", "$1", "$"])
def test_a_substitution_ends_with_what_closes_it(text):
    assert SUBSTITUTION.match(f"{text} )}}`")[0] == text
