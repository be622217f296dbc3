"""tools/prove/compare.py: what no live row may read is NaN, and every difference in a live value is measured."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from npucompile.graphs.errors import VerifyError
from npucompile.graphs.step_inputs import StepInputs
from npucompile.graphs.types import Aval, Bucket, Leaf, Limits, Signature
from npucompile.models import request_slots
from npucompile.tools.prove import compare

PLAIN = Limits(page_size=4, num_pages=17, num_slots=9, max_model_len=16)
DRAFTING = Limits(page_size=4, num_pages=17, num_slots=13, max_model_len=16, slots_per_request=3, drafts=2)
VOCAB = 11


def signature(bucket: Bucket, limits: Limits) -> Signature:
    W = bucket.q_len if bucket.kind == "decode" else 1
    i32, f32 = torch.int32, torch.float32
    paged, slots = ("pages", None, None, None), ("slots", None)
    pages = Aval((limits.num_pages, 4, 1, 2), f32, paged)
    outputs = {"tokens": Aval((bucket.batch, W), i32), "logits": Aval((bucket.batch, W, VOCAB), f32)}
    outputs |= {"counts": Aval((bucket.batch,), i32)} if bucket.kind == "decode" else {}
    outputs |= {"drafts": Aval((bucket.batch, limits.drafts), i32)} if limits.drafts else {}
    return Signature(
        (Leaf("params.w", Aval((2, 2), f32)),),
        (
            Leaf("state.layers.0.k", pages),
            Leaf("state.layers.1.s", Aval((limits.num_slots, 3), f32, slots)),
            *((Leaf("state.mtp.k", pages),) if limits.drafts else ()),
            Leaf("state.request_slots", request_slots.state(limits)),
        ),
        tuple(Leaf(f"inputs.{name}", aval) for name, aval in StepInputs(bucket, limits).avals().items()),
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
        for row in torch.nonzero(of["inputs.request_slots"]).flatten().tolist():
            self.row(row, of, out)
        return list(out.values())

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


def poisoned_steps(bucket: Bucket, limits: Limits, live: Sequence[int], seeds: int = 4) -> list[compare.PoisonedStep]:
    sign = signature(bucket, limits)
    cases = [
        compare.poisoned_step(bucket, sign, limits, [torch.zeros(2, 2)], VOCAB, rows, torch.Generator().manual_seed(seed))
        for seed in range(seeds)
        for rows in live
    ]
    if bucket.kind == "decode":
        for case in cases:
            compare.plant_drafts(Toy(bucket, limits), case, sign)
    return cases


FAULTS = ("reads ahead", "reads null", "writes wrong", "state wrong", "logits wrong", "tokens wrong", "request slot wrong")
CASES = [
    (Bucket("decode", 4, 1), PLAIN, FAULTS),
    (Bucket("decode", 3, 3), DRAFTING, (*FAULTS, "counts wrong", "drafts wrong", "head wrong")),
    (Bucket("prefill", 1, 8), PLAIN, FAULTS),
    (Bucket("prefill", 1, 8), DRAFTING, (*FAULTS, "drafts wrong", "head wrong")),
]


@pytest.mark.parametrize(("bucket", "limits", "faults"), CASES, ids=lambda x: getattr(x, "name", None))
def test_equal_executables_pass_and_each_fault_is_seen(bucket: Bucket, limits: Limits, faults: tuple[str, ...]) -> None:
    sign, steps = signature(bucket, limits), poisoned_steps(bucket, limits, (1, bucket.batch))
    exact = compare.compare(Toy(bucket, limits), Toy(bucket, limits), steps, sign)
    assert exact == compare.Differences(4 * (1 + bucket.batch), 0.0, 0.0, 0)
    compare.check_tolerance(exact, compare.TOLERANCES[torch.float32], "toy")
    for fault in faults:
        differences = compare.compare(Toy(bucket, limits), Toy(bucket, limits, fault), steps, sign)
        with pytest.raises(VerifyError, match=r"toy: (logits|state|tokens) differ by"):
            compare.check_tolerance(differences, compare.TOLERANCES[torch.float32], "toy")


def test_every_count_of_accepted_drafts_occurs() -> None:
    bucket = Bucket("decode", 3, 3)
    (case,) = poisoned_steps(bucket, DRAFTING, (3,), seeds=1)
    counts = Toy(bucket, DRAFTING)([t.clone() for t in case.operands])[2]
    assert sorted(counts.tolist()) == [1, 2, 3]


def test_comparing_leaves_the_callers_state_alone_and_poisons_null() -> None:
    bucket = Bucket("decode", 4, 1)
    (case,) = poisoned_steps(bucket, PLAIN, (2,), seeds=1)
    k, s = case.operands[1], case.operands[2]
    assert torch.isnan(k[0]).all()
    assert torch.isnan(s[0]).all()
    copy = k.clone()
    compare.compare(Toy(bucket, PLAIN), Toy(bucket, PLAIN), [case], signature(bucket, PLAIN))
    assert torch.equal(torch.nan_to_num(k), torch.nan_to_num(copy))


def test_differences_of_two_sets_are_the_larger_ones() -> None:
    first, second = compare.Differences(1, 0.5, 0.1, 0), compare.Differences(2, 0.2, 0.3, 4)
    assert first.combined(second) == compare.Differences(3, 0.5, 0.3, 4)
    assert compare.Differences().combined(first) == first


def test_difference_is_relative_beyond_one_and_infinite_for_nan() -> None:
    assert compare.difference(torch.tensor([0.5]), torch.tensor([0.25])) == 0.25
    assert compare.difference(torch.tensor([8.0]), torch.tensor([4.0])) == 0.5
    assert compare.difference(torch.tensor([float("nan")]), torch.tensor([float("nan")])) == float("inf")
    assert compare.difference(torch.empty(0), torch.empty(0)) == 0.0


def test_deviation_is_an_average_and_infinite_for_nan() -> None:
    assert compare.deviation(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])) == 0.0
    assert compare.deviation(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0])) == 1.0
    assert compare.deviation(torch.ones(100), torch.cat([torch.ones(99), torch.zeros(1)])) == pytest.approx(0.1)
    assert compare.deviation(torch.ones(2), torch.tensor([1.0, float("nan")])) == float("inf")
    assert compare.deviation(torch.empty(0), torch.empty(0)) == 0.0


@pytest.mark.parametrize("tolerance", [compare.TOLERANCES[torch.bfloat16], compare.ROUNDED_ACTIVATIONS], ids=["bf16", "int8"])
@pytest.mark.parametrize("fault", ["reads ahead", "reads null", "state wrong", "logits wrong"])
def test_coarse_tolerances_still_see_leaks_and_wrong_kernels(fault: str, tolerance: compare.Tolerance) -> None:
    bucket = Bucket("decode", 4, 1)
    sign, steps = signature(bucket, PLAIN), poisoned_steps(bucket, PLAIN, (4,))
    with pytest.raises(VerifyError):
        compare.check_tolerance(
            compare.compare(Toy(bucket, PLAIN), Toy(bucket, PLAIN, fault), steps, sign, tolerance.measure), tolerance, "toy"
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_graphs_that_round_activations_to_int8_are_allowed_more(dtype: torch.dtype) -> None:
    """int8 weights meet activations in int8; those of int4 beside floats are packed into int32."""
    plain = signature(Bucket("decode", 4, 1), PLAIN)
    for weights, wanted in ((torch.int8, compare.ROUNDED_ACTIVATIONS), (torch.int32, compare.TOLERANCES[torch.bfloat16])):
        params = (*plain.params, Leaf("layers.0.weight", Aval((4, 4), weights)))
        found = compare.tolerance_of(dtype, replace(plain, params=params))
        assert found == (wanted if dtype == torch.bfloat16 else compare.TOLERANCES[dtype])
