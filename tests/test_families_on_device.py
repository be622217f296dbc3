"""A small model of every family, quantised and written to disk, served with drafts by the ranks of emulated devices.

The oracle is the same quantised checkpoint on one device, eager and without drafts (`support/served.py`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import optional, served, tiny
from support.device_families import CASES, checkpoints, planned
from support.handovers import Server, hand_over

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.request import Sampling
from npucompile.tools.ranks.offline import OfflineCompletion, complete

PROMPTS = [[1, 2, 3], list(range(100, 190)), [7] * 5]
TOKENS = 8

pytestmark = pytest.mark.usefixtures("threads")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.short_cases("qwen3")
def test_it_serves_what_one_device_computes(name, tmp_path):
    optional.transfer_engine()
    case = CASES[name]
    directory, options = checkpoints(case, tmp_path)
    plan = planned(case, directory, options, case.mesh)
    tiny.built(plan, tmp_path / "artifact")
    artifact = Artifact.open(tmp_path / "artifact")
    launched = {operator for entry in artifact.manifest.graphs for operator in entry.census}
    assert set(case.operators) <= launched, sorted(launched)
    with served.emulated(artifact, tmp_path / "cache") as executor:
        drafted = complete(executor, PROMPTS, Sampling(), TOKENS, frozenset())
        plain = complete(executor, PROMPTS, Sampling(), TOKENS, frozenset(), speculative_tokens=0)
        # What a family's pools hold travels with a prompt: from this server's memory into other pages of it.
        server, handed = Server(executor, artifact), list[OfflineCompletion]()
        for prompt, completion in zip(PROMPTS, plain, strict=True):
            server.start()
            handed.append(replace(completion, token_ids=tuple(hand_over(server, server, prompt, TOKENS))))
        server.pools.close()
        assert executor.compiles() == 0
    assert sum(sum(completion.record.accepted_per_position) for completion in drafted) > 0, "drafts are right now and then"
    checked = served.Checked(directory, "none", plan.model.config.variant.shards)
    checked.check(PROMPTS, drafted, plain)
    checked.check(PROMPTS, plain, drafted)
    checked.check(PROMPTS, handed, plain)
    assert checked.decided >= 8


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3.2"])
def test_steps_of_several_widths_give_the_tokens_of_one(name, tmp_path):
    """Of graphs that are captured, and of GE's with latents."""
    case = CASES[name]
    directory, options = checkpoints(case, tmp_path)
    plan = planned(case, directory, options, case.mesh, draft_widths=(1, 2, 3))
    tiny.built(plan, tmp_path / "artifact")
    with served.emulated(Artifact.open(tmp_path / "artifact"), tmp_path / "cache") as executor:
        drafted = complete(executor, PROMPTS, Sampling(), 16, frozenset())
        plain = complete(executor, PROMPTS, Sampling(), 16, frozenset(), speculative_tokens=0)
    ran = {bucket for completion in drafted for bucket, _ in completion.record.decode_steps}
    assert ran == {"decode-b2-q1", "decode-b2-q2", "decode-b2-q3"}
    checked = served.Checked(directory, "none", plan.model.config.variant.shards)
    checked.check(PROMPTS, drafted, plain)
    checked.check(PROMPTS, plain, drafted)
    assert checked.decided >= 16
