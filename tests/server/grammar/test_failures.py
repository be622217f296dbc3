"""server/grammar/failures.py: whatever a client asks for, it gets an answer or a refusal of its own, in words about what it wrote."""

from __future__ import annotations

import json
import random
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grammars import EOS, TOKENIZER, V

from npucompile.graphs.types import Limits
from npucompile.runtime.bitmasks import filled
from npucompile.runtime.constraint import ConstraintError, TooComplex
from npucompile.runtime.request import ExecutionRecord, FinishEvent, TokenEvent
from npucompile.runtime.scheduler import admission
from npucompile.runtime.scheduler.request_state import RequestState
from npucompile.runtime.scheduler.scheduled_step import ScheduledRequest
from npucompile.server.engine.service import ServedModel, Service
from npucompile.server.grammar.failures import failure, reason_of
from npucompile.server.run import serving
from npucompile.server.text.tokenizer import TextTokenizer

INTERNALS = ("lexer error", "parser error", "parser state", "<state>", "<dbg>", "<non-verbose", "noextension", "compute_time_us", "some(")
WORDS = -(-V // 32)
LIMITS = Limits(16, 65, 2, 1024, bitmasks=2, bitmask_words=WORDS, logit_adjustments=4, adjusted_tokens=V)
SPECIAL = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]


class Masks:
    """An engine that samples any token that the masks leave, and ends requests as a step does."""

    hold = release = lambda self: None

    def cancel(self, *_):
        pass

    def submit(self, request, sink):
        admission.check(request, LIMITS, V, 5)
        output, end, draw = (), None, random.Random(request.sampling.seed)
        while end is None and len(output) < min(request.max_tokens, 24):
            row = ScheduledRequest(RequestState(request, 0, 0.0, output_token_ids=output), 1, len(request.prompt) + len(output))
            try:
                bits = np.unpackbits(filled(row, WORDS)[0].view(np.uint8), bitorder="little")[:V]
            except ConstraintError as error:
                end = FinishEvent(request.id, "error", 1, len(output), ExecutionRecord(), str(error), code=error.code)
                break
            token = int(draw.choice(np.flatnonzero(bits)))
            if token in request.stop_token_ids:
                end = FinishEvent(request.id, "stop", 1, len(output) + 1, ExecutionRecord())
            output = (*output, token)
            sink(TokenEvent(request.id, (token,)) if end is None else end)
        if end is None or end.reason == "error":
            sink(end or FinishEvent(request.id, "length", 1, len(output), ExecutionRecord()))


@pytest.fixture(scope="module")
def post():
    model = ServedModel("tiny", max_model_len=1024, vocab_size=V, eos_token_ids=frozenset({EOS}))
    with serving(Service(Masks(), TextTokenizer(TOKENIZER), model)) as url, httpx.Client(timeout=60) as client:
        base = f"http://{urlsplit(url).netloc}/v1/completions"

        def posted(**fields):
            body = {"prompt": "a", "max_tokens": 24, "temperature": 1, "seed": 1, **fields}
            return client.post(base, content=json.dumps(body), headers={"content-type": "application/json"})

        yield posted


