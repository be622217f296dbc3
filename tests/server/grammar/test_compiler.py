"""server/grammar/compiler.py: masks allow the tokens that keep the output within the grammar, as Python's own readers see it."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grammars import COMPILER, EOS, SPECIAL, SPELT, TEXT, TOKENIZER, V, ids, masks, vocabulary
from tokenizers import Tokenizer, decoders, models

from npucompile.graphs.errors import RequestError
from npucompile.server.grammar.compiler import GrammarCompiler

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def legal(pattern: str, output: str) -> set[int]:
    """Tokens after which the output is still a beginning of a text of `[ab]{m,n}`, by trying them all."""
    low, high = map(int, re.findall(r"\d+", pattern))
    texts = {token: TOKENIZER.decode([token], skip_special_tokens=False) for token in range(TOKENIZER.get_vocab_size())}
    fitting = {t for t, text in texts.items() if text and set(text) <= {"a", "b"} and len(output + text) <= high}
    return fitting | ({EOS} if low <= len(output) <= high else set())


@given(st.text("ab", max_size=6), st.text("abc", max_size=5))
@settings(max_examples=60)
def test_a_mask_has_the_tokens_that_may_follow(output, drafted):
    """After the output, and after each draft up to the first that is illegal."""
    pattern = "[ab]{2,6}"
    constraint = COMPILER.constraint("regex", pattern)
    tokens, drafts = ids(output), ids(drafted)
    found = masks(constraint, tokens, drafts)
    text = output
    assert found[0] == legal(pattern, text)
    for place, draft in enumerate(drafts, start=1):
        if draft not in found[place - 1]:
            break
        text += TOKENIZER.decode([draft])
        assert found[place] == legal(pattern, text)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**31)), min_size=1, max_size=8))
@settings(max_examples=30)
def test_masks_do_not_depend_on_what_was_asked_before(steps):
    """Drafts that were asked for and refused, and outputs that begin anew as after a preemption, leave nothing behind."""
    asked, output = COMPILER.constraint("json_schema", SCHEMA), []
    for drafted, seed in steps:
        draw = random.Random(seed)
        fresh = masks(COMPILER.constraint("json_schema", SCHEMA), output)[0]
        drafts = [draw.choice(sorted(fresh)), *(draw.randrange(V) for _ in range(drafted))]
        assert masks(asked, output, drafts)[0] == fresh
        if fresh == {EOS}:
            output = []
        else:
            output = [*output, draw.choice(sorted(fresh - {EOS}))]


@pytest.mark.parametrize(
    ("kind", "value", "check"),
    [
        ("json_schema", SCHEMA, lambda text: json.loads(text)["age"] <= 150),
        ("json_schema", json.dumps({"enum": ["x", "y"]}), lambda text: json.loads(text) in ("x", "y")),
        ("json_object", None, lambda text: isinstance(json.loads(text), dict)),
        ("regex", r"[0-9]{2}-[0-9]{3}", lambda text: re.fullmatch(r"[0-9]{2}-[0-9]{3}", text)),
        ("choice", ["yes", 'no "quite"'], lambda text: text in ("yes", 'no "quite"')),
        ("grammar", 'start: ("a" | "b") "c"', lambda text: text in ("ac", "bc")),
        ("grammar", 'root ::= ("a" | "b") "c"', lambda text: text in ("ac", "bc")),
    ],
)
def test_random_walks_along_masks_are_in_the_language(kind, value, check):
    """Every output that ends is one; short tokens are preferred at the end, so that walks do end."""
    ended = 0
    for seed in range(12):
        draw, output, constraint = random.Random(seed), [], COMPILER.constraint(kind, value)
        for _ in range(120):
            allowed = masks(constraint, output)[0]
            assert allowed
            assert all(token < TOKENIZER.get_vocab_size() for token in allowed)
            if EOS in allowed:
                assert check(TOKENIZER.decode(output))
                ended += 1
                break
            output.append(draw.choice(sorted(allowed)))
    assert ended


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("json_schema", {"type": "objekt"}, "no legal json_schema: Invalid type: objekt"),
        ("json_schema", "{", "is not JSON"),
        ("json_schema", r'{"const": "\ud83d"}', "half of a surrogate pair"),
        ("json_schema", 3, "legal is a JSON schema, an object"),
        ("regex", "a(", "no legal regex: .*unclosed group"),
        ("regex", "", "legal is a text that is not empty"),
        ("grammar", "start: nothing_here", "no legal grammar"),
        ("grammar", "root ::= (", "no legal grammar"),
        ("choice", [], "legal is a list of texts"),
        ("xml", "x", "legal are .*json_schema"),
        ("regex", "a" * 300_000, "legal are at most"),
    ],
)
def test_what_is_no_grammar_is_refused_by_name(kind, value, message):
    with pytest.raises(RequestError, match=f"(?s)text.format.*{message}") as caught:
        COMPILER.constraint(kind, value, "text.format")
    assert caught.value.param == "text.format"
    assert len(str(caught.value)) < 500


MARK = "<tool_call>"
LITERALS = [
    ("choice", [MARK, "</think>x"], f"{MARK}"),
    ("regex", f"({MARK}|</think>)[0-9]", f"{MARK}7"),
    ("regex", "(?s:.*)", f"a{MARK}b</think>"),
    ("json_schema", {"enum": [MARK, "</think>"]}, f'"{MARK}"'),
    ("json_schema", {"const": {MARK: "<｜tool▁sep｜>"}}, f'{{"{MARK}": "<｜tool▁sep｜>"}}'),
    ("json_schema", {"type": "object", "properties": {MARK: {"type": "string"}}}, f'{{"{MARK}": "</think>"}}'),
    ("json_schema", {"type": "string", "pattern": f"^{MARK}+$"}, f'"{MARK}"'),
    ("json_object", None, f'{{"{MARK}": ["｜DSML｜"]}}'),
    ("grammar", f'start: "{MARK}" /[0-9]/', f"{MARK}7"),
    ("grammar", f'start: {MARK} /[0-9]/ </think> "x"', f"{MARK}7</think>x"),
    ("grammar", 'start: /(.|\\n)*/ </think> "x"', "a\nb</think>x"),
    ("grammar", 'start: a "x"\na[max_tokens=9]: /[^x]*/', f"{MARK}abx"),
    ("grammar", f'root ::= "{MARK}" [0-9]', f"{MARK}7"),
]


@pytest.mark.parametrize(("kind", "value", "text"), LITERALS)
def test_a_token_that_is_not_special_is_its_text(kind, value, text):
    """As <tool_call> is in Qwen's tokenizers: masks have it wherever its text may stand, also behind drafts."""
    known = vocabulary(TEXT)
    assert known.follows(known.compiler.constraint(kind, value), text)


