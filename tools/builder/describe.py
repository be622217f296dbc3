"""Writes what a manifest says of a build before there are graphs, with the weights and the tokenizer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ...graphs.types import DTYPE_NAMES
from ...lowering.artifact.artifact import ArtifactWriter, Manifest
from ...lowering.backend import backend
from ...lowering.toolchain import toolchain
from ...models import programs
from ...models.config import PICTURE_TOKENS
from ...models.directories import Origin
from ...server.chat.template import ChatTemplate
from ...server.pictures.processor import PictureProcessor
from ...server.text.tokenizer import TextTokenizer
from ..progress import Progress
from .planned import Plan
from .weights import bind_weights, store_weights


def describe(plan: Plan, writer: ArtifactWriter, progress: Progress) -> Manifest:
    """The manifest of a plan, without graphs; stores the tokenizer, the chat template and, unless they are bound, the weights.

    Raises:
        ModelError: the checkpoint or its tokenizer cannot be used.
    """
    signature = programs.leaves(plan.model, plan.limits, plan.dtype)
    weights, checkpoint, source, tokenizer = None, None, "none", None
    if plan.weights == "stored":
        weights, source = store_weights(plan, signature.params, writer, progress)
    elif plan.weights == "bound":
        checkpoint, source = bind_weights(plan)
    if plan.source.tokenizer:
        # Refuses an unusable file now, not when serving; the artifact has one file with all tokens.
        codec = TextTokenizer.load(plan.source.tokenizer)
        text = codec.library.to_str().encode() if codec.added else plan.source.tokenizer.read_bytes()
        tokenizer = writer.add("tokenizer", text, "json")
    template = plan.source.chat_template
    if template is not None:
        ChatTemplate(template)  # as the tokenizer
    chosen, directory = backend(plan.backend), plan.source.checkpoint_dir
    return Manifest(
        model={
            "name": plan.source.name,
            "family": plan.model.family.name,
            "config": plan.source.text,
            "vocab_size": int(plan.model.config.vocab_size),
            "eos_ids": list(plan.eos_ids),
            **({"origin": asdict(origin)} if directory and (origin := Origin.of(directory)) else {}),
            **({"family_file": plan.source.family_file.as_fields()} if plan.source.family_file else {}),
            "special_tokens": dict(plan.source.special_tokens),
            "sampling": dict(plan.source.sampling),
            **({"draft_model": plan.source.draft.as_fields()} if plan.source.draft else {}),
            **({"num_experts": plan.model.config.num_experts} if plan.model.config.variant.tells_experts else {}),
            **({"expert_map": plan.model.placement.as_fields()} if plan.model.placement else {}),
            **({"tower": _tower(plan, plan.pictures)} if plan.pictures else {}),
        },
        dtype=DTYPE_NAMES[plan.dtype],
        mesh=str(plan.mesh),
        rules=dict(plan.rules().table),
        target=plan.target.name,
        backend=plan.backend,
        platform=plan.platform.as_dict(),
        limits=plan.limits,
        params=signature.params,
        state=signature.state,
        graphs=(),
        references=(),
        weights=weights,
        tokenizer=tokenizer,
        files={},
        toolchain={**toolchain(), **chosen.versions()},
        cpu_features=chosen.cpu_features(),
        source_digest=source,
        build_arguments=plan.arguments,
        quantization=plan.quantization,
        formats=plan.model.config.variant.formats.as_fields(),
        deployment=plan.deployment,
        decided_by=dict(plan.decided_by),
        reasons=dict(plan.reasons),
        checkpoint=checkpoint,
        chat_template=None if template is None else writer.add("tokenizer", template.encode(), "jinja"),
    )


def _tower(plan: Plan, pictures: PictureProcessor) -> dict[str, Any]:
    """What a server needs to know of the tower: its key among the weights, its tokens, and how pictures and videos are prepared."""
    tower = plan.model.family.tower
    assert tower is not None, "a plan has a processor of pictures for a family with a tower alone"
    videos = {"videos": asdict(plan.videos)} if plan.videos else {}
    ids = {name: getattr(plan.source.tower, name) for name in PICTURE_TOKENS}
    return {"key": tower.key, "ids": ids, "processor": asdict(pictures), **videos}
