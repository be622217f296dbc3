"""The service of an artifact over an engine, which may be that of another process: nothing here needs what builds, loads or steps."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

from ...graphs.types import Mesh
from ...lowering.artifact.artifact import MANIFEST, Artifact
from ...server.chat.format import ChatFormat
from ...server.engine.service import EngineClient, ServedModel, Service
from ...server.guard.limits import SocketLimits
from ...server.pictures.limits import MediaLimits
from ...server.text.tokenizer import TextTokenizer
from .api_settings import ApiSettings
from .vision import reader_of, vision_of


def service_of(
    client: EngineClient,
    artifact: Artifact,
    codec: TextTokenizer,
    api: ApiSettings,
    chat: ChatFormat,
    groups: int,
    readiness: Callable[[], Mapping[str, Any]],
    limits: SocketLimits | None,
    media: MediaLimits,
    *,
    paired: bool = False,
) -> Service:
    """The service of an artifact over an engine, which may be that of another process.

    Args:
        groups: dp groups of the engine.
        paired: it computes prompts for decode servers.
    """
    manifest, (name, *aliases) = artifact.manifest, api.names_of(artifact)
    model = ServedModel(
        name=name,
        max_model_len=manifest.limits.max_model_len,
        vocab_size=int(manifest.model["vocab_size"]),
        eos_token_ids=frozenset(manifest.model["eos_ids"]),
        created_s=int((artifact.path / MANIFEST).stat().st_mtime),
        artifact=artifact.digest,
        aliases=tuple(aliases),
        defaults=api.defaults_of(artifact),
        max_running=(manifest.limits.num_request_slots - 1) * groups,
        max_total_tokens=(manifest.limits.num_pages - 1) * manifest.limits.page_size * groups,
        tp=Mesh.parse(manifest.mesh).axis("tp"),
        dp=groups,
        num_experts=manifest.model.get("num_experts", 0),
    )
    service = Service(client, codec, model, chat=chat, readiness=readiness, limits=limits)
    vision = vision_of(artifact, codec, media, paired=paired)
    if isinstance(vision, str):
        service.without_pictures = vision
    else:
        service.pictures = reader_of(vision, media)
    return service


def said_of_ends(service: Service) -> str:
    """Which tokens end a response, by id and text."""
    ends = [f"{token} {service.tokenizer.token_text(token).text!r}" for token in sorted(service.model.eos_token_ids)]
    return f"responses end at token {', '.join(ends)}" if ends else "no token ends responses: the checkpoint names none"


def calm_collector() -> None:
    """Keeps the garbage collector out of steps.

    Modules live as long as the process: a full collection would walk over all of torch's objects, 50 ms, while loading or in a step. And
    each step makes thousands of records that no cycle holds; looking for cycles after every 700 of them took a third of a step's time.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
