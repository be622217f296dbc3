"""tools/serve/recording.py: a journal says what the engine that repeats it must know."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support import tiny

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.artifact.fixed_cost import fixed_tokens
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.engine import Engine
from npucompile.runtime.journal import Journal, JournalFile
from npucompile.runtime.request import Request
from npucompile.runtime.steps.sizes import choose_prefill
from npucompile.tools.serve.recording import facts_of


def test_a_run_of_a_machine_with_another_balance_repeats(tmp_path: Path) -> None:
    directory = tmp_path / "artifact"
    tiny.built(tiny.planned(tiny.write_checkpoint(tmp_path / "checkpoint"), prefill=(4, 32)), directory)
    artifact = Artifact.open(directory)
    engine = Engine(CpuExecutor(artifact), refresh_every_s=None, fixed_tokens=1.0)
    journal = JournalFile(tmp_path / "run.journal", facts_of(artifact, engine))
    engine.stepper.journal = Journal(journal.write)
    engine.submit(Request("r", tuple(range(9)), 2), lambda _: None)
    while engine.step():
        pass
    journal.close()
    # Three small steps, which this machine would not take.
    here = replace(engine.stepper.policy, fixed_tokens=fixed_tokens(artifact.manifest))
    assert [choose_prefill(policy.buckets, [[9]], policy.price).q_len for policy in (engine.stepper.policy, here)] == [4, 32]
    result = tiny.cli(tmp_path, "replay", tmp_path / "run.journal")
    assert result.exit_code == 0, result.output
