"""Tokens of one completion to text, over any split, against the whole decoding cut by hand."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from npucompile.runtime.request import ExecutionRecord, FinishEvent, Logprobs, TokenEvent
from npucompile.server.output_stream import OutputStream, TextDelta
from npucompile.server.tokenizer import TextTokenizer
from npucompile.server.usage import Usage

RECORD = ExecutionRecord(0.0, 1.0, 2.0, (), (), 0, 0)


@cache
def codec() -> TextTokenizer:
    """One token per byte: ids are an alphabet's positions, so that characters of several bytes come in several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextTokenizer(tokenizer)


def transcript(*stops):
    return OutputStream(codec().detokenizer(), stops)


def numbered(ids):
    """Log probabilities that tell the place they are of."""
    return tuple(Logprobs(-float(place), ((token, -0.5),)) for place, token in enumerate(ids))


def tokens(text, logprobs=()):
    return TokenEvent("r", codec().encode(text), tuple(logprobs))


def finish(reason, count, message=None):
    return FinishEvent("r", reason, 7, count, RECORD, message)


def naive(text, stops):
    for end in range(1, len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            return text[: end - max(map(len, matched))], True
    return text, False


TEXTS = st.text(alphabet="abü🙂", max_size=20)
CUTS = st.lists(st.integers(0, 1000), max_size=10)
STOPS = st.lists(st.text(alphabet="abü🙂", min_size=1, max_size=3), max_size=3)


@given(TEXTS, CUTS, STOPS, st.booleans(), st.sampled_from(["stop", "length", "cancelled"]))
def test_pieces_add_up_to_the_text_before_the_stop_string(text, cuts, stops, wanted_logprobs, reason):
    ids = codec().encode(text)
    logprobs = numbered(ids) if wanted_logprobs else ()
    one = transcript(*stops)
    pieces = []
    for a, b in pairwise(sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})):
        pieces.append(one.push(TokenEvent("r", ids[a:b], logprobs[a:b])))
        if one.stopped:
            reason = "cancelled"
            break
    last, ending = one.finish(finish(reason, len(ids)))
    pieces = [piece for piece in [*pieces, last] if piece is not None]
    wanted, hit = naive(text, stops)
    assert "".join(piece.text for piece in pieces) == wanted
    shown = tuple(token for piece in pieces for token in piece.token_ids)
    assert shown == ids[: len(shown)]
    assert ending.usage == Usage(7, len(shown), RECORD)
    if hit:
        # Tokens up to the one that completed the stop string, and no more.
        assert naive(codec().decode(shown), stops) == (wanted, True)
        assert not naive(codec().decode(shown[:-1]), stops)[1]
        assert ending.reason == "stop"
    else:
        assert shown == ids
        assert ending.reason == reason
    for piece in pieces:
        assert len(piece.logprobs) == (len(piece.token_ids) if wanted_logprobs else 0)
    assert tuple(found for piece in pieces for found in piece.logprobs) == logprobs[: len(shown)]


def test_text_is_shown_as_soon_as_it_is_safe_with_the_tokens_that_waited():
    one = transcript()
    ids = codec().encode("aü")
    found = numbered(ids)
    assert one.push(TokenEvent("r", ids[:1], found[:1])) == TextDelta("a", ids[:1], found[:1])
    assert one.push(TokenEvent("r", ids[1:2], found[1:2])) is None
    assert one.push(TokenEvent("r", ids[2:], found[2:])) == TextDelta("ü", ids[1:], found[1:])


def test_tokens_that_may_begin_a_stop_string_wait_too():
    one = transcript("end")
    found = numbered(codec().encode("xenough"))
    assert one.push(tokens("xen", found[:3])) == TextDelta("x", codec().encode("xen"), found[:3])
    assert one.push(tokens("o", found[3:4])) == TextDelta("eno", codec().encode("o"), found[3:4])


def test_a_stop_string_inside_a_block_cuts_tokens_and_log_probabilities_alike():
    one = transcript("stop")
    found = numbered(codec().encode("go stop it"))
    assert one.push(tokens("go stop it", found)) == TextDelta("go ", codec().encode("go stop"), found[:7])
    assert one.stopped
    assert one.push(tokens("more", found[:4])) is None
    last, ending = one.finish(finish("cancelled", 14))
    assert last is None
    assert (ending.reason, ending.usage.output_tokens) == ("stop", 7)


def test_a_stop_string_that_takes_all_the_text_still_shows_its_tokens_at_the_end():
    one = transcript("stop")
    found = numbered(codec().encode("stop"))
    assert one.push(tokens("stop", found)) is None
    last, ending = one.finish(finish("cancelled", 4))
    assert last == TextDelta("", codec().encode("stop"), found)
    assert (ending.reason, ending.usage.output_tokens) == ("stop", 4)


def test_a_broken_character_at_the_end_is_shown_with_its_tokens():
    one = transcript()
    ids = codec().encode("🙂")[:2]
    assert one.push(TokenEvent("r", ids)) is None
    last, _ = one.finish(finish("length", 2))
    assert last == TextDelta("�", ids)


def test_an_end_of_sequence_token_counts_and_is_not_shown():
    one = transcript()
    one.push(tokens("ab"))
    last, ending = one.finish(finish("stop", 3))
    assert last is None
    assert (ending.reason, ending.usage.output_tokens) == ("stop", 3)


def test_an_engine_error_is_one_even_after_a_stop_string():
    one = transcript("b")
    one.push(tokens("ab"))
    _, ending = one.finish(finish("error", 2, "decode-b2-q4: boom"))
    assert (ending.reason, ending.message) == ("error", "decode-b2-q4: boom")


@pytest.mark.parametrize("stops", [(), ("x",)])
def test_no_tokens_are_no_text(stops):
    one = transcript(*stops)
    assert one.push(TokenEvent("r", ())) is None
    last, ending = one.finish(finish("cancelled", 0))
    assert last is None
    assert (ending.reason, ending.usage.output_tokens) == ("cancelled", 0)
