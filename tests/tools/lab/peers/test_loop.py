from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.tools.lab.peers import loop
from npucompile.tools.lab.peers.loop import ArrivalTimes, answer

ADAPTER = """
import os

class Engine:
    version = "1.2"

    def load(self, model, dtype, threads, max_model_len, max_num_seqs):
        print("noise of a library", flush=True)
        os.system("echo noise of a program")
        return f"{model} in {dtype} on {threads}"

    def generate(self, prompts, tokens, emit):
        if prompts[0][0] == 13:
            raise RuntimeError("unlucky")
        for i, prompt in enumerate(prompts):
            emit(i, [prompt[-1] + n for n in range(tokens)])

def open_engine():
    return Engine()
"""
LOAD = {"do": "load", "model": "m", "dtype": "f32", "threads": 2, "max_model_len": 8, "max_num_seqs": 2}


def talk(adapter: Path, *requests: dict[str, object]) -> list[dict[str, object]]:
    """What a process with this adapter answers, its first line included."""
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    command = [sys.executable, "-I", str(Path(loop.__file__)), str(adapter)]
    process = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in process.stdout.splitlines()]


def test_a_process_answers_every_request_and_nothing_else_reaches_its_output(tmp_path: Path) -> None:
    # Named as a library: it must not be found by `import` in the adapter's place.
    adapter = tmp_path / "json.py"
    adapter.write_text(ADAPTER)
    hello, loaded, settled, generated, failed, unknown = talk(
        adapter,
        LOAD,
        {"do": "settle"},
        {"do": "generate", "prompts": [[1, 5], [2, 9]], "tokens": 3},
        {"do": "generate", "prompts": [[13]], "tokens": 3},
        {"do": "dance"},
    )
    assert hello == {"version": "1.2"}
    assert loaded == {"loaded": "m in f32 on 2"}
    assert settled == {}
    assert generated["token_ids"] == [[5, 6, 7], [9, 10, 11]]
    assert failed["error"] == "RuntimeError: unlucky"
    assert "in generate" in str(failed["trace"])
    assert unknown["error"] == "ValueError: the request is to 'dance'; legal are load, settle and generate"


def test_an_engine_that_is_not_installed_is_told_apart(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter.py"
    adapter.write_text("def open_engine():\n    import no_such_engine\n")
    assert talk(adapter) == [{"missing": "No module named 'no_such_engine'"}]


@given(st.lists(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=4), min_size=1, max_size=4))
def test_prefill_ends_with_the_last_first_token(streams: list[list[tuple[int, int]]]) -> None:
    """Against a count over all arrivals: (seconds after the one before, tokens at once) of each stream, padded to equal lengths."""
    tokens = max(sum(count for _, count in stream) for stream in streams)
    arrivals = []
    for i, stream in enumerate(streams):
        at = 0
        for gap, count in [*stream, (1, tokens - sum(count for _, count in stream))]:
            at += gap
            arrivals += [(at, i, count)] if count else []
    now = 0.0
    watch = ArrivalTimes(len(streams), lambda: now)
    for at, i, count in sorted(arrivals):
        now = float(at)
        watch(i, [7] * count)
    report = watch.report(tokens)
    first = max(min(at for at, i, _ in arrivals if i == n) for n in range(len(streams)))
    assert report["prefill_s"] == first
    assert report["decode_s"] == max(at for at, _, _ in arrivals) - first
    assert report["decoded"] == sum(count for at, _, count in arrivals if at > first)
    assert report["token_ids"] == [[7] * tokens] * len(streams)


def test_a_stream_that_is_too_short_is_refused() -> None:
    class Short:
        version = "0"

        def load(self, model: str, dtype: str, threads: int, max_model_len: int, max_num_seqs: int) -> str:
            return ""

        def generate(self, prompts: object, tokens: int, emit: loop.Emit) -> None:
            emit(0, [1] * tokens)

    with pytest.raises(ValueError, match=r"streams brought \[4, 0\] tokens; each was asked for 4"):
        answer(Short(), {"do": "generate", "prompts": [[1], [2]], "tokens": 4})
