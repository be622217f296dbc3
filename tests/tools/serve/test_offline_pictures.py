"""tools/serve/offline_pictures.py: pictures of files stand before the text, through the template where there is one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.published_pictures import encoded, picture
from support.shown import END, IDS, IMAGE, IMAGE_ID, START, TEMPLATE, VISION, artifact, codec
from support.texts import byte_codec

from npucompile.graphs.errors import RequestError, SpecError
from npucompile.server.pictures.decoding import decode
from npucompile.tools.serve.offline_pictures import prompt_of


@pytest.fixture
def files(tmp_path):
    for name, size in (("one", (64, 96)), ("two", (32, 32))):
        (tmp_path / name).write_bytes(encoded(picture(*size, 1)))
    return [tmp_path / "one", tmp_path / "two"]


def made(tmp_path, template=None, **changes):
    one = artifact(**changes)
    if template is not None:
        (tmp_path / "template").write_text(template)
    one.manifest.chat_template = template and "template"
    return SimpleNamespace(manifest=one.manifest, path=tmp_path)


def text_of(ids):
    return codec().decode(ids, skip_special=False)


PLACES = f"{START}{IMAGE * 6}{END}{START}{IMAGE}{END}"


def test_without_a_template_they_stand_before_the_text(tmp_path, files):
    ids, (one, two) = prompt_of(made(tmp_path), codec(), f"what is {IMAGE}?", files)
    assert text_of(ids) == f"{PLACES}what is {IMAGE}?"
    assert (one.span.first, one.grid, two.span.first, two.grid) == (1, (4, 6), 9, (2, 2))
    assert (one.patches == VISION.processor.picture(decode(files[0].read_bytes())).pixels.numpy()).all()


def test_with_a_template_they_are_a_users_message(tmp_path, files):
    ids, pictures = prompt_of(made(tmp_path, TEMPLATE), codec(), "what?", files)
    assert text_of(ids) == f"<|im_start|>user\n{PLACES}what?<|im_end|>\n<|im_start|>assistant\n"
    assert len(pictures) == 2


def test_token_ids_have_a_place_for_each(tmp_path, files):
    ids, pictures = prompt_of(made(tmp_path), None, (1, IMAGE_ID, 2), files[:1])
    assert ids == (1, *[IMAGE_ID] * 6, 2)
    assert len(pictures) == 1


def test_what_cannot_be_is_said(tmp_path, files):
    with pytest.raises(SpecError, match="takes text alone"):
        prompt_of(made(tmp_path, tower=False), codec(), "x", files)
    with pytest.raises(SpecError, match="whose tokenizer has the tokens"):
        prompt_of(made(tmp_path, TEMPLATE), byte_codec(), "x", files)
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        prompt_of(made(tmp_path), codec(), "x", [tmp_path / "none"])
    (tmp_path / "text").write_text("x")
    with pytest.raises(RequestError, match="no format that is read here"):
        prompt_of(made(tmp_path), codec(), "x", [tmp_path / "text"])


def test_a_tokenizer_needs_no_names_for_the_places_where_there_is_no_template(tmp_path, files):
    """Nor does a text become a place that has their ids."""
    image, start, end = byte_codec().encode("ASE")
    ids = {**IDS, "image_token_id": image, "vision_start_token_id": start, "vision_end_token_id": end}
    prompt, (one,) = prompt_of(made(tmp_path, ids=ids), byte_codec(), "AA", files[1:])
    assert prompt == (start, image, end, image, image)
    assert (one.span.first, one.span.end) == (1, 2)
