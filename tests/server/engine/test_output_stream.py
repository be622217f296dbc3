"""server/engine/output_stream.py: tokens of one completion become text, over any split, and stop strings cut it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.texts import RECORD, byte_codec, cut_at_stop

from npucompile.runtime.request import FinishEvent, Logprobs, TokenEvent
from npucompile.server.engine.output_stream import OutputStream, TextDelta, Usage


def make_stream(*stops):
    return OutputStream(byte_codec().detokenizer(), stops)


def numbered(ids):
    """Log probabilities by position: that of token i is -i."""
    return tuple(Logprobs(-float(place), ((token, -0.5),)) for place, token in enumerate(ids))


def tokens(text, logprobs=()):
    return TokenEvent("r", byte_codec().encode(text), tuple(logprobs))


def finish(reason, count, message=None):
    return FinishEvent("r", reason, 7, count, RECORD, message)


TEXTS = st.text(alphabet="abü🙂", max_size=20)
CUTS = st.lists(st.integers(0, 1000), max_size=10)
STOPS = st.lists(st.text(alphabet="abü🙂", min_size=1, max_size=3), max_size=3)


@given(TEXTS, CUTS, STOPS, st.booleans(), st.sampled_from(["stop", "length", "cancelled"]))
def test_pieces_add_up_to_the_text_before_the_stop_string(text, cuts, stops, wanted_logprobs, reason):
    ids = byte_codec().encode(text)
    logprobs = numbered(ids) if wanted_logprobs else ()
    stream = make_stream(*stops)
    pieces = []
    for a, b in pairwise(sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})):
        pieces.append(stream.push(TokenEvent("r", ids[a:b], logprobs[a:b])))
        if stream.stopped:
            reason = "cancelled"
            break
    last, ending = stream.finish(finish(reason, len(ids)))
    pieces = [piece for piece in [*pieces, last] if piece is not None]
    wanted, hit = cut_at_stop(text, stops)
    assert "".join(piece.text for piece in pieces) == wanted
    shown = tuple(token for piece in pieces for token in piece.token_ids)
    assert shown == ids[: len(shown)]
    assert ending.usage == Usage(7, len(shown), RECORD)
    if hit:
        # Tokens up to the one that completed the stop string, and no more.
        assert cut_at_stop(byte_codec().decode(shown), stops) == (wanted, True)
        assert not cut_at_stop(byte_codec().decode(shown[:-1]), stops)[1]
        assert ending.reason == "stop"
    else:
        assert shown == ids
        assert ending.reason == reason
    for piece in pieces:
        assert len(piece.logprobs) == (len(piece.token_ids) if wanted_logprobs else 0)
    assert tuple(entry for piece in pieces for entry in piece.logprobs) == logprobs[: len(shown)]


def test_text_is_shown_as_soon_as_it_is_safe_with_the_tokens_that_waited():
    stream = make_stream()
    ids = byte_codec().encode("aü")
    logprobs = numbered(ids)
    assert stream.push(TokenEvent("r", ids[:1], logprobs[:1])) == TextDelta("a", ids[:1], logprobs[:1])
    assert stream.push(TokenEvent("r", ids[1:2], logprobs[1:2])) is None
    assert stream.push(TokenEvent("r", ids[2:], logprobs[2:])) == TextDelta("ü", ids[1:], logprobs[1:])


def test_tokens_that_may_begin_a_stop_string_wait_too():
    stream = make_stream("end")
    logprobs = numbered(byte_codec().encode("xenough"))
    assert stream.push(tokens("xen", logprobs[:3])) == TextDelta("x", byte_codec().encode("xen"), logprobs[:3])
    assert stream.push(tokens("o", logprobs[3:4])) == TextDelta("eno", byte_codec().encode("o"), logprobs[3:4])


def test_a_stop_string_that_takes_all_the_text_still_shows_its_tokens_at_the_end():
    stream = make_stream("stop")
    logprobs = numbered(byte_codec().encode("stop"))
    assert stream.push(tokens("stop", logprobs)) is None
    last, ending = stream.finish(finish("cancelled", 4))
    assert last == TextDelta("", byte_codec().encode("stop"), logprobs)
    assert (ending.reason, ending.usage.output_tokens) == ("stop", 4)


def test_a_broken_character_at_the_end_is_shown_with_its_tokens():
    stream = make_stream()
    ids = byte_codec().encode("🙂")[:2]
    assert stream.push(TokenEvent("r", ids)) is None
    last, _ = stream.finish(finish("length", 2))
    assert last == TextDelta("�", ids)


def test_an_end_of_sequence_token_counts_and_is_not_shown():
    stream = make_stream()
    stream.push(tokens("ab"))
    last, ending = stream.finish(finish("stop", 3))
    assert last is None
    assert (ending.reason, ending.usage.output_tokens) == ("stop", 3)


def test_an_engine_error_is_one_even_after_a_stop_string():
    stream = make_stream("b")
    stream.push(tokens("ab"))
    _, ending = stream.finish(finish("error", 2, "decode-b2-q4: boom"))
    assert (ending.reason, ending.message) == ("error", "decode-b2-q4: boom")


@pytest.mark.parametrize("stops", [(), ("x",)])
def test_no_tokens_are_no_text(stops):
    stream = make_stream(*stops)
    assert stream.push(TokenEvent("r", ())) is None
    last, ending = stream.finish(finish("cancelled", 0))
    assert last is None
    assert (ending.reason, ending.usage.output_tokens) == ("cancelled", 0)


@given(st.text(alphabet="ab", min_size=1, max_size=12), st.integers(0, 6))
def test_stop_strings_are_looked_for_behind_the_minimum_alone(text, least):
    stream = OutputStream(byte_codec().detokenizer(), ["a"], least)
    delta = stream.push(tokens(text))
    last, _ = stream.finish(finish("length", len(text)))
    wanted = text[:least] + text[least:].partition("a")[0]
    assert "".join(piece.text for piece in (delta, last) if piece) == wanted
    assert stream.stopped == ("a" in text[least:])
