"""tools/check.py: a scene poisons all that is not alive, and a verdict sees what differs."""

from collections.abc import Sequence

import pytest
import torch

from npucompile.graphs.errors import VerifyError
from npucompile.graphs.types import Aval, Bucket, Leaf, Limits, Signature
from npucompile.tools import check

LIMITS = Limits(page_size=4, num_pages=17, num_slots=9, max_model_len=16)
VOCAB = 11


def signature(bucket: Bucket) -> Signature:
    B, Q = bucket.batch, bucket.q_len
    W = Q if bucket.kind == "decode" else 1
    i32, f32 = torch.int32, torch.float32
    shapes = {
        "tokens": ((B, Q), i32), "starts": ((B,), i32), "lengths": ((B,), i32), "page_table": ((B, 4), i32),
        "read_slots": ((B,), i32), "write_slots": ((B, W), i32), "temperature": ((B,), f32), "top_k": ((B,), i32),
        "top_p": ((B,), f32), "min_p": ((B,), f32), "uniform": ((B, W), f32),
    }  # fmt: skip
    return Signature(
        (Leaf("params.w", Aval((2, 2), f32)),),
        (Leaf("state.k", Aval((17, 4, 1, 2), f32, ("pages", None, None, None))), Leaf("state.s", Aval((9, 3), f32, ("slots", None)))),
        tuple(Leaf(f"inputs.{name}", Aval(*shape)) for name, shape in shapes.items()),
        (Leaf("outputs.tokens", Aval((B, W), i32)), Leaf("outputs.logits", Aval((B, W, VOCAB), f32))),
    )


class Toy:
    """Sums what a live row may read, writes its new keys and its slot; `fault` breaks one thing."""

    backend = "toy"

    def __init__(self, bucket: Bucket, fault: str = "") -> None:
        self.bucket, self.fault = bucket, fault
        self.names = [leaf.name.split(".")[1] for leaf in signature(bucket).inputs]

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        _, k, s, *rest = operands
        given = dict(zip(self.names, rest, strict=True))
        B, W = given["write_slots"].shape
        logits = torch.full((B, W, VOCAB), float("nan"))
        for row in range(B):
            start, length = int(given["starts"][row]), int(given["lengths"][row])
            if not length:
                continue
            pages = given["page_table"][row]
            total = torch.zeros(())
            for at in range(start + (self.fault == "reads ahead")):
                total = total + k[pages[at // 4], at % 4].sum()
            state = s[given["read_slots"][row]].sum() if start else torch.zeros(())
            if self.fault == "reads null":
                total = total + s[0].sum()
            for at in range(start, start + length):
                k[pages[at // 4], at % 4] = float(at) + (self.fault == "writes wrong")
            for w in range(W):
                s[given["write_slots"][row, w]] = state + w + (self.fault == "state wrong")
                logits[row, w] = total + state + torch.arange(VOCAB) * 0.1 + (self.fault == "logits wrong")
        tokens = logits.argmax(-1).int()
        return [1 - tokens if self.fault == "tokens wrong" else tokens, logits]


@pytest.mark.parametrize("bucket", [Bucket("decode", 4, 1), Bucket("decode", 2, 3), Bucket("prefill", 1, 8)], ids=lambda b: b.name)
def test_equal_executables_pass_and_each_fault_is_seen(bucket: Bucket) -> None:
    sign = signature(bucket)
    params = [torch.zeros(2, 2)]
    scenes = [
        check.scene(bucket, sign, LIMITS, params, VOCAB, live, torch.Generator().manual_seed(seed))
        for seed in range(4)
        for live in (1, bucket.batch)
    ]
    exact = check.compare(Toy(bucket), Toy(bucket), scenes, sign)
    assert exact == check.Verdict(4 * (1 + bucket.batch), 0.0, 0.0, 0)
    check.judge(exact, check.TOLERANCES[torch.float32], "toy")
    for fault in ("reads ahead", "reads null", "writes wrong", "state wrong", "logits wrong", "tokens wrong"):
        seen = check.compare(Toy(bucket), Toy(bucket, fault), scenes, sign)
        with pytest.raises(VerifyError, match=r"toy: (logits|state|tokens) differ by"):
            check.judge(seen, check.TOLERANCES[torch.float32], "toy")


def test_a_scene_leaves_the_callers_state_alone_and_poisons_null() -> None:
    bucket = Bucket("decode", 4, 1)
    one = check.scene(bucket, signature(bucket), LIMITS, [torch.zeros(2, 2)], VOCAB, 2, torch.Generator().manual_seed(0))
    k, s = one.operands[1], one.operands[2]
    assert torch.isnan(k[0]).all()
    assert torch.isnan(s[0]).all()
    before = k.clone()
    check.compare(Toy(bucket), Toy(bucket), [one], signature(bucket))
    assert torch.equal(torch.nan_to_num(k), torch.nan_to_num(before))


def test_difference_is_relative_beyond_one_and_infinite_for_nan() -> None:
    assert check.difference(torch.tensor([0.5]), torch.tensor([0.25])) == 0.25
    assert check.difference(torch.tensor([8.0]), torch.tensor([4.0])) == 0.5
    assert check.difference(torch.tensor([float("nan")]), torch.tensor([float("nan")])) == float("inf")
    assert check.difference(torch.empty(0), torch.empty(0)) == 0.0


def test_deviation_is_an_average_and_infinite_for_nan() -> None:
    assert check.deviation(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])) == 0.0
    assert check.deviation(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0])) == 1.0
    assert check.deviation(torch.ones(100), torch.cat([torch.ones(99), torch.zeros(1)])) == pytest.approx(0.1)
    assert check.deviation(torch.ones(2), torch.tensor([1.0, float("nan")])) == float("inf")
    assert check.deviation(torch.empty(0), torch.empty(0)) == 0.0


@pytest.mark.parametrize("fault", ["reads ahead", "reads null", "state wrong", "logits wrong"])
def test_the_coarse_tolerance_still_sees_leaks_and_wrong_kernels(fault: str) -> None:
    bucket, tolerance = Bucket("decode", 4, 1), check.TOLERANCES[torch.bfloat16]
    sign = signature(bucket)
    scenes = [check.scene(bucket, sign, LIMITS, [torch.zeros(2, 2)], VOCAB, 4, torch.Generator().manual_seed(s)) for s in range(4)]
    with pytest.raises(VerifyError):
        check.judge(check.compare(Toy(bucket), Toy(bucket, fault), scenes, sign, tolerance.measure), tolerance, "toy")
