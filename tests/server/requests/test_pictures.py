"""server/requests/pictures.py: data URLs, strictly."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import RequestError
from npucompile.server.requests.pictures import PIECE_CHARS, PictureBytes, data_of, is_data, picture_part, url_text

HEAD = "data:image/png;base64,"


def test_a_large_picture_is_decoded_in_pieces_that_are_one():
    data = bytes(range(256)) * 2**13
    text = base64.b64encode(data).decode()
    assert data_of(HEAD + text, "p", len(data)) == data
    for place in (PIECE_CHARS - 1, PIECE_CHARS - 2, PIECE_CHARS):
        # Padding is legal at the end alone, not at that of a piece.
        with pytest.raises(RequestError):
            data_of(HEAD + text[:place] + "=" + text[place + 1 :], "p", len(data))


@given(st.binary(max_size=200))
def test_what_was_encoded_is_read(data):
    assert data_of(HEAD + base64.b64encode(data).decode(), "p", 200) == data


@given(st.binary(min_size=1, max_size=60), st.data())
def test_base64_has_one_spelling(data, draw):
    text = base64.b64encode(data).decode()
    place = draw.draw(st.integers(0, len(text)))
    for changed in (text[:place] + draw.draw(st.sampled_from(list(" \n\t-_!%=.é"))) + text[place:], text + "====", text[:-1]):
        if changed == text:
            continue
        with pytest.raises(RequestError) as caught:
            data_of(HEAD + changed, "p", 200)
        assert (caught.value.code, caught.value.param) == ("invalid_base64_image", "p")


def test_a_type_says_only_that_it_is_an_image():
    assert data_of("DATA:Image/Whatever;charset=x;BASE64,AAAA", "p", 3) == bytes(3)
    for kind in ("", "text/plain", "video/jpeg", "application/octet-stream"):
        with pytest.raises(RequestError, match="legal is a type of image/"):
            data_of(f"data:{kind};base64,AAAA", "p", 3)


def test_size_is_known_before_it_is_decoded():
    assert len(data_of(HEAD + "A" * 16, "p", 12)) == 12
    with pytest.raises(RequestError) as caught:
        data_of(HEAD + "!" * 40, "p", 12)
    assert caught.value.code == "image_file_too_large"


@pytest.mark.parametrize("url", ["", "x", "file:///x", "ftp://x", 7, None, {"url": "data:"}, "httpx://", "javascript:0"])
def test_other_urls_are_refused(url):
    with pytest.raises(RequestError) as caught:
        picture_part(url, "p")
    assert (caught.value.code, caught.value.param) == ("invalid_image_url", "p")


def test_what_logs_see_of_a_picture_is_its_place_and_size():
    part = picture_part(HEAD + "c2VjcmV0", "messages[0]")
    assert repr(part) == f"PicturePart(messages[0], {len(part.url)} bytes)"
    assert is_data(part.url)
    part.file = PictureBytes(b"secret")
    assert repr(part) == "PicturePart(messages[0], 6 bytes)"
    assert not is_data("https://example.com")


def test_a_url_is_taken_once():
    text = url_text("data:")
    assert (text.take(), text.take()) == ("data:", "")
    with pytest.raises(ValueError, match="a string"):
        url_text(7)
