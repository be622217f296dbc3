"""tools/serve/serving.py: an artifact is served, compiled in the background, and swapped in; contains the one real compile."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest import mock

import pytest
from support import tiny

from npucompile.graphs.errors import ArtifactError, NpucompileError, RequestError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.server.client import Client
from npucompile.server.run import serving
from npucompile.server.text.tokenizer import TextTokenizer
from npucompile.tools.builder import driver
from npucompile.tools.builder.pool import run_all
from npucompile.tools.serve import serving as module
from npucompile.tools.serve.serving import BackgroundBuild, incomplete, start_service

COMPILED = "decode-b1-q3"
PROMPT = "In the"


@contextmanager
def served(artifact):
    """A running server over an artifact: the service, and the URL of its websocket."""
    running = start_service(artifact, lambda: CpuExecutor(artifact))
    try:
        with serving(running.service) as url:
            yield running, url
    finally:
        running.engine.stop(drain=False)


def ask(url, prompt=PROMPT, tokens=10):
    async def once():
        async with await Client.connect(url) as client:
            return await client.create(prompt, max_output_tokens=tokens, ignore_eos=True).completion()

    return asyncio.run(once())


def health(url):
    with urllib.request.urlopen(url.replace("ws://", "http://").replace("/v1/responses", "/health")) as answer:
        return json.load(answer)


# --- with an executable that g++ made ---


@dataclass(frozen=True)
class Swapped:
    """What a client saw of a server whose artifact was compiled in the background."""

    path: object
    before: tuple
    after: tuple
    health_before: dict
    health_after: dict
    backends: dict
    report: driver.BuildReport


@pytest.fixture(scope="module")
def swapped(tiny_checkpoint, tmp_path_factory):
    """Serves an uncompiled artifact, compiles one of its two buckets, and asks until the server runs that.

    With two drafts and a few log probabilities the decode graph has every kind of output and still compiles fast.
    """
    out = tmp_path_factory.mktemp("swapped") / "tiny"
    few = {"num_speculative_tokens": 2, "max_logprobs": 2}
    plan = tiny.planned(tiny_checkpoint, buckets=(1,), prefill=(4,), max_model_len=32, backend="inductor", **few)
    with mock.patch.object(driver, "run_all", return_value=iter(())):
        tiny.built(plan, out)
    with served(Artifact.open(out)) as (running, url):
        health_before, before = health(url), ask(url).token_ids
        with mock.patch.object(driver, "run_all", lambda jobs, workers: run_all([j for j in jobs if j.bucket.name == COMPILED], workers)):
            report = tiny.built(plan, out)
        assert list(report.compiled) == [COMPILED]
        after = ask(url).token_ids
        while health(url)["compiled_buckets"] == 0:
            after = ask(url).token_ids
        return Swapped(out, before, (after, ask(url).token_ids), health_before, health(url), dict(running.engine.executor.backends), report)


@pytest.mark.long
def test_a_compiled_bucket_is_swapped_in_while_serving_and_answers_stay_equal(swapped):
    assert list(swapped.report.compiled) == [COMPILED]
    assert swapped.health_before == {"status": "ok", "buckets": 2, "compiled_buckets": 0, "step_age_s": 0.0}
    # A step may be running then.
    assert {**swapped.health_after, "step_age_s": 0} == {"status": "ok", "buckets": 2, "compiled_buckets": 1, "step_age_s": 0}
    assert swapped.backends == {COMPILED: "inductor", "prefill-b1-q4": "eager"}
    assert len(swapped.before) == 10
    assert swapped.after == (swapped.before, swapped.before)


@pytest.mark.long
def test_a_process_that_runs_it_loads_no_compiler(swapped):
    script = """
