"""tools/prove/reference_run.py: steps are those of the traced graph, and come with the logits of the draft head."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import small_images as images

from npucompile.graphs.ir.trace import trace
from npucompile.graphs.spmd.partition import partition
from npucompile.graphs.types import Mesh, Rules
from npucompile.lowering.backends.eager import EagerExecutable
from npucompile.lowering.lower import lower_eager
from npucompile.models import qwen3, step
from npucompile.tools.agreement.pools import request_slot_pool
from npucompile.tools.prove.reference_run import DRAFT_LOGITS, ReferenceRun, _recording
from npucompile.tools.prove.small_model import model_params

F32 = torch.float32


@pytest.fixture(scope="module", params=[0, 2])
def image(request):
    return images.image("dp=2,tp=2", ("prefill", "decode"), drafts=request.param)


def reference(image):
    return ReferenceRun(image.small.reference, image.small.limits, model_params(image.small.reference, image.checkpoint))


def traced(image, kind):
    return next(s for s in image.trace.steps if s.case.form.kind == kind and s.expected[0])


def played(image, kind):
    """A step of the trace, and pools of random numbers with its request slots."""
    traced_step, generator = traced(image, kind), torch.Generator().manual_seed(3)
    pools = [torch.randn(leaf.aval.shape, generator=generator) for leaf in image.trace.leaves]
    pools[request_slot_pool(image.trace.leaves)] = traced_step.request_slots[0].clone()
    return traced_step, pools


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_step_is_that_of_the_traced_graph(image, kind):
    traced_step, pools = played(image, kind)
    copies = [pool.clone() for pool in pools]
    outputs, new = reference(image).step(traced_step.case.bucket, pools, traced_step.inputs[0])
    lowered = lower_eager(
        partition(trace(step.program(image.small.reference, traced_step.case.bucket, image.small.limits, F32)), Mesh(), Rules())
    )
    names = [leaf.path for leaf in lowered.signature.inputs]
    params = model_params(image.small.reference, image.checkpoint)
    results = EagerExecutable(lowered.graph)([*params, *copies, *(traced_step.inputs[0][name] for name in names)])
    expected = dict(zip((leaf.path for leaf in lowered.signature.outputs), results, strict=True))
    assert set(outputs) - {DRAFT_LOGITS} == set(expected)
    rows = list(traced_step.expected[0].rows)
    for name, value in expected.items():
        torch.testing.assert_close(outputs[name][rows], value[rows], rtol=1e-5, atol=1e-5)
    for left, right in zip(new, copies, strict=True):
        torch.testing.assert_close(left[1:], right[1:], rtol=1e-5, atol=1e-5)


def test_pools_stay_as_they_are(image):
    traced_step, pools = played(image, "decode")
    copies = [pool.clone() for pool in pools]
    _, new = reference(image).step(traced_step.case.bucket, pools, traced_step.inputs[0])
    assert all(torch.equal(left, right) for left, right in zip(pools, copies, strict=True))
    assert not any(torch.equal(left, right) for left, right in zip(pools, new, strict=True))


def test_there_are_draft_logits_of_each_draft_and_its_best_token_is_the_draft(image):
    device, k = reference(image), image.small.limits.drafts
    for kind in ("prefill", "decode", "decode"):
        traced_step, pools = played(image, kind)
        outputs, _ = device.step(traced_step.case.bucket, pools, traced_step.inputs[0])
        assert (DRAFT_LOGITS in outputs) == ("drafts" in outputs) == (k > 0)
        if k:
            assert outputs[DRAFT_LOGITS].shape == (traced_step.case.bucket.batch, k, image.small.reference.config.vocab_size)
            assert torch.equal(outputs[DRAFT_LOGITS].argmax(-1).int(), outputs["drafts"])


def test_a_family_without_a_draft_head_is_left_as_it_is():
    plain = replace(qwen3.FAMILY, draft_head=None)
    assert _recording(plain, []) is plain
