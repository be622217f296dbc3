"""tools/serve/per_prompt.py: vLLM's and SGLang's ways to write how much a request may have."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.tools.serve.per_prompt import read_per_prompt


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("image=4", {"image": 4}),
        ("image=4,video=0", {"image": 4, "video": 0}),
        ('{"image": 2, "video": 1}', {"image": 2, "video": 1}),
        (' {"image": {"count": 3, "width": 512, "height": 512}}', {"image": 3}),
    ],
)
def test_both_ways_say_the_same(text, counts):
    assert read_per_prompt(text) == counts


@pytest.mark.parametrize(
    "text", ["", "4", "image", "image=x", "image=-1", "audio=1", '{"image": [1]}', '{"image"', "image=1=2", '{"image": null}']
)
def test_others_are_refused(text):
    with pytest.raises(SpecError, match="legal is image=N,video=M"):
        read_per_prompt(text)
