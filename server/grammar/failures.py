"""What the compiler of grammars says of one that it cannot follow, in words for who wrote the grammar."""

from __future__ import annotations

import re

import llguidance

from ...runtime.constraint import TooComplex

LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""Of each grammar: objects of some hundred optional properties need about half of them; ambiguous grammars come to them soon. States take
up to 2 KB each."""

_COMPLEX = re.compile(
    r"too many (?:items|expressions|states)|too complex|grammar (?:is )?too (?:large|big)|fuel|current row has|size limit", re.IGNORECASE
)
_INTERNAL = re.compile(r"(?:lexer|parser) (?:error|state)|panic|internal|NoExtension|NotStopped|forced bytes|<dbg>", re.IGNORECASE)


def is_too_complex(problem: str) -> bool:
    """Whether a grammar exceeds a limit."""
    return bool(_COMPLEX.search(problem))


def failure(problem: str) -> ValueError:
    """What a constraint raises where llguidance has this problem."""
    return (TooComplex if is_too_complex(problem) else ValueError)(reason_of(problem))


def reason_of(problem: str) -> str:
    """What is wrong with a grammar, without the state of what follows it."""
    if is_too_complex(problem):
        return "it is too complex: too many ways to read a text, or too large an expression; legal is a simpler one"
    if "NoExtension" in problem:
        return "no output satisfies it"
    problem = re.sub(r"\bSome\(([^()]*)\)", r"\1", problem.split("\n<", 1)[0])
    return problem if problem and not _INTERNAL.search(problem) else "the output is not within it"