NUMBERS = st.sampled_from([0, -1, 3, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, 0.5])
TEXTS = st.sampled_from(["", "a", "é", "\0", "\ufffd", *SPECIAL, f"a{SPECIAL[0]}b", "[^\\s\\S]", "(", "a{3}", "\\ud800", "#", "#/x"])
VALUES = st.none() | st.booleans() | NUMBERS | TEXTS | st.lists(NUMBERS | TEXTS, max_size=2)
KEYWORDS = st.sampled_from(
    ["type", "const", "enum", "default", "examples", "minimum", "maximum", "exclusiveMaximum", "multipleOf", "minLength", "pattern", "$ref"]
)
TYPES = st.sampled_from(["object", "array", "string", "integer", "number", "null"])
SCHEMAS = st.recursive(
    st.dictionaries(KEYWORDS, VALUES, max_size=3)
    | st.builds(lambda kind, rest: {"type": kind} | rest, TYPES, st.dictionaries(KEYWORDS, NUMBERS, max_size=2)),
    lambda inner: (
        st.fixed_dictionaries({"properties": st.dictionaries(TEXTS, inner, max_size=2)}) | st.builds(lambda one: {"anyOf": [one]}, inner)
    ),
    max_leaves=4,
)
EXPRESSIONS = st.recursive(
    st.sampled_from(["a", ".", "[^\\s\\S]", "\\bx", "<\\|im_end\\|>", "é", "(?=a)", "^", "\\p{L}"]),
    lambda inner: st.builds(lambda one, more: f"({one}){more}", inner, st.sampled_from(["*", "?", "{0}", "{90}", "{3,1}", "|b"])),
    max_leaves=3,
)
GRAMMARS = st.sampled_from(
    [
        "start: start",
        "start: a\na: b\nb: a",
        'start: e\ne: e "+" e | e e | /[a-z ]/',
        "root ::= root",
        "start: <[99999]>",
        "start: <|im_end|>",
        'start: ""',
        'start: "<|im_end|>" /./',
        "start: " + "(" * 300,
        'start: %json {"maximum": 18446744073709551616}',
        '{"grammars": []}',
        "{",
    ]
)
FORMS = st.one_of(
    SCHEMAS.map(lambda schema: {"json": schema}),
    EXPRESSIONS.map(lambda text: {"regex": text}),
    GRAMMARS.map(lambda text: {"grammar": text}),
    st.lists(TEXTS, max_size=3).map(lambda texts: {"choice": texts}),
)
IDS = st.lists(st.sampled_from([0, 5, 64, 65, EOS, V - 1, V, 2**40]), max_size=3)
SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "min_tokens": st.sampled_from([0, 1, 20, 24, 25]), "allowed_token_ids": IDS, "stop_token_ids": IDS, "ignore_eos": st.booleans(),
        "bad_words": st.lists(TEXTS, max_size=2), "logit_bias": st.dictionaries(st.sampled_from(["0", "64", str(V)]), st.just(100)),
        "n": st.sampled_from([1, 2]), "stream": st.booleans(),
    },
)  # fmt: skip


@given(form=FORMS, sampling=SAMPLING)
@settings(max_examples=150, deadline=None)
def test_no_input_is_a_failure_of_the_server(post, form, sampling):
    answer = post(structured_outputs=form, **sampling)
    assert answer.status_code in (200, 400), answer.text
    assert "server_error" not in answer.text
    assert not [words for words in INTERNALS if words in answer.text.lower()]


@pytest.mark.parametrize("form", [{"choice": [f"a{SPECIAL[0]}b"]}, {"regex": "a<\\|im_end\\|>b"}, {"grammar": f'start: "a{SPECIAL[0]}b"'}])
@pytest.mark.parametrize("sampling", [{}, {"min_tokens": 23}, {"allowed_token_ids": list(range(2045))}])
def test_text_of_special_tokens_is_text_and_ends(post, form, sampling):
    (choice,) = post(structured_outputs=form, **sampling).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a<|im_end|>b", "stop")


@pytest.mark.parametrize("allowed", [[5], [64]])
def test_a_form_and_allowed_ids_without_a_common_token_name_each_other(post, allowed):
    """At the door where the first token is none, else at the token that is."""
    error = post(structured_outputs={"regex": "ab"}, allowed_token_ids=allowed).json()["error"]
    assert error["code"] == "constraint_dead_end"
    assert "its constraint: allowed_token_ids forbid every token that it allows" in error["message"]
    assert error["type"] == "invalid_request_error"


def test_what_exceeds_a_limit_is_told_apart():
    assert isinstance(failure("Parser Error: Current row has 2014 items; max is 2000"), TooComplex)
    assert not isinstance(failure("a token is not legal"), TooComplex)
    assert reason_of("Failed: min=Some(3)\n<non-verbose/>") == "Failed: min=3"
    assert reason_of("lexer error: state 17") == "the output is not within it"
