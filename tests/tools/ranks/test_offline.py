"""tools/ranks/offline.py: prompts become completions, batched as a server batches them."""

from __future__ import annotations

import pytest
from support import modelslim, tiny

from npucompile.graphs.errors import NpucompileError
from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.request import Sampling
from npucompile.runtime.steps.rows import DecodeRow, PrefillRow
from npucompile.tools.notation import PrefillSize
from npucompile.tools.ranks.offline import complete

GREEDY, NO_STOP = Sampling(), frozenset()


@pytest.fixture(scope="module")
def executor(tiny_artifact):
    return CpuExecutor(Artifact.open(tiny_artifact))


def by_hand(executor, prompt, count):
    """Greedy decoding by running the graphs directly."""
    pages = slots = [1, 2, 3, 4]

    for start in range(0, len(prompt), 16):
        (following,) = prompt[start + 16 : start + 17] or [-1]
        outputs = tiny.run_row(executor, Bucket("prefill", 1, 16), PrefillRow(prompt[start : start + 16], start, pages, 1, 1, following))
    tokens = [int(outputs["tokens"][0, 0])]
    while len(tokens) < count:
        outputs = tiny.run_row(executor, Bucket("decode", 1, 4), DecodeRow(1, len(prompt) + len(tokens) - 1, pages, slots, 3))
        tokens += outputs["tokens"][0, : outputs["counts"][0]].tolist()
    return tuple(tokens[:count])


def test_completions_are_what_the_graphs_say(executor):
    prompts = [[1, 2, 3], [9] * 20, list(range(50)), [0], [255]]
    expected = [by_hand(executor, prompt, 6) for prompt in prompts]
    assert len(set(expected)) == 5
    completions = complete(executor, prompts, GREEDY, 6, NO_STOP)
    assert [completion.token_ids for completion in completions] == expected
    for completion, prompt in zip(completions, prompts, strict=True):
        assert (completion.prompt_tokens, completion.completion_tokens, completion.reason) == (len(prompt), 6, "length")
        assert completion.acceptance_length == completion.record.acceptance_length >= 1.0
        assert completion.record.prefill_chunks
        assert completion.logprobs == ()
    assert any(completion.record.padded_rows or dict(completion.record.decode_steps).get("decode-b4-q4") for completion in completions)


def test_prompts_that_share_a_prefill_step_get_what_each_gets_alone(executor, tiny_checkpoint, tmp_path):
    tiny.built(tiny.planned(tiny_checkpoint, prefill=(16, PrefillSize(16, 4))), tmp_path / "artifact")
    prompts = [[1, 2, 3], [9] * 20, list(range(50)), [0], [255], [7] * 16]
    together = complete(CpuExecutor(Artifact.open(tmp_path / "artifact")), prompts, GREEDY, 12, NO_STOP)
    assert [each.token_ids for each in together] == [by_hand(executor, prompt, 12) for prompt in prompts]
    shared, single = "prefill-b4-q16", "prefill-b1-q16"
    # Four at first; then the two in progress are as cheap one after the other, and the last two come when slots are free.
    assert [each.record.prefill_chunks for each in together[:4]] == [(shared,), (shared, single), (shared, *[single] * 3), (shared,)]


@pytest.mark.parametrize("name", ["dense_w8a8_mix_m4", "moe_w4a8_group"])
def test_a_checkpoint_that_is_quantised_is_built_and_served(name, tmp_path):
    """Tokens are those of ModelSlim's own arithmetic."""
    artifact = tmp_path / "artifact"
    tiny.built(tiny.planned(modelslim.FIXTURES / name), artifact)
    prompts = [[3, 200, 41, 7], [77, 12]]
    for prompt, completion in zip(prompts, complete(CpuExecutor(Artifact.open(artifact)), prompts, GREEDY, 5, NO_STOP), strict=True):
        ids = [*prompt, *completion.token_ids]
        greedy = modelslim.logits(name, ids[:-1])[len(prompt) - 1 :].argmax(-1)
        assert list(completion.token_ids) == greedy.tolist()


def test_a_step_that_fails_is_reported(executor, caplog):
    class Broken(tiny.Narrowed):
        def launch(self, bucket, inputs):
            raise ZeroDivisionError("no")

    with pytest.raises(NpucompileError, match="generation failed: prefill-b1-q4: ZeroDivisionError: no"):
        complete(Broken(executor, executor.buckets), [[1]], GREEDY, 4, NO_STOP)
