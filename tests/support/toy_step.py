"""A step whose values are sums of what its live rows may read, and whose faults are chosen."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npucompile.graphs.steps.kind import SegmentSizes
from npucompile.graphs.steps.table import StepInputs
from npucompile.graphs.types import PICTURE_ROWS, Aval, Bucket, Leaf, Limits, Signature
from npucompile.models import request_slots

PLAIN = Limits(page_size=4, num_pages=17, num_slots=9, max_model_len=16)
DRAFTING = Limits(page_size=4, num_pages=17, num_slots=13, max_model_len=16, slots_per_request=3, drafts=2)
PICTURES = Limits(page_size=4, num_pages=17, num_slots=9, max_model_len=16, picture_rows=20)
SEGMENTS = SegmentSizes(patch_dim=5, merged=4)
VOCAB = 11


def signature(bucket: Bucket, limits: Limits) -> Signature:
    W = bucket.q_len if bucket.kind == "decode" else 1
    i32, f32 = torch.int32, torch.float32
    paged, slots = ("pages", None, None, None), ("slots", None)
    pages = Aval((limits.num_pages, 4, 1, 2), f32, paged)
    outputs = {"tokens": Aval((bucket.batch, W), i32), "logits": Aval((bucket.batch, W, VOCAB), f32)}
    outputs |= {"counts": Aval((bucket.batch,), i32)} if bucket.kind == "decode" else {}
    outputs |= {"drafts": Aval((bucket.batch, limits.drafts), i32)} if limits.drafts else {}
    pictures = Leaf("state.picture_pool", Aval((limits.picture_rows, 1, 1, 2), f32, (PICTURE_ROWS, None, None, None)))
    of_requests = (
        Leaf("state.layers.0.k", pages),
        Leaf("state.layers.1.s", Aval((limits.num_slots, 3), f32, slots)),
        *((Leaf("state.mtp.k", pages),) if limits.drafts else ()),
        Leaf("state.request_slots", request_slots.state(limits)),
    )
    if tower := bucket.kind == "encode":
        outputs = {"finite": Aval((bucket.batch,), i32)}
    return Signature(
        (Leaf("params.w", Aval((2, 2), f32)),),
        (pictures,) if tower else (*of_requests, pictures) if limits.picture_rows else of_requests,
        tuple(Leaf(f"inputs.{name}", aval) for name, aval in StepInputs(bucket, limits, segments=SEGMENTS).avals().items()),
        tuple(Leaf(f"outputs.{name}", aval) for name, aval in outputs.items()),
    )


class Toy:
    """Sums what a live row may read, writes its keys and slots, accepts drafts that equal its tokens; `fault` breaks one thing."""

    backend = "toy"

    def __init__(self, bucket: Bucket, limits: Limits, fault: str = "") -> None:
        self.bucket, self.limits, self.fault = bucket, limits, fault
        self.signature = signature(bucket, limits)

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        of = {leaf.name: operand for leaf, operand in zip(self.signature.operands, operands, strict=True)}
        out = {leaf.path: torch.zeros(leaf.aval.shape, dtype=leaf.aval.dtype) for leaf in self.signature.outputs}
        if self.bucket.kind == "encode":
            return [self.segments(*operands[1:])]
        for row in torch.nonzero(of["inputs.request_slots"]).flatten().tolist():
            self.row(row, of, out)
        return list(out.values())

    def segments(self, pool: torch.Tensor, patches: torch.Tensor, grids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Writes the mean of a segment's patches to each of its rows."""
        for segment, count in enumerate(grids.prod(1).tolist()):
            read = patches[segment - (self.fault == "next row"), : None if self.fault == "reads padding" else count]
            if count:
                pool[places[segment, : count // SEGMENTS.merged].long()] = read.float().mean() + (self.fault == "writes wrong")
        if self.fault == "strays":
            pool[pool.isnan().flatten(1).any(1).nonzero()[-1]] = 1.0
        return torch.full((len(grids),), int(self.fault != "not finite"), dtype=torch.int32)

    def row(self, row: int, of: dict[str, torch.Tensor], out: dict[str, torch.Tensor]) -> None:
        k, s, pages = of["state.layers.0.k"], of["state.layers.1.s"], of["inputs.page_table"][row]
        request_slot, slots = of["state.request_slots"][of["inputs.request_slots"][row]], of["inputs.state_slots_out"][row]
        decode = self.bucket.kind == "decode"
        if decode:
            start, length, slot_in = int(request_slot[0]), 1 + int(of["inputs.drafts"][row]), int(slots[request_slot[1]])
        else:
            start, length, slot_in = (int(of[f"inputs.{name}"][row]) for name in ("num_computed_tokens", "query_lens", "state_slots_in"))
        total = sum((k[pages[at // 4], at % 4].sum() for at in range(start + (self.fault == "reads ahead"))), torch.zeros(()))
        state = s[slot_in].sum() if start else torch.zeros(())
        total = total + (s[0].sum() if self.fault == "reads null" else 0)
        for at in range(start, start + length):
            k[pages[at // 4], at % 4] = float(at) + (self.fault == "writes wrong")
        for w in range(len(slots)):
            s[slots[w]] = state + w + (self.fault == "state wrong")
            out["logits"][row, w] = (total + state + torch.arange(VOCAB) * 0.1 * (-1) ** w) * (1 + (self.fault == "logits wrong"))
        best = out["logits"][row].argmax(-1).int()
        out["tokens"][row] = 1 - best if self.fault == "tokens wrong" else best
        count = 1
        while decode and count < length and request_slot[2 + count] == best[count - 1]:
            count += 1
        if decode:
            out["counts"][row] = count - (self.fault == "counts wrong" and count > 1)
        candidates = [int(best[count - 1]) if decode else int(best[0])] + [3 + (self.fault == "drafts wrong")] * self.limits.drafts
        if self.limits.drafts:
            out["drafts"][row] = torch.tensor(candidates[1:], dtype=torch.int32)
            last = count if decode else length
            for at in range(start, start + last):
                of["state.mtp.k"][pages[at // 4], at % 4] = at * 0.5 + (self.fault == "head wrong")
        request_slot.copy_(torch.tensor([start + count, count - 1 + (self.fault == "request slot wrong"), *candidates], dtype=torch.int32))
