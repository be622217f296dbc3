"""State leaves by the kind of pool that they are, and values of pools as steps leave them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ...graphs.ops.packed_latents import packed, packed_width, parts_of
from ...graphs.types import PICTURE_ROWS, Leaf, Limits

NAN = float("nan")


def is_paged(leaf: Leaf) -> bool:
    """Whether a state leaf is a pool of pages."""
    return leaf.aval.axes[0] == "pages"


def holds_scales(leaf: Leaf) -> bool:
    """Whether a state leaf has the scales of cached int8, [pages, heads, tokens] (ops/quant_cache_write.py)."""
    return is_paged(leaf) and leaf.aval.axes[1] == "kv_heads"


def tokens_second(leaf: Leaf, pool: torch.Tensor) -> torch.Tensor:
    """A pool of pages, with the tokens of a page in dimension 1 and heads in dimension 2."""
    return pool.transpose(1, 2) if holds_scales(leaf) else pool


def unread_value(leaf: Leaf) -> float:
    """What fills the places that no live row may read: NaN, or an integer that no rounding by a largest value gives."""
    return NAN if leaf.aval.dtype.is_floating_point else -128


def random_cache(leaf: Leaf, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Cached values as a model writes them: about one in size, in integers times scales where the cache is int8.

    Scales of an indexer's keys are the only pools in float16.
    """
    if (parts := parts_of(leaf.aval.axes[-1])) is not None:
        (channels, dtype), width = parts, int(shape[-1])
        rotary = (width - packed_width(channels, 0, dtype)) // dtype.itemsize
        values = torch.randn((*shape[:-1], channels + rotary), generator=generator)
        return packed(values[..., :channels], values[..., channels:].to(dtype))
    if leaf.aval.dtype == torch.int8:
        return torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
    if holds_scales(leaf) or leaf.aval.dtype == torch.float16:
        return ((1 + torch.rand(shape, generator=generator)) / 127).to(leaf.aval.dtype)
    return torch.randn(shape, generator=generator).to(leaf.aval.dtype)


def fill(leaf: Leaf, pool: torch.Tensor, pages: Iterable[tuple[int, int]], slots: Iterable[int], generator: torch.Generator) -> None:
    """Fills what requests have in a pool with random values, as if a model had computed them: (page, tokens in it), or slots."""
    if is_paged(leaf):
        for page, used in pages:
            tokens = tokens_second(leaf, pool)[page, :used]
            tokens.copy_(random_cache(leaf, tokens.shape, generator))
    elif is_state_slots(leaf):
        for slot in slots:
            pool[slot] = (0.3 * torch.randn(pool.shape[1:], generator=generator)).to(pool.dtype)


def filled_pages(pages: Sequence[int], tokens: int, page_size: int) -> list[tuple[int, int]]:
    """(page, tokens in it) of the first `tokens` tokens of a request with those pages."""
    return [(page, max(0, min(page_size, tokens - i * page_size))) for i, page in enumerate(pages)]


class FreePlaces:
    """Pages, state slots and request slots that no request has yet, in random order; the null ones, 0, are never given."""

    def __init__(self, limits: Limits, generator: torch.Generator) -> None:
        sizes = limits.num_pages, limits.num_slots, limits.num_request_slots
        self.pages, self.slots, self.request_slots = (
            [1 + place for place in torch.randperm(size - 1, generator=generator).tolist()] for size in sizes
        )


def request_slot_pool(leaves: Sequence[Leaf]) -> int:
    """Position of the pool of request slots among state pools."""
    return next(i for i, leaf in enumerate(leaves) if is_request_slots(leaf))


def rounds_caches(leaves: Iterable[Leaf]) -> bool:
    """Whether a state leaf caches int8."""
    return any(leaf.aval.dtype == torch.int8 for leaf in leaves)


def keeps_first_slots(leaf: Leaf) -> bool:
    """Whether a state leaf is a pool that keeps all of a request in the first of its slots (ops/causal_conv.py)."""
    return leaf.aval.axes[0] == "first_slots"


def is_picture_pool(leaf: Leaf) -> bool:
    """Whether a state leaf is the pool of rows of pictures."""
    return leaf.aval.axes[0] == PICTURE_ROWS


def is_request_slots(leaf: Leaf) -> bool:
    """Whether a state leaf is the pool of request slots."""
    return leaf.aval.axes[0] == "request_slots"


def is_state_slots(leaf: Leaf) -> bool:
    """Whether a state leaf is a pool of state slots."""
    return not (is_request_slots(leaf) or is_picture_pool(leaf) or is_paged(leaf))


@dataclass(frozen=True)
class PoolPlaces:
    """What one request has of all pools, or one segment of patches of that of pictures."""

    pages: Sequence[int] = ()
    slots: Sequence[int] = ()
    request_slot: int = 0
    pictures: Sequence[int] = ()

    def of(self, leaf: Leaf) -> list[int]:
        """Those in the pool of a state leaf."""
        if is_request_slots(leaf):
            return [self.request_slot]
        return [*(self.pictures if is_picture_pool(leaf) else self.pages if is_paged(leaf) else self.slots)]
