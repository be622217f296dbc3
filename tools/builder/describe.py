"""Writes what a manifest says of a build before there are graphs, with the weights and the tokenizer."""

from __future__ import annotations

from dataclasses import asdict

from ...graphs.types import DTYPE_NAMES
from ...lowering.artifact.artifact import ArtifactWriter, Manifest
from ...lowering.backend import backend
from ...lowering.toolchain import toolchain
from ...models import programs
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
        TextTokenizer.load(plan.source.tokenizer)  # refuses an unusable file now, not when serving
        tokenizer = writer.add("tokenizer", plan.source.tokenizer.read_bytes(), "json")
    template, tower = plan.source.chat_template, plan.model.family.tower
    chosen = backend(plan.backend)
    return Manifest(
        model={
            "name": plan.source.name,
            "family": plan.model.family.name,
            "config": plan.source.text,
            "vocab_size": int(plan.model.config.vocab_size),
            "eos_ids": list(plan.eos_ids),
            **({"family_file": plan.source.family_file.as_fields()} if plan.source.family_file else {}),
            "special_tokens": dict(plan.source.special_tokens),
            "sampling": dict(plan.source.sampling),
            **({"draft_model": plan.source.draft.as_fields()} if plan.source.draft else {}),
            **({"tower": {"key": tower.key, "processor": asdict(plan.pictures)}} if tower and plan.pictures else {}),
        },
        dtype=DTYPE_NAMES[plan.dtype],
        mesh=str(plan.mesh),
        rules=dict(plan.rules().table),
        target=plan.target.name,
        backend=plan.backend,
        platform=asdict(plan.platform),
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
        checkpoint=checkpoint,
        chat_template=None if template is None else writer.add("tokenizer", template.encode(), "jinja"),
    )