import json, sys
from pathlib import Path
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.request import Sampling
from npucompile.tools.ranks.offline import complete
executor = CpuExecutor(Artifact.open(Path(sys.argv[1])))
(completion,) = complete(executor, [list(map(int, sys.argv[2].split(",")))], Sampling(), 10, frozenset(), logprobs=1)
assert [entry.top[0][0] for entry in completion.logprobs] == list(completion.token_ids)
compilers = [name for name in sys.modules if name.startswith(("torch._inductor.codegen", "torch._dynamo.symbolic_convert"))]
print(json.dumps([executor.compiles(), executor.backends, completion.token_ids, compilers]))
"""
    prompt = ",".join(map(str, start_codec(swapped.path).encode(PROMPT)))
    process = subprocess.run([sys.executable, "-c", script, str(swapped.path), prompt], capture_output=True, text=True, check=True)
    compiles, backends, tokens, compilers = json.loads(process.stdout)
    assert compiles == 0
    assert backends[COMPILED] == "inductor"
    assert tuple(tokens) == swapped.before
    assert compilers == []


def start_codec(path):
    artifact = Artifact.open(path)
    return TextTokenizer.load(path / artifact.manifest.tokenizer)


# --- without compiling ---


def test_the_service_describes_its_artifact(tiny_artifact):
    artifact = Artifact.open(tiny_artifact)
    with served(artifact) as (running, url):
        model = running.service.model
        assert (model.name, model.max_model_len, model.vocab_size) == ("tiny", tiny.CONTEXT, tiny.VOCAB)
        assert model.eos_token_ids == {tiny.EOS}
        assert model.artifact == artifact.digest
        assert model.created_s == int((tiny_artifact / "manifest.msgpack").stat().st_mtime)
        assert model.max_running == artifact.manifest.limits.num_request_slots - 1
        assert health(url) == {"status": "ok", "buckets": 5, "compiled_buckets": 0, "step_age_s": 0.0}


def test_an_engine_that_died_is_not_said_to_be_well(tiny_artifact):
    """It was: and each request was then told that it was wrong itself."""
    with served(Artifact.open(tiny_artifact)) as (running, url):
        running.engine.give_up("the device is gone")
        for path in ("/health", "/ready"):
            with pytest.raises(urllib.error.HTTPError) as answer:
                urllib.request.urlopen(url.replace("ws:", "http:").replace("/v1/responses", path))
            with answer.value as refusal:
                assert refusal.code == 503
                assert json.load(refusal)["status"] == "failed"
        with pytest.raises(RequestError, match="takes no new requests: the device is gone") as refused:
            ask(url)
        assert refused.value.code == "engine_stopped"


def test_text_needs_a_tokenizer(own_artifact):
    artifact = tiny.published(own_artifact, lambda manifest, _: replace(manifest, tokenizer=None))
    with pytest.raises(ArtifactError, match=r"has no tokenizer; serving text needs a checkpoint directory with tokenizer\.json"):
        start_service(artifact, lambda: pytest.fail("an executor was loaded"))


TARGETS = [("stub", (), True), ("stub", None, False), ("eager", (), False), ("null", (), False)]


@pytest.mark.parametrize(("target", "compiled", "waits"), TARGETS)
def test_only_what_can_be_compiled_waits_for_it(own_artifact, target, compiled, waits):
    tiny.published(own_artifact, lambda manifest, _: replace(manifest, backend=target))
    assert incomplete(tiny.with_compiled(own_artifact, "eager", compiled)) is waits


# --- steps that hang ---


class WatchedEngine(SimpleNamespace):
    def give_up(self, message):
        self.failure = message
        self.told.set()


def engine(age_s):
    return WatchedEngine(step_age_s=age_s, failure=None, told=threading.Event())


def test_a_step_that_hangs_is_given_up_with_the_option_that_says_so():
    hanging = engine(0.3)
    module.watch(hanging, 0.2)
    assert hanging.told.wait(60)
    assert hanging.failure == "a step has not ended within 0.2 s, the time that --step-timeout gives it"


def test_a_step_beside_which_the_process_stood_still_has_the_time_again(monkeypatch):
    """It was given up when the process went on, and the server ended."""
    now_s, slept, given_up = 1000.0, [], []

    def sleep(seconds):
        nonlocal now_s
        slept.append(seconds)
        # Stopped for two minutes in the fifth pause.
        now_s += 120 if len(slept) == 5 else seconds
        if len(slept) > 300:
            stopped.failure = "over"

    began_s = now_s

    class Stopped(SimpleNamespace):
        step_age_s = property(lambda _: now_s - began_s)

    stopped = Stopped(failure=None, give_up=lambda message: given_up.append(now_s))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    monkeypatch.setattr(module.threading, "Thread", lambda target, **_: SimpleNamespace(start=target))
    module.watch(stopped, 60.0)
    assert given_up[0] - (began_s + 4 + 120) == pytest.approx(60, abs=2)


def test_steps_that_end_are_left_alone_and_nobody_is_watched_without_a_limit():
    working, unlimited = engine(0.1), engine(10.0)
    module.watch(working, 0.2)
    module.watch(unlimited, math.inf)
    assert not working.told.wait(0.5)
    assert not unlimited.told.is_set()
    working.failure = "over"


# --- the background build ---


class Process:
    """A process whose n-th poll returns, or calls, the n-th of `polls`."""

    def __init__(self, *polls):
        self.polls = list(polls)
        self.signals = []

    def poll(self):
        outcome = self.polls.pop(0) if len(self.polls) > 1 else self.polls[0]
        return outcome() if callable(outcome) else outcome

    def terminate(self):
        self.signals.append("terminate")

    def wait(self):
        self.signals.append("wait")
        return self.polls[-1]


@pytest.fixture
def started(monkeypatch):
    """What a build was started with; its process is the one that the test sets, and waiting takes no time."""
    started = SimpleNamespace(process=None, command=None, environment=None)

    def popen(command, env, **options):
        started.command, started.environment = command, env
        return started.process

    monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL))
    monkeypatch.setattr(module, "POLL_S", 0)
    return started


def test_it_waits_for_what_the_build_publishes_and_not_for_what_was_there(own_artifact, started):
    """The old artifact may be of other weights, or of another torch."""
    old = Artifact.open(own_artifact)

    def publish():
        tiny.published(own_artifact, lambda manifest, _: replace(manifest, source_digest="new"))

    started.process = Process(None, None, publish, None)
    artifact = BackgroundBuild(["model"], own_artifact, {"A": "b"}).wait_servable()
    assert artifact.manifest.source_digest == "new"
    assert artifact.digest != old.digest
    assert started.environment == {"A": "b"}
    assert started.command[:5] == [sys.executable, "-m", "npucompile.tools.serve.child", str(os.getpid()), "build"]
    assert started.command[5:] == ["model", "--out", str(own_artifact), "--jobs", "1", "--nice", str(module.BUILD_NICENESS)]


@pytest.mark.parametrize("publishes", [True, False])
def test_a_build_that_ends_at_once_is_seen_and_so_is_one_that_is_up_to_date(own_artifact, started, publishes):
    def publish():
        tiny.published(own_artifact, lambda manifest, _: manifest)
        return 0

    started.process = Process(publish if publishes else None, 0)
    assert BackgroundBuild(["model"], own_artifact, {}).wait_servable().path == own_artifact


@pytest.mark.parametrize("there", [False, True])
def test_a_build_that_fails_is_reported(own_artifact, tmp_path, started, there):
    started.process = Process(None, 1)
    with pytest.raises(NpucompileError, match="the build ended with status 1 before there was anything to serve"):
        BackgroundBuild(["model"], own_artifact if there else tmp_path / "out", {}).wait_servable()
    with pytest.raises(NpucompileError, match="the build ended with status 1; it said why above"):
        BackgroundBuild(["model"], own_artifact, {}).wait_complete()


def test_stopping_ends_a_build_that_runs_and_leaves_one_that_ended(tmp_path, started):
    for status, signals in ((None, ["terminate", "wait"]), (0, ["wait"])):
        started.process = Process(status)
        BackgroundBuild(["model"], tmp_path, {}).stop()
        assert started.process.signals == signals


def test_a_real_build_in_a_real_process(tiny_checkpoint, tmp_path, capfd):
    out = tmp_path / "out"
    arguments = ["--buckets", "1", "--prefill", "4", "--max-model-len", "16", "--backend", "eager", "--dtype", "float32"]
    builder = BackgroundBuild([str(tiny_checkpoint), *arguments], out, os.environ)
    try:
        artifact = builder.wait_servable()
    finally:
        builder.process.wait()
    assert builder.process.returncode == 0
    assert builder.wait_complete().digest == Artifact.open(out).digest
    assert [entry.bucket.name for entry in artifact.manifest.graphs] == ["prefill-b1-q4", "decode-b1-q4"]
    assert capfd.readouterr().out == ""
