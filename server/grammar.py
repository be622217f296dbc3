"""Structured output: a JSON schema, a regular expression or a grammar becomes a constraint of a request's tokens, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask
from tokenizers import Tokenizer

from ..graphs.errors import RequestError
from ..runtime.constraint import WORD_BITS, Bitmask

KINDS = ("json_object", "json_schema", "regex", "grammar", "choice")
REPLY = "reply"
"""What a grammar may be given as: any JSON object, a JSON schema, a regular expression, a grammar in Lark's or GBNF's notation, or a list
of texts of which the output is one."""

MAX_GRAMMAR_CHARS = 1 << 18
MAX_SHOWN_CHARS = 300


class GrammarCompiler:
    """Makes constraints for one tokenizer. Thread-safe; a large grammar takes up to a second, for which the GIL is released.

    Args:
        tokenizer: of the model.
        eos_token_ids: what ends an output; legal where the grammar may end.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = sorted(eos_token_ids)

    @cached_property
    def _tokens(self) -> llguidance.LLTokenizer:
        """The tokenizer in llguidance's form, which takes about a second for 250,000 tokens."""
        return llguidance.LLTokenizer(self._tokenizer.to_str(), eos_token=self._eos)

    def constraint(self, kind: str, value: Any, param: str = "response_format") -> GrammarConstraint:
        """The constraint of one request.

        Args:
            kind: one of KINDS, or REPLY with a `reply_grammar.Reply`.
            value: the schema as JSON or its text, the expression or grammar as text, or the texts of a choice; of json_object, nothing.
            param: field of the API that it comes from, for errors.

        Raises:
            RequestError: it is no grammar, or one that is too complex.
        """
        known = self._tokenizer.get_vocab_size()
        if not self._eos or not all(0 <= token < known for token in self._eos):
            message = f"{param} needs a token that ends the output; the model's are {self._eos}, the tokenizer has {known} tokens"
            raise RequestError(message, param=param, code="structured_output_unsupported")
        grammar = self._grammar(kind, value, param)
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise RequestError(f"{param} has {len(grammar)} characters; legal are at most {MAX_GRAMMAR_CHARS}", param=param)
        matcher = llguidance.LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"{param} is no legal {kind}: {_shown(matcher.get_error())}", param=param, code="invalid_grammar")
        return GrammarConstraint(matcher, self._tokens.vocab_size)

    def _grammar(self, kind: str, value: Any, param: str) -> str:
        if kind != REPLY:
            return _text(kind, value, param)
        body = None if value.body is None else _text(value.body.kind, value.body.value, param)
        return str(value.grammar(self._special.get, body))

    @cached_property
    def _special(self) -> Mapping[str, int]:
        """Ids of special tokens, which are no text in a grammar."""
        return {token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}


class GrammarConstraint:
    """The outputs that a grammar allows, as `runtime.constraint.Constraint`."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._output: list[int] = []

    def fill(self, output: Sequence[int], drafts: Sequence[int], bitmask: Bitmask) -> None:
        """See `Constraint.fill`."""
        self._follow(output)
        self._mask(bitmask, 0)
        taken = 0
        for draft in drafts:
            # A token that the tokenizer does not have is no question for the matcher, but an error that stays.
            if draft >= self._vocab_size or self._matcher.validate_tokens([draft]) != 1:
                break
            self._matcher.consume_token(draft)
            taken += 1
            # Where the text is complete only its end is legal; behind that end nothing is read.
            self._mask(bitmask, taken)
            if self._matcher.is_stopped():
                break
        if taken and not self._matcher.rollback(taken):
            raise ValueError(_shown(self._matcher.get_error()) or "the grammar cannot go back")

    def _follow(self, output: Sequence[int]) -> None:
        """Brings the matcher behind the output, which is what it was plus new tokens."""
        known = len(self._output)
        if list(output[:known]) != self._output:
            self._matcher.reset()
            self._output, known = [], 0
        new = list(output[known:])
        if new and not self._matcher.consume_tokens(new):
            raise ValueError(_shown(self._matcher.get_error()) or "a token is not legal")
        self._output += new

    def _mask(self, bitmask: Bitmask, place: int) -> None:
        """Writes the mask of the next token; tokens beyond the tokenizer's are not legal."""
        own = np.zeros((1, -(-self._vocab_size // WORD_BITS)), np.int32)
        fill_next_token_bitmask(self._matcher, own)
        if self._matcher.is_error():
            raise ValueError(_shown(self._matcher.get_error()))
        words = min(own.shape[1], bitmask.shape[1])
        bitmask[place, :words] = own[0, :words]
        bitmask[place, words:] = 0


def _text(kind: str, value: Any, param: str) -> str:
    """A grammar in llguidance's notation."""
    if kind == "choice":
        if not isinstance(value, Sequence) or isinstance(value, str) or not value or not all(isinstance(v, str) and v for v in value):
            raise RequestError(f"{param} is {_shown(repr(value))}; legal is a list of texts that are not empty", param=param)
        return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in value))
    if kind == "json_object":
        return llguidance.LLMatcher.grammar_from_json_schema({"type": "object"})
    if kind == "json_schema":
        return llguidance.LLMatcher.grammar_from_json_schema(dict(_schema(value, param)))
    if not isinstance(value, str) or not value:
        raise RequestError(f"{param} is {_shown(repr(value))}; legal is a text that is not empty", param=param)
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(value)
    if kind == "grammar":
        try:
            return llguidance.grammar_from("gbnf" if "::=" in value else "lark", value)
        except Exception as error:  # The translator of GBNF raises what its parser raises.
            raise RequestError(f"{param} is no legal grammar: {_shown(str(error))}", param=param, code="invalid_grammar") from error
    raise RequestError(f"{param} is of kind {_shown(repr(kind))}; legal are {list(KINDS)}", param=param)


def _schema(value: Any, param: str) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{param} is no JSON: {_shown(str(error))}", param=param, code="invalid_grammar") from error
    if not isinstance(value, Mapping):
        raise RequestError(f"{param} is {_shown(repr(value))}; legal is a JSON schema, an object", param=param)
    return value


def _shown(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
