"""Structured output: a JSON schema, a regular expression or a grammar becomes a constraint of a request's tokens, by llguidance."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask
from tokenizers import Tokenizer

from ...graphs.errors import ProtocolError, RequestError
from ...runtime.constraint import TOO_COMPLEX, WORD_BITS, Bitmask
from ..requests.frames import decode_json
from ..requests.json_blanks import with_blanks
from .failures import LIMITS, failure, is_too_complex, reason_of
from .schema_check import compilable, has_half_pair
from .tokens import GrammarTokens, by_number

log = logging.getLogger(__name__)

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
    def _tokens(self) -> llguidance.LLTokenizer | str:
        """The tokenizer in llguidance's form, which takes about a second for 250,000 tokens; why there is none where it has none."""
        try:
            return llguidance.LLTokenizer(GrammarTokens(self._tokenizer, self._eos), eos_token=self._eos)
        except Exception as error:  # llguidance raises ValueError, and what Rust panics with is no ValueError.
            log.warning("structured outputs are not supported with this tokenizer: %s", error)
            return f"{type(error).__name__}: {str(error)[:MAX_SHOWN_CHARS]}"

    def constraint(self, kind: str, value: Any, param: str = "response_format") -> GrammarConstraint:
        """The constraint of one request.

        Args:
            kind: one of KINDS, or REPLY with a `reply_grammar.Reply`.
            value: the schema as JSON or its text, the expression or grammar as text, or the texts of a choice; of json_object, nothing.
            param: field of the API that it comes from, for errors.

        Raises:
            RequestError: it is no grammar, one that no output satisfies, or one that is too complex.
        """
        known = self._tokenizer.get_vocab_size()
        if not self._eos or not all(0 <= token < known for token in self._eos):
            message = f"{param} needs a token that ends the output; the model's are {self._eos}, the tokenizer has {known} tokens"
            raise RequestError(message, param=param, code="structured_output_unsupported")
        grammar = self._grammar(kind, value, param)
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise RequestError(f"{param} has {len(grammar)} characters; legal are at most {MAX_GRAMMAR_CHARS}", param=param)
        tokens = self._tokens
        if isinstance(tokens, str):
            message = f"{param} needs a tokenizer that says which text each token is; of this model's that cannot be read: {tokens}"
            raise RequestError(message, param=param, code="structured_output_unsupported")
        matcher = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise _refusal(kind, matcher.get_error(), param)
        body = value.body if kind == REPLY else None
        source = GrammarSource(grammar, "grammar" not in (kind, body and body.kind))
        constraint = GrammarConstraint(matcher, tokens.vocab_size, source)
        # Whether it has any word is known with the first mask, which is kept; and an expression that is too large is built for it.
        first = np.zeros((1, -(-tokens.vocab_size // WORD_BITS)), np.int32)
        try:
            constraint.fill((), (), first)
        except ValueError as error:
            raise _refusal(kind, matcher.get_error(), param) from error
        if not first.any():
            raise _refusal(kind, "NoExtension", param)
        return constraint

    def revived(self, source: GrammarSource) -> GrammarConstraint:
        """The constraint of a grammar that `constraint` of another process has made, of the same tokenizer."""
        tokens = self._tokens
        if isinstance(tokens, str):
            raise RequestError(f"structured outputs are not supported with this tokenizer: {tokens}", code="structured_output_unsupported")
        return GrammarConstraint(llguidance.LLMatcher(tokens, source.grammar, log_level=0, limits=LIMITS), tokens.vocab_size, source)

    def _grammar(self, kind: str, value: Any, param: str) -> str:
        if kind == REPLY:
            body = None if value.body is None else self._grammar(value.body.kind, value.body.value, param)
            value = replace(value, tools=replace(value.tools, tools=tuple(map(_compilable_tool, value.tools.tools))))
            return str(value.grammar(self._special, body))
        return _text(kind, by_number(value, self._tokenizer) if kind == "grammar" and isinstance(value, str) else value, param)

    @cached_property
    def _special(self) -> Mapping[str, int]:
        """Ids of special tokens, which are no text in a grammar."""
        return {token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}


class GrammarSource(NamedTuple):
    """What a constraint is made of, for another process.

    Attributes:
        grammar: in llguidance's notation.
        goes_back: whether the matcher goes back over drafts; else a copy follows them. A grammar of a user may count tokens or give the
            numbers of tokens that are text, over which llguidance does not go back.
    """

    grammar: str
    goes_back: bool


class GrammarConstraint:
    """The outputs that a grammar allows, as `runtime.constraint.Constraint`.

    Attributes:
        source: what it is made of.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, source: GrammarSource) -> None:
        self.source = source
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._goes_back = source.goes_back
        self._output: list[int] = []

    def copy(self) -> GrammarConstraint:
        """The same grammar for another output."""
        matcher = self._matcher.deep_copy()
        matcher.reset()
        return GrammarConstraint(matcher, self._vocab_size, self.source)

    def fill(self, output: Sequence[int], drafts: Sequence[int], bitmask: Bitmask) -> None:
        """See `Constraint.fill`."""
        self._follow(output)
        self._mask(self._matcher, bitmask, 0)
        taken = 0
        matcher = self._matcher if self._goes_back or not drafts else self._matcher.deep_copy()
        for draft in drafts:
            word, bit = divmod(draft, WORD_BITS)
            if word >= bitmask.shape[1] or not bitmask[taken, word] >> bit & 1:
                break
            _consume(matcher, [draft])
            taken += 1
            # Where the text is complete only its end is legal; behind that end nothing is read.
            self._mask(matcher, bitmask, taken)
            if matcher.is_stopped():
                break
        if taken and self._goes_back and not matcher.rollback(taken):
            raise failure(matcher.get_error())

    def _follow(self, output: Sequence[int]) -> None:
        """Brings the matcher behind the output, which is what it was plus new tokens."""
        known = len(self._output)
        if list(output[:known]) != self._output:
            self._matcher.reset()
            self._output, known = [], 0
        new = list(output[known:])
        if new:
            _consume(self._matcher, new)
        self._output += new

    def _mask(self, matcher: llguidance.LLMatcher, bitmask: Bitmask, place: int) -> None:
        """Writes the mask of the next token; tokens beyond the tokenizer's are not legal."""
        own = np.zeros((1, -(-self._vocab_size // WORD_BITS)), np.int32)
        fill_next_token_bitmask(matcher, own)
        if matcher.is_error():
            raise failure(matcher.get_error())
        words = min(own.shape[1], bitmask.shape[1])
        bitmask[place, :words] = own[0, :words]
        bitmask[place, words:] = 0


def _consume(matcher: llguidance.LLMatcher, tokens: list[int]) -> None:
    if not matcher.consume_tokens(tokens):
        raise failure(matcher.get_error())


def _refusal(kind: str, problem: str, param: str) -> RequestError:
    code = TOO_COMPLEX if is_too_complex(problem) else "invalid_grammar"
    return RequestError(f"{param} is no legal {kind}: {_shown(reason_of(problem))}", param=param, code=code)


def _compilable_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool["function"]
    return {**tool, "function": {**function, "parameters": compilable(function.get("parameters") or {}, "tools")}}


def _text(kind: str, value: Any, param: str) -> str:
    """A grammar in llguidance's notation."""
    _check_characters(value, param)
    if kind == "choice":
        if not isinstance(value, Sequence) or isinstance(value, str) or not value or not all(isinstance(v, str) and v for v in value):
            raise RequestError(f"{param} is {_shown(repr(value))}; legal is a list of texts that are not empty", param=param)
        return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in value))
    if kind == "json_object":
        return llguidance.LLMatcher.grammar_from_json_schema(with_blanks({"type": "object"}))
    if kind == "json_schema":
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(with_blanks(compilable(_schema(value, param), param))))
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


def _check_characters(value: Any, param: str) -> None:
    """Raises RequestError where a text, or one of several, holds half a surrogate pair, which no output can."""
    texts = value if isinstance(value, list) else [value]
    if any(isinstance(text, str) and has_half_pair(text) for text in texts):
        message = f"{param} holds a text with half a surrogate pair; legal are whole characters"
        raise RequestError(message, param=param, code="invalid_grammar")


def _schema(value: Any, param: str) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = decode_json(value.encode(), param)
        except ProtocolError as error:
            raise RequestError(str(error), param=param, code="invalid_grammar") from None
    if not isinstance(value, Mapping):
        raise RequestError(f"{param} is {_shown(repr(value))}; legal is a JSON schema, an object", param=param)
    return value


def _shown(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
