"""Decides whether a build takes pictures: its encode buckets, how many rows of pictures it keeps, and how pictures are prepared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ...graphs.errors import ConfigError, SpecError
from ...graphs.steps.encode import ENCODE
from ...graphs.steps.table import kind_of
from ...graphs.types import Bucket
from ...models.deployed import deployed_tower
from ...models.registry import ModelSource
from ...server.pictures import videos
from ...server.pictures.processor import FILES, PUBLISHED, PatchProcessor, PictureProcessor, has_files, read_processor
from ...server.pictures.videos import VideoProcessor
from ..notation import DEFAULT_ENCODE, EncodeSize, format_encode
from .planned import Plan

MOST_ROWS = 2**15
"""Rows of the largest prompt of pictures alone that is taken however long the context is: two pictures of 4096x4096 pixels, and 256 MiB of
rows of 4096 channels."""


def choose_encode(plan: Plan) -> Plan:
    """The plan with encode buckets before all others, smallest first, and with what they need; without sizes it takes no pictures.

    Raises:
        SpecError: sizes for a model without a vision tower or for an instance that only decodes, or sizes that are not legal.
        ConfigError: the checkpoint's files do not describe one tower and one processor.
    """
    asked, limits = _asked(plan), plan.limits
    sizes = asked if asked is not None else default_sizes(plan)
    if not sizes:
        return plan
    what = f"--encode {format_encode(sizes)}"
    family, tower = plan.model.family.tower, plan.source.tower
    if family is None or tower is None:
        raise SpecError(f"{what}: {plan.source.name} has no vision tower; legal is none")
    if plan.phase == "decode":
        raise SpecError(f"{what}: an instance that only decodes reads no pictures; legal is none")
    processor, note = processor_of(plan.source)
    filmed = video_processor_of(plan.source)
    for each in (processor, filmed):
        unlike = (
            [f"{name} is {left}, its processor's {right}" for name, left, right in _shared(tower, each) if left != right] if each else []
        )
        if unlike:
            raise ConfigError(f"{plan.source.name}: the vision tower's {', '.join(unlike)}; expected the same")
    tower = deployed_tower(family, tower, asdict(processor), plan.model.config.variant.formats, local=plan.target.local)
    merged = processor.merge_size**2
    if odd := [size for size in sizes if size.patches % merged]:
        raise SpecError(f"{what}: {odd[0]} has no whole rows; legal are multiples of {merged} patches")
    fitting = [size for size in sizes if size.patches <= limits.max_model_len * merged]
    if not fitting:
        raise SpecError(
            f"{what}: no picture fits max_model_len {limits.max_model_len}; legal are up to {limits.max_model_len * merged} patches"
        )
    if asked is None and (too_small := _too_small(processor, fitting)):
        return plan.noted(f"no pictures: {too_small}; the context is {limits.max_model_len}")
    longer = format_encode([size for size in sizes if size not in fitting])
    buckets = tuple(sorted(ENCODE.bucket(size.segments, size.patches) for size in fitting))
    rows = picture_rows(plan, buckets, merged)
    chosen = replace(
        plan,
        source=plan.source.described(),
        model=replace(plan.model, tower=tower),
        limits=replace(limits, picture_rows=rows),
        buckets=(*buckets, *plan.buckets),
        pictures=processor,
        videos=filmed,
    )
    how = "" if asked is not None else " (--encode to change, --language-model-only for none)"
    return chosen.noted(
        f"no encode of {longer} patches: more rows than the context of {limits.max_model_len}" if len(fitting) < len(sizes) else None,
        f"pictures of up to {max(size.patches for size in fitting)} patches, {rows - 1} rows of them are kept{how}",
        note,
    )


def check_served(plan: Plan) -> None:
    """Refuses encode sizes of which none holds the least picture: the artifact could be proved, and its server would end where it starts.

    Raises:
        SpecError: naming the least size.
    """
    sizes = [EncodeSize(bucket.q_len, bucket.batch) for bucket in plan.buckets if kind_of(bucket).tower]
    if plan.pictures and (too_small := _too_small(plan.pictures, sizes)):
        raise SpecError(f"--encode {format_encode(sizes)}: {too_small}; legal is a largest size of as many or more that the context holds")


def _too_small(processor: PictureProcessor, sizes: Sequence[EncodeSize]) -> str:
    """Why no picture fits any of these sizes; "" where some do."""
    merged = processor.merge_size**2
    least = -(-processor.min_pixels // (processor.patch_size**2 * merged)) * merged
    if max(size.patches for size in sizes) >= least:
        return ""
    return f"a picture has {least} patches at least, which take {least // merged} tokens, by what its processor says"


def _asked(plan: Plan) -> tuple[EncodeSize, ...] | None:
    """Sizes that options name; None where they leave the choice."""
    options = plan.options
    if options.language_model_only and options.encode:
        raise SpecError(f"--language-model-only and --encode {format_encode(options.encode)}; legal is one of them")
    return () if options.language_model_only else options.encode


def default_sizes(plan: Plan) -> Sequence[EncodeSize]:
    """Sizes where nobody says any: a checkpoint on this machine takes pictures if it has the tower that its file describes.

    Published deployments and presets of sizes are of text alone unless `--encode` is given.
    """
    if not plan.target.local or plan.deployment or plan.phase == "decode" or not plan.source.has_tower():
        return ()
    most = plan.limits.max_model_len * plan.source.tower.merged
    return [size for size in DEFAULT_ENCODE if size.patches <= most] or [EncodeSize(most)]


def picture_rows(plan: Plan, buckets: Sequence[Bucket], merged: int) -> int:
    """Rows of pictures that are kept, the null row included: those of a step's prompts, or of one prompt of pictures alone, whose rows are
    kept until it is read, and those of the encode step that is launched beside it.

    A chunk reads the rows of its own tokens, and of pictures that it begins or ends in the middle of; a prompt has no more of them than
    tokens.

    Args:
        buckets: the encode buckets.
        merged: patches of a row.
    """
    largest = max(bucket.q_len for bucket in buckets) // merged
    chunks = [
        (bucket.batch, min(bucket.q_len + 2 * largest, plan.limits.max_model_len)) for bucket in plan.buckets if kind_of(bucket).chunks
    ]
    pinned = max((min(plan.limits.max_model_len, MOST_ROWS), *(prompts * rows for prompts, rows in chunks)))
    return 1 + pinned + max(bucket.tokens for bucket in buckets) // merged


def processor_of(source: ModelSource) -> tuple[PictureProcessor, str | None]:
    """How the pictures of a model with a tower are prepared, and a note where no file says so."""
    directory, tower = source.checkpoint_dir, source.tower
    if directory is not None and any((directory / name).is_file() for name in FILES):
        return read_processor(directory), None
    sizes = {ours: getattr(tower, theirs) for ours, theirs in _SHARED}
    where = f"{directory} has neither {' nor '.join(FILES)}" if directory else f"{source.name} is a set of sizes"
    return replace(PUBLISHED, **sizes), f"pictures are prepared as published: {where}"


def video_processor_of(source: ModelSource) -> VideoProcessor | None:
    """How the videos of a model with a tower are prepared; None for a checkpoint whose files say it of pictures alone."""
    directory, tower = source.checkpoint_dir, source.tower
    if directory is not None and has_files(directory, videos.FILES, videos.NESTED):
        return videos.read_video_processor(directory)
    if directory is not None and any((directory / name).is_file() for name in FILES):
        return None
    return replace(videos.PUBLISHED, **{ours: getattr(tower, theirs) for ours, theirs in _SHARED})


_SHARED = (("patch_size", "patch_size"), ("temporal_patch_size", "temporal_patch_size"), ("merge_size", "spatial_merge_size"))


def _shared(tower: Any, processor: PatchProcessor) -> list[tuple[str, int, int]]:
    """Sizes that a tower and a processor have in common: the tower's name, its size, the processor's."""
    return [(theirs, getattr(tower, theirs), getattr(processor, ours)) for ours, theirs in _SHARED]
