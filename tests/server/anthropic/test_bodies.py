"""server/anthropic/bodies.py: every field of their client's requests is known, and nothing else."""

from __future__ import annotations

from anthropic.types import message_count_tokens_params, message_create_params

from npucompile.server.anthropic.bodies import CountRequest, MessagesRequest


def test_fields_are_those_of_the_client() -> None:
    theirs = set(message_create_params.MessageCreateParamsBase.__annotations__) | {"stream"}
    assert theirs <= set(MessagesRequest.model_fields)
    counted = set(message_count_tokens_params.MessageCountTokensParams.__annotations__)
    assert counted <= set(CountRequest.model_fields)
