"""All settings of a build."""

from __future__ import annotations

from collections.abc import Mapping

from . import model, place, sizes
from .record import Setting

SETTINGS = (
    sizes.BUCKETS,
    sizes.PREFILL,
    sizes.SCORE,
    sizes.ENCODE,
    sizes.LANGUAGE_MODEL_ONLY,
    sizes.MAX_MODEL_LEN,
    sizes.MAX_NUM_SEQS,
    sizes.MAX_TOTAL_TOKENS,
    sizes.KV_CACHE_MEMORY,
    sizes.CHECKPOINT_SLOTS,
    model.DTYPE,
    place.BACKEND,
    place.TARGET,
    place.MESH,
    place.PREFILL_CP,
    place.DEPLOYMENT,
    place.PHASE,
    model.QUANTIZATION,
    model.SPECULATIVE_TOKENS,
    model.DRAFT_WIDTHS,
    model.DRAFT_MODEL,
    model.DRAFT_VOCAB_SIZE,
    model.EXPERT_MAP,
    model.EXPERT_COUNTS,
    model.FAMILY,
    model.LOGPROBS,
    model.STRUCTURED_OUTPUTS,
    model.LOGIT_ADJUSTMENTS,
    model.WHERE_WEIGHTS,
    model.KV_CACHE_DTYPE,
    model.EXPERT_COMBINE_DTYPE,
    place.CANN,
    place.GE_KERNELS,
    place.NO_OVERLAP,
    place.PREFETCH_WEIGHTS,
    place.PACKAGES,
)
"""In the order of `--help`."""

EXPLAINED: Mapping[str, Setting] = {
    setting.option: setting for setting in sorted(SETTINGS, key=lambda setting: setting.explained) if setting.recorded
}
"""Those whose deciders are recorded, by option, in the order of `explain`."""
