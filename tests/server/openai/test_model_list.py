"""server/openai/model_list.py: every name is listed, and no other is found."""

from __future__ import annotations

import pytest
from support.scripted import MODEL

from npucompile.graphs.errors import RequestError
from npucompile.server.openai.model_list import model_list, one_model


def test_each_name_is_a_model():
    listed = model_list(MODEL)["data"]
    assert [entry["id"] for entry in listed] == ["tiny", "small"]
    assert one_model(MODEL, "small") == listed[1]
    with pytest.raises(RequestError) as caught:
        one_model(MODEL, "gpt")
    assert caught.value.code == "model_not_found"
