"""server/requests/generation_fields.py: what bodies of all protocols say in the same words becomes parameters of sampling."""

from __future__ import annotations

import pytest

from npucompile.server.requests.bodies import validate
from npucompile.server.requests.generation_fields import GenerationFields


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({"allowed_token_ids": [3, 1, 3]}, {"allowed_token_ids": (1, 3)}),
        ({"logit_bias": {"30": 1, "7": -2.5}}, {"logit_bias": ((7, -2.5), (30, 1))}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"seed": -1}, {"seed": None}),
        ({"seed": 0}, {"seed": 0}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({}, {"top_p": 0.25, "logit_bias": (), "allowed_token_ids": None}),
    ],
)
def test_fields_come_before_defaults(fields, sampling):
    made = validate(GenerationFields, fields, "/path").sampling({"top_p": 0.25})
    assert {name: getattr(made, name) for name in sampling} == sampling
