"""tools/verify/reference_run.py: a model's steps on one device are those of its traced graph, and its draft head is heard."""

from __future__ import annotations

import pytest
import torch
from support import small_images as images

from npucompile.graphs.ir.trace import trace
from npucompile.graphs.spmd.partition import partition
from npucompile.graphs.types import Mesh, Rules
from npucompile.lowering.backends.eager import EagerExecutable
from npucompile.lowering.lower import lower_eager
from npucompile.models import step
from npucompile.tools.verify.reference_run import THOUGHT, Alone
from npucompile.tools.verify.small_model import held_params
from npucompile.tools.verify.step_trace import seat_pool

F32 = torch.float32


@pytest.fixture(scope="module", params=[0, 2])
def image(request):
    return images.image("dp=2,tp=2", ("prefill", "decode"), drafts=request.param)


def alone(image):
    return Alone(image.small.reference, image.small.limits, held_params(image.small.reference, image.checkpoint))


def turn(image, kind):
    return next(turn for turn in image.script.turns if turn.case.form.kind == kind and turn.expected[0])


def played(image, kind):
    """A turn's inputs and pools of numbers; NaN stays where it is null."""
    one, generator = turn(image, kind), torch.Generator().manual_seed(3)
    pools = [torch.randn(leaf.aval.shape, generator=generator) for leaf in image.script.leaves]
    pools[seat_pool(image.script.leaves)] = one.seats[0].clone()
    return one, pools


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_step_is_that_of_the_traced_graph(image, kind):
    one, pools = played(image, kind)
    given = [pool.clone() for pool in pools]
    outputs, new = alone(image).step(one.case.bucket, pools, one.inputs[0])
    lowered = lower_eager(partition(trace(step.program(image.small.reference, one.case.bucket, image.small.limits, F32)), Mesh(), Rules()))
    names = [leaf.path for leaf in lowered.signature.inputs]
    params = held_params(image.small.reference, image.checkpoint)
    found = EagerExecutable(lowered.graph)([*params, *given, *(one.inputs[0][name] for name in names)])
    told = dict(zip((leaf.path for leaf in lowered.signature.outputs), found, strict=True))
    assert set(outputs) - {THOUGHT} == set(told)
    rows = list(one.expected[0].rows)
    for name, value in told.items():
        torch.testing.assert_close(outputs[name][rows], value[rows], rtol=1e-5, atol=1e-5)
    for left, right in zip(new, given, strict=True):
        torch.testing.assert_close(left[1:], right[1:], rtol=1e-5, atol=1e-5)


def test_pools_stay_as_they_are(image):
    one, pools = played(image, "decode")
    before = [pool.clone() for pool in pools]
    _, new = alone(image).step(one.case.bucket, pools, one.inputs[0])
    assert all(torch.equal(left, right) for left, right in zip(pools, before, strict=True))
    assert not any(torch.equal(left, right) for left, right in zip(pools, new, strict=True))


def test_the_draft_head_is_heard_once_a_draft_and_its_best_token_is_the_draft(image):
    device, k = alone(image), image.small.limits.drafts
    for kind in ("prefill", "decode", "decode"):
        one, pools = played(image, kind)
        outputs, _ = device.step(one.case.bucket, pools, one.inputs[0])
        assert (THOUGHT in outputs) == ("drafts" in outputs) == (k > 0)
        if k:
            assert outputs[THOUGHT].shape == (one.case.bucket.batch, k, image.small.reference.config.vocab_size)
            assert torch.equal(outputs[THOUGHT].argmax(-1).int(), outputs["drafts"])


def test_the_family_itself_stays_deaf(image):
    before = vars(image.small.reference.family)["draft_head"]
    alone(image)
    assert vars(image.small.reference.family)["draft_head"] is before


def test_pools_are_named_as_in_the_model(image):
    names = [leaf.name for leaf in alone(image).leaves(turn(image, "decode").case.bucket)]
    assert names == [leaf.name for leaf in image.script.leaves]
    assert ("state.mtp.k" in names) == (image.small.limits.drafts > 0)