@pytest.mark.parametrize("vocabulary_kind", [SPELT, TEXT, SPECIAL])
@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("choice", ["<|im_end|>e\u0301 <think>", "\u212b"], "<|im_end|>e\u0301 <think>"),
        ("json_schema", {"const": "</think><|im_end|>"}, '"</think><|im_end|>"'),
        ("regex", "<｜tool▁call▁begin｜>\u212b", "<｜tool▁call▁begin｜>\u212b"),
        ("grammar", 'start: "<|im_end|>" "<|channel|>"', "<|im_end|><|channel|>"),
    ],
)
def test_what_must_be_written_is_written_whatever_tokens_are_named_like_it(vocabulary_kind, kind, value, text):
    """A special token's text is spelt by others, as is text that the tokenizer would normalise to another one."""
    known, output = vocabulary(vocabulary_kind), []
    constraint = known.compiler.constraint(kind, value)
    while (allowed := known.masks(constraint, output)[0]) != {EOS}:
        output.append(max(allowed, key=lambda token: text.startswith(known.text([*output, token])) * len(known.text([token]))))
    assert known.text(output) == text
    special = {number for number, token in known.tokenizer.get_added_tokens_decoder().items() if token.special}
    assert not special & set(output)


def test_a_model_whose_end_the_tokenizer_lacks_is_refused():
    with pytest.raises(RequestError, match=rf"the model's are \[{V}\], the tokenizer has {TOKENIZER.get_vocab_size()} tokens"):
        GrammarCompiler(TOKENIZER, [V]).constraint("regex", "a")


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.CTC()])
def test_a_tokenizer_of_which_nobody_knows_what_its_tokens_spell_is_refused_each_time(decoder, caplog):
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "</s>": 3}, unk_token="[UNK]"))
    if decoder is not None:
        words.decoder = decoder
    compiler = GrammarCompiler(words, [3])
    for kind, value in (("regex", "a"), ("json_object", None), ("choice", ["a"]), ("grammar", 'start: "a"'), ("json_schema", {})):
        with pytest.raises(RequestError) as caught:
            compiler.constraint(kind, value, "response_format")
        assert (caught.value.code, caught.value.param) == ("structured_output_unsupported", "response_format")
    assert caplog.text.count("structured outputs are not supported with this tokenizer") == 1
