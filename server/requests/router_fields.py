"""Fields that routers and proxies in front of servers add to bodies: the one record of them, which all bodies have.

What sglang-router 0.3.2, smg 1.13.0 and vllm-router 0.1.17 add was recorded from the programs (tests/clients/routed.json).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from .bodies import Body, Neutral, validate

UNKNOWN_MODEL = "unknown"
"""What smg makes of a missing model in a body of `/generate`."""


class RouterFields(Body):
    """Fields of SGLang's and vLLM's bodies that routers send though their clients did not."""

    no_stop_trim: Annotated[Any, Neutral((False,), "stop strings are cut off")] = None
    stream_reasoning: Annotated[Any, Neutral((True,), "reasoning is sent as it is written")] = None
    return_hidden_states: Annotated[Any, Neutral((False,), "graphs return none")] = None
    return_bytes: Annotated[Any, Neutral((False,), "answers are text")] = None
    return_entropy: Annotated[Any, Neutral((False,), "graphs return none")] = None
    no_logs: Annotated[Any, Neutral((False,), "npucompile serve --record has all requests")] = None


Host = Annotated[str, Field(max_length=253)]
Port = Annotated[int, Field(ge=1, le=65535)]
MOST_ROOM, MOST_PROMPTS = 2**63 - 1, 4096
Room = Annotated[int, Field(ge=0, le=MOST_ROOM)]
Of = Field(max_length=MOST_PROMPTS)
"""Of the lists of a body of several prompts."""


class HandoverFields(Body):
    """What a router asks of a prefill or a decode server, in SGLang's fields (lists where the body has several prompts) or in vLLM's.

    Attributes:
        bootstrap_host, bootstrap_port: of the prefill server, as the router's command line has it; a client can set it, too.
        bootstrap_room: which handover it is.
        kv_transfer_params: vLLM's object, with `do_remote_prefill` or `do_remote_decode`.
    """

    bootstrap_host: Host | Annotated[list[Host | None], Of] | None = None
    bootstrap_port: Port | Annotated[list[Port | None], Of] | None = None
    bootstrap_room: Room | Annotated[list[Room | None], Of] | None = None
    kv_transfer_params: dict[str, Any] | None = None


def handover_of(body: dict[str, Any], where: str) -> HandoverFields | None:
    """Takes the fields of a handover out of a body; None where it asks for none: all are absent, null, or hold nothing that is true.

    Raises:
        FieldError: one is not legal.
    """
    fields = {name: body.pop(name) for name in HandoverFields.model_fields if name in body}
    asked = validate(HandoverFields, fields, where)
    return asked if any(map(_asks, fields.values())) else None


def _asks(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,)
    return any(entry is not None and entry is not False for entry in inner)
