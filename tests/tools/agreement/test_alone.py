"""tools/agreement/alone.py: rows that were run alone are the same in any company, and each fault of a step of many is seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.toy_step import DRAFTING, PICTURES, PLAIN, VOCAB, Toy, signature

from npucompile.graphs.errors import VerifyError
from npucompile.graphs.steps.inputs import OPTIONAL_ROWS
from npucompile.graphs.types import Bucket, Limits
from npucompile.tools.agreement import alone
from npucompile.tools.agreement.alone import RowAlone, Together, rows_alone
from npucompile.tools.agreement.compare import Differences, check_tolerance
from npucompile.tools.agreement.poisoned_steps import ProvedStep, live_counts
from npucompile.tools.agreement.tolerances import ROUNDED_ACTIVATIONS, TOLERANCES, Tolerance

PARAMS = [torch.zeros(2, 2)]
FAULTS = ("reads ahead", "reads null", "writes wrong", "state wrong", "logits wrong", "tokens wrong", "request slot wrong", "next row")
OF_SEGMENTS = ("reads padding", "writes wrong", "strays", "not finite")
CASES = [
    (Bucket("decode", 4, 1), PLAIN, FAULTS),
    (Bucket("decode", 3, 3), DRAFTING, (*FAULTS, "counts wrong", "drafts wrong", "head wrong")),
    (Bucket("prefill", 1, 8), PLAIN, FAULTS[:-1]),
    (Bucket("prefill", 2, 8), DRAFTING, (*FAULTS, "drafts wrong", "head wrong")),
    (Bucket("encode", 3, 24), PICTURES, (*OF_SEGMENTS, "next row")),
]


class Mixing(Toy):
    """A step whose rows read the cache of the one before them."""

    def row(self, row: int, of: dict[str, torch.Tensor], out: dict[str, torch.Tensor]) -> None:
        tables = of["inputs.page_table"]
        mixed = torch.cat([tables[row - 1, :1], tables[row, 1:]])
        super().row(row, {**of, "inputs.page_table": torch.cat([tables[:row], mixed[None], tables[row + 1 :]])}, out)


def proved(bucket: Bucket, limits: Limits) -> ProvedStep:
    return ProvedStep(bucket, signature(bucket, limits), limits, PARAMS, VOCAB)


def known_rows(bucket: Bucket, limits: Limits) -> list[RowAlone]:
    single = Bucket(bucket.kind, 1, bucket.q_len)
    return rows_alone(Toy(single, limits), proved(single, limits), bucket.batch, 2)


def together(known: Sequence[RowAlone], bucket: Bucket, limits: Limits, live: int, seed: int = 0) -> Together:
    generator = torch.Generator().manual_seed(seed)
    return Together(known, proved(bucket, limits), live, generator, Counter())


def measured(
    known: Sequence[RowAlone], bucket: Bucket, limits: Limits, fault: str = "", tolerance: Tolerance = TOLERANCES[torch.float32]
) -> dict[str, float]:
    found = Differences()
    for live in live_counts(bucket.batch):
        toy = Mixing(bucket, limits, fault) if fault == "next row" else Toy(bucket, limits, fault)
        found += together(known, bucket, limits, live).differences(toy, tolerance.measure)
    return check_tolerance(found, tolerance, "toy")


@pytest.mark.parametrize(("bucket", "limits", "faults"), CASES, ids=lambda x: getattr(x, "name", None))
def test_rows_are_what_they_are_alone_and_each_fault_is_seen(bucket: Bucket, limits: Limits, faults: tuple[str, ...]) -> None:
    known = known_rows(bucket, limits)
    rows = float(sum(live_counts(bucket.batch)))
    assert measured(known, bucket, limits) == {"rows": rows, "logits_error": 0.0, "state_error": 0.0, "token_mismatches": 0.0}
    for fault in faults:
        with pytest.raises(VerifyError, match=r"toy: (logits|state|tokens) differ by"):
            measured(known, bucket, limits, fault)


@pytest.mark.parametrize(("bucket", "limits", "faults"), CASES, ids=lambda x: getattr(x, "name", None))
def test_rows_that_share_places_show_each_fault_too(monkeypatch, bucket: Bucket, limits: Limits, faults: tuple[str, ...]) -> None:
    monkeypatch.setattr(alone, "OWN_BYTES", 0)
    known = known_rows(bucket, limits)[:2]
    step = together(known, bucket, limits, bucket.batch)
    pages = [tuple(row.pages) for row in step.case.live]
    assert len({*pages}) == (1 if bucket.kind == "encode" else min(2, bucket.batch))
    read = [row.read for row in step.case.live if row.read in row.slots]
    assert len(read) == len({*read})
    assert measured(known, bucket, limits)["state_error"] == 0.0
    for fault in faults:
        with pytest.raises(VerifyError, match=r"toy: (logits|state|tokens) differ by"):
            measured(known, bucket, limits, fault)


@pytest.mark.parametrize("tolerance", [TOLERANCES[torch.bfloat16], ROUNDED_ACTIVATIONS], ids=["bf16", "int8"])
@pytest.mark.parametrize("fault", ["reads ahead", "reads null", "state wrong", "logits wrong", "strays", "not finite"])
def test_coarse_tolerances_still_see_leaks_and_wrong_kernels(fault: str, tolerance: Tolerance) -> None:
    bucket, limits = (Bucket("encode", 3, 24), PICTURES) if fault in OF_SEGMENTS else (Bucket("decode", 4, 1), PLAIN)
    with pytest.raises(VerifyError):
        measured(known_rows(bucket, limits), bucket, limits, fault, tolerance)


@pytest.mark.parametrize("fault", ["", "reads null", "writes wrong", "state wrong", "tokens wrong", "request slot wrong"])
def test_guessed_drafts_leave_the_reference_to_say_what_is_right(fault: str) -> None:
    single, step = Bucket("decode", 1, 3), proved(Bucket("decode", 1, 3), DRAFTING)
    known = rows_alone(Toy(single, DRAFTING), step, 3, 2, guess=Toy(single, DRAFTING, fault))
    assert not any(output.isnan().any() for row in known for output in row.outputs.values())
    spoiled = fault in ("reads null", "tokens wrong")
    assert {int(row.outputs["counts"]) for row in known} == ({1} if spoiled else {1, 2, 3})
    for one, other in zip(known, known_rows(Bucket("decode", 3, 3), DRAFTING) if not spoiled else known, strict=True):
        assert all(a.nan_to_num().equal(b.nan_to_num()) for a, b in zip(one.after, other.after, strict=True))


def test_a_reference_that_reads_what_no_row_may_is_refused() -> None:
    single = Bucket("decode", 1, 1)
    with pytest.raises(VerifyError, match=r"decode-b1-q1 \(eager\): a row alone gives NaN"):
        rows_alone(Toy(single, PLAIN, "reads null"), proved(single, PLAIN), 4, 1)


def test_rows_have_every_number_of_right_drafts_and_the_rarest_are_taken_first() -> None:
    bucket, dealt = Bucket("decode", 3, 3), Counter[int]()
    known = known_rows(bucket, DRAFTING)
    assert {int(row.outputs["counts"]) for row in known} == {1, 2, 3}
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        Together(known, proved(bucket, DRAFTING), 3, generator, dealt)
    assert sorted(dealt.values()) == [1] * 6


def test_rows_share_pools_that_are_too_small_for_all_of_them_at_full_length() -> None:
    bucket, few = Bucket("decode", 4, 1), replace(PLAIN, num_pages=6)
    known = known_rows(bucket, few)
    assert max(len(row.row.pages) for row in known) > 1
    for seed in range(5):
        pages = [page for row in together(known, bucket, few, 4, seed).case.live for page in row.pages]
        assert len(pages) == len({*pages}) <= 5


def test_rows_keep_their_bitmasks_and_adjustments_in_tables_that_are_too_small_for_all() -> None:
    bucket = Bucket("decode", 4, 1)
    limits = replace(PLAIN, bitmasks=1, bitmask_words=1, logit_adjustments=3, adjusted_tokens=VOCAB)
    known = known_rows(bucket, limits)
    seen = Counter[str]()
    for seed in range(5):
        step = together(known, bucket, limits, 4, seed)
        inputs = dict(
            zip((leaf.path for leaf in signature(bucket, limits).inputs), step.case.operands[-len(known[0].inputs) :], strict=True)
        )
        for place, own_row in zip(step.case.rows, step.rows, strict=True):
            for table, whose in OPTIONAL_ROWS.items():
                for name in whose:
                    own, here = int(own_row.inputs[name]), int(inputs[name][place])
                    assert (own > 0) == (here > 0)
                    assert not own or torch.equal(own_row.inputs[table][own - 1], inputs[table][here - 1])
                    seen[name] += own > 0
    assert set(seen) == {name for whose in OPTIONAL_ROWS.values() for name in whose}
    assert all(seen.values())
