"""What a build of a published deployment does otherwise than its row says."""

from __future__ import annotations

from ...models import registry
from ..notation import PUBLISHED_ENCODE
from .deployments import MAX_CHUNK, POOL_TOKENS, Deployment, Phase, group_chunk, limits_for, prefill_chunk, prefill_sizes
from .drafts import choose_draft_model
from .targets import target


def source_of(row: Deployment) -> registry.ModelSource:
    """The preset of a deployment's model, with the draft model that its build has.

    Raises:
        UnknownModel: it has no preset.
    """
    return choose_draft_model(None, registry.find(row.model), row, None)


def deviations(row: Deployment, phase: Phase, source: registry.ModelSource, encodes: bool = True) -> tuple[str, ...]:
    """One line for each setting of a row that its build has otherwise: what it is, what is published, and why.

    Args:
        source: the row's model.
        encodes: whether the build has encode buckets, as that of a row has which takes pictures.
    """
    lines = (
        None if encodes or not row.pictures else f"text alone is taken, published with pictures: --encode {PUBLISHED_ENCODE} takes them",
        _drafts(phase, source),
        _state(row, source),
        None if phase.name == "decode" else _chunk(row, phase),
        _context(row, phase, source),
        _pool(row, phase),
        _exchange(row, phase, source),
    )
    return tuple(line for line in lines if line)


def _drafts(phase: Phase, source: registry.ModelSource) -> str | None:
    if not phase.num_speculative_tokens or source.has_draft_head:
        return None
    return f"a step drafts nothing, published {phase.num_speculative_tokens} tokens: {source.name} comes without a draft head"


def _state(row: Deployment, source: registry.ModelSource) -> str | None:
    ours = target(row.target).state_dtype
    if row.state_dtype != "float32" or ours == "float32":
        return None
    return "recurrent states are bfloat16, published float32: CANN's operator takes no other (that of the vllm-ascend package does)"


def _chunk(row: Deployment, phase: Phase) -> str | None:
    ours, published, prompt = prefill_chunk(row), group_chunk(row, phase), row.input_len
    if prompt is not None and published is not None and published >= 2 * prompt:
        prompts, hold = prefill_sizes(row)[-1].prompts, published // prompt
        if prompts >= min(hold, phase.group_requests):
            return None
        return f"a prefill step takes {prompts} prompts of a dp group, each padded to {ours} tokens, published {hold} in {published} tokens"
    if prompt is not None and published is None and ours < prompt:
        return f"prompts are prefilled in chunks of {ours} tokens, published whole"
    if published is not None and prompt is None and ours != published:
        why = f"at most {MAX_CHUNK}" if published > MAX_CHUNK else "a multiple of 128"
        return f"prefill chunks have {ours} tokens, published {published}: {why}"
    return None


def _context(row: Deployment, phase: Phase, source: registry.ModelSource) -> str | None:
    longest, page = source.max_position_embeddings, target(row.target).page_size
    wanted = limits_for(row, phase, page).max_model_len
    if wanted <= longest:
        return None
    return (
        f"requests have at most {longest // page * page} tokens, published {phase.context_len or wanted}: the model knows no more positions"
    )


def _pool(row: Deployment, phase: Phase) -> str | None:
    if row.input_len is not None or phase.max_total_tokens is not None or phase.context_len is None:
        return None
    most = max(POOL_TOKENS, phase.context_len)
    if phase.group_requests * phase.context_len <= most:
        return None
    return f"{most} cached tokens a dp group, published as many as memory is left for"


def _exchange(row: Deployment, phase: Phase, source: registry.ModelSource) -> str | None:
    if target(row.target).dispatches or phase.ep == 1 or not source.model.config.num_experts:
        return None
    return f"tokens are gathered by all ranks, published dispatched: the operands of {row.target}'s dispatch are not supplied"
