"""tools/prove/bringup/short_serve.py: requests end equal with and without drafts, and a compile or another token is found."""

from __future__ import annotations

import pytest
from support import tiny

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.tools.prove.bringup.short_serve import _compared, prompts_of, run_serve


@pytest.fixture
def serve(tiny_artifact):
    executor = CpuExecutor(Artifact.open(tiny_artifact))

    def run():
        with tiny.QUIET.bar("serve", 2) as bar:
            return run_serve(executor, bar)

    return executor, run


def test_a_right_executor_passes(serve):
    executor, run = serve
    failures, facts = run()
    assert failures == []
    assert facts == {"requests": 4, "tokens": 48, "compiles": 0}
    assert len({len(prompt) for prompt in prompts_of(executor)}) > 2


def test_a_compile_after_ready_is_found(serve, monkeypatch):
    executor, run = serve
    monkeypatch.setattr(executor, "compiles", lambda: 1)
    ((failure,), _) = run()
    assert "1 compiles after ready" in failure.message


def test_other_tokens_with_drafts_are_found_and_one_tie_is_not():
    plain = [list(range(12)) for _ in range(4)]
    assert _compared(plain, plain) == []
    assert _compared([[*range(6), 99, *range(7, 12)], *plain[1:]], plain) == []
    wrong = [[0, 1, 99, *range(3, 12)] for _ in range(4)]
    (failure,) = _compared(wrong, plain)
    assert failure.assumption == "delta-rule"
    assert "4 of 4 requests differ" in failure.message
