"""What proofs run and measure is what it was: digests of the operands of each maker of steps, and the numbers of each comparer.

Of floats a digest has what is NaN and the signs, which all processors agree on.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import small_images as images
from support.toy_step import DRAFTING, PICTURES, VOCAB, Toy, signature

from npucompile.graphs.types import Bucket, Limits
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.agreement.alone import Together, rows_alone
from npucompile.tools.agreement.poisoned_steps import ProvedStep, poisoned_step
from npucompile.tools.agreement.tolerances import FLOAT, deviation, difference
from npucompile.tools.bench.step import step_operands
from npucompile.tools.prove.bringup.buckets import alternation, one_after_another
from npucompile.tools.prove.bringup.steps import StepPlanner
from npucompile.tools.prove.emulated_run import check_against_trace, check_identical

FULL = replace(DRAFTING, bitmasks=2, bitmask_words=1, logit_adjustments=3, adjusted_tokens=VOCAB, picture_rows=20)
POISONED = {
    (Bucket("decode", 1, 3), replace(FULL, picture_rows=0)): "f39a1919c1414d62",
    (Bucket("decode", 1, 2), FULL): "ee71a4e076cc4855",
    (Bucket("prefill", 1, 8), FULL): "466323af115e5d28",
    (Bucket("prefill", 1, 6), PICTURES): "fb1fbcc13d5b3a12",
    (Bucket("encode", 1, 24), PICTURES): "fe4f7fc3032c942e",
}


def digest(tensors: Iterable[torch.Tensor | np.ndarray]) -> str:
    """Of types, shapes and contents."""
    parts = hashlib.sha256()
    for tensor in map(torch.as_tensor, tensors):
        parts.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
        whole = [tensor.isnan(), tensor.signbit() & ~tensor.isnan()] if tensor.is_floating_point() else [tensor]
        for content in whole:
            parts.update(content.contiguous().numpy().tobytes())
    return parts.hexdigest()[:16]


def proved(bucket: Bucket, limits: Limits) -> ProvedStep:
    return ProvedStep(bucket, signature(bucket, limits), limits, [torch.zeros(2, 2)], VOCAB)


@pytest.mark.parametrize(("bucket", "limits"), POISONED, ids=lambda value: getattr(value, "name", ""))
def test_poisoned_steps_have_the_operands_that_they_had(bucket: Bucket, limits: Limits) -> None:
    operands, step = list[torch.Tensor](), proved(bucket, limits)
    for turn, share in enumerate((1, 3, 3, 3)):
        generator = torch.Generator().manual_seed(turn)
        operands += poisoned_step(step, generator, share=share, turn=turn).operands
    assert digest(operands) == POISONED[bucket, limits]


def test_rows_that_were_run_alone_are_placed_as_they_were() -> None:
    bucket, limits, operands, measured = Bucket("decode", 3, 3), DRAFTING, list[torch.Tensor](), list[torch.Tensor]()
    single = replace(bucket, batch=1)
    known, dealt = rows_alone(Toy(single, limits), proved(single, limits), 3, 2), Counter[int]()
    for live in (1, 3):
        together = Together(known, proved(bucket, limits), live, torch.Generator().manual_seed(live), dealt)
        operands += [operand.clone() for operand in together.case.operands]
        for fault, measure in (("logits wrong", deviation), ("state wrong", difference), ("counts wrong", difference)):
            differences = together.differences(Toy(bucket, limits, fault), measure)
            numbers = torch.tensor([*differences.logits, *differences.state, differences.token_mismatches])
            measured.append((1000 * numbers).nan_to_num(posinf=-1).round().int())
    assert (digest(operands), digest(measured)) == ("a2e4b43f0d1ae5eb", "ab04762763db16db")


def test_a_trace_has_the_steps_that_it_had_and_measures_the_same() -> None:
    mesh, kinds = "dp=2,tp=2", ("prefill", "decode")
    image = images.image(mesh, kinds)
    steps = image.trace.steps
    inputs = [tensor for step in steps for group in step.inputs for tensor in group.values()]
    assert digest([*inputs, *(pool for step in steps for pool in step.request_slots)]) == "69bbc258d1c7675d"
    outputs = image.ranks.run(images.eager(mesh, kinds))
    measured = check_against_trace(image.ranks, outputs, FLOAT, "eager")
    assert (measured["rows"], measured["tokens"] + measured["token_mismatches"]) == (42, 42)
    assert check_identical(image.ranks, outputs, outputs, "same") == {"turns": 6, "tokens": 42, "values": 2593248}


def test_planned_steps_have_the_inputs_that_they_had() -> None:
    buckets = (Bucket("prefill", 1, 8), Bucket("prefill", 2, 6), Bucket("decode", 2, 4), Bucket("decode", 4, 2))
    limits = Limits(page_size=16, num_pages=17, num_slots=17, max_model_len=64, slots_per_request=4, drafts=3)
    planner = StepPlanner(limits, vocab=100, groups=2, max_logprobs=1)
    steps = [step for _, steps, _ in one_after_another(planner, buckets) for step in steps]
    steps += [step for bucket in buckets for step in planner.of_one_bucket(bucket, 4)] + [*alternation(planner, buckets)]
    state = planner.initial_state(signature(buckets[0], limits).state)
    assert digest([*(array for step in steps for inputs in step.inputs for array in inputs.values()), *state]) == "c2347866711e3876"


def test_measured_steps_have_the_operands_that_they_had(tiny_artifact) -> None:
    manifest = Artifact.open(tiny_artifact).manifest
    assert digest([each for entry in manifest.graphs for each in step_operands(manifest, [], entry, 5)[0]]) == "01306fcb24ad492a"
