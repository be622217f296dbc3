"""tools/commands/serve.py: which artifact is served, and a server from start to Ctrl-C."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import socket
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import ranks, tiny

from npucompile.graphs.errors import ArtifactMissing, ArtifactStale, ArtifactTampered, ModelError, SpecError, UnknownModel
from npucompile.lowering.artifact.artifact import Artifact, ArtifactWriter
from npucompile.models.presets import BUNDLED
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.request import Sampling
from npucompile.server.client import Client
from npucompile.server.run import websocket_url
from npucompile.tools.cli import Home
from npucompile.tools.commands.serve import announce
from npucompile.tools.progress import Progress
from npucompile.tools.ranks.offline import complete
from npucompile.tools.ranks.rank_settings import RankSettings
from npucompile.tools.serve import serving
from npucompile.tools.serve.serving import find_or_build, incomplete

AUTO = RankSettings(device="auto")


class Builder:
    """Builds nothing: what it would be waited for lies elsewhere already."""

    made: Artifact | BaseException

    def __init__(self, arguments, out, environment):
        self.arguments, self.out, self.environment = tuple(arguments), out, environment
        self.stopped = 0
        type(self).latest = self

    def wait_servable(self):
        if isinstance(self.made, BaseException):
            raise self.made
        return self.made

    def stop(self):
        self.stopped += 1


@pytest.fixture
def builder(monkeypatch, tiny_artifact):
    class Mine(Builder):
        made = Artifact.open(tiny_artifact)
        latest = None

    monkeypatch.setattr(serving, "BackgroundBuild", Mine)
    return Mine


def home_at(path):
    return Home(path, {"PATH": "/bin"})


def found(path, name=None, no_build=False):
    output = io.StringIO()
    artifact, building = find_or_build(home_at(path), name, AUTO, no_build, Progress(output))
    return artifact, building, output.getvalue()


# --- which ---


def test_the_newest_that_can_run_is_served(tmp_path, own_artifact, builder):
    newer = tiny.copied(own_artifact, tmp_path / "artifacts" / "newer")
    tiny.with_compiled(newer, toolchain={"torch": "1.0"})
    os.utime(newer / "manifest.msgpack", (2**32, 2**32))
    artifact, building, output = found(tmp_path)
    assert artifact.path == own_artifact
    assert building is None
    assert "passed over: " in output
    assert "torch was '1.0'" in output


@pytest.mark.parametrize("given", [True, False])
def test_a_model_is_built_and_served_and_where_none_is_named_the_bundled_one(tmp_path, tiny_checkpoint, builder, given):
    artifact, building, output = found(tmp_path, str(tiny_checkpoint) if given else None)
    assert artifact is builder.made
    assert building.arguments == (str(tiny_checkpoint) if given else BUNDLED[0],)
    assert building.out == tmp_path / "artifacts" / ("tiny" if given else BUNDLED[0])
    assert building.environment == {"PATH": "/bin"}
    assert (f"building the bundled model {BUNDLED[0]}" in output) != given


@pytest.mark.parametrize("name", ["tiny", None])
def test_an_artifact_is_served_as_it_is(tmp_path, own_artifact, builder, name):
    artifact, building, _ = found(tmp_path, name)
    assert artifact.path == own_artifact
    assert building is None
    assert builder.latest is None


def test_a_build_that_was_interrupted_goes_on_behind_the_server(tmp_path, own_artifact, builder):
    tiny.published(own_artifact, lambda manifest, _: replace(manifest, backend="inductor"))
    artifact, building, _ = found(tmp_path, "tiny")
    assert artifact.path == building.out == own_artifact
    assert building.arguments == artifact.manifest.build_arguments
    assert found(tmp_path, "tiny", no_build=True)[1] is None
    tiny.with_compiled(own_artifact, "eager")
    assert found(tmp_path, "tiny")[1] is None


@pytest.mark.parametrize("name", [None, "tiny", "qwen3.5-tiny"])
def test_no_build_builds_nothing(tmp_path, builder, name):
    with pytest.raises(ArtifactMissing, match=r"(run here|a built model).*--no-build builds nothing.* --backend eager` takes seconds"):
        found(tmp_path, name, no_build=True)
    assert builder.latest is None


def test_what_cannot_run_is_refused_by_name(tmp_path, own_artifact, builder):
    weights = Artifact.open(own_artifact).manifest.weights
    with tiny.damaged(own_artifact / weights), pytest.raises(ArtifactTampered, match=weights):
        found(tmp_path, "tiny")
    tiny.with_compiled(own_artifact, toolchain={"torch": "1.0"})
    with pytest.raises(ArtifactStale, match=r"torch was '1\.0'"):
        found(tmp_path, "tiny")
    with pytest.raises(UnknownModel, match="'tinny' is neither a preset"):
        found(tmp_path, "tinny")
    with pytest.raises(SpecError, match=r"qwen3\.5-27b is a set of sizes without weights"):
        found(tmp_path, "qwen3.5-27b")
    assert builder.latest is None


def test_a_model_that_text_cannot_reach_is_refused_before_it_is_built(tmp_path, builder):
    model = tiny.write_checkpoint(tmp_path / "mute", tokenizer=False)
    with pytest.raises(ModelError, match=r"mute has no tokenizer\.json"):
        found(tmp_path, str(model))
    assert builder.latest is None


def test_a_build_that_is_not_waited_for_is_stopped(tmp_path, builder):
    builder.made = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        found(tmp_path)
    assert builder.latest.stopped == 1


@pytest.mark.parametrize("lacking", ["weights", "tokenizer"])
def test_a_build_behind_what_cannot_be_served_is_stopped(tmp_path, own_artifact, builder, lacking):
    builder.made = tiny.published(own_artifact, lambda manifest, _: replace(manifest, **{lacking: None}))
    output = tiny.refused(tmp_path, "serve", "--port", 0)
    assert ("has no tokenizer" if lacking == "tokenizer" else "without weights") in output
    assert builder.latest.stopped == 1


# --- what is said ---


def announced(backends, building, host, port, mesh="1", prefills=False):
    output = io.StringIO()
    artifact = SimpleNamespace(path="/a", manifest=SimpleNamespace(mesh=mesh))
    announce("m", backends, artifact, building, Progress(output), prefills=prefills)(websocket_url(host, port))
    return output.getvalue().splitlines()


def test_a_prefill_server_says_who_may_ask_it():
    *_, last = announced({}, False, "127.0.0.1", 8001, prefills=True)
    assert last == "  computes prompts for decode servers: npucompile serve ... --role decode --prefill http://127.0.0.1:8001"


def test_how_to_talk_to_it_is_said():
    lines = announced({"a": "inductor"}, False, "127.0.0.1", 8000)
    assert lines == [
        "serving m from /a: 1 buckets, 0 uncompiled",
        "  websocket  ws://127.0.0.1:8000/v1/responses   health  http://127.0.0.1:8000/health   chat page  http://127.0.0.1:8000/",
        '  talk to it: npucompile chat "In the beginning"',
    ]
    lines = announced({"a": "eager", "b": "inductor"}, True, "::1", 9)
    assert lines[0].endswith("2 buckets, 1 uncompiled")
    assert "until the build behind this server has compiled them" in lines[1]
    assert lines[2].endswith("ws://[::1]:9/v1/responses   health  http://[::1]:9/health   chat page  http://[::1]:9/")
    assert lines[3].endswith("--url ws://[::1]:9/v1/responses")
    assert announced({"a": "eager"}, False, "127.0.0.1", 8000, "dp=2,tp=4")[1] == "  8 ranks of mesh dp=2,tp=4, a process each"


# --- all of it ---


def test_a_server_from_its_start_to_ctrl_c(server, tmp_path, tiny_artifact):
    """A process of its own: after ready it has traced and compiled nothing, whatever was asked."""
    started = server(tiny_artifact, "--access-log", tmp_path / "access.jsonl", "--record", tmp_path / "journal", home=tmp_path)
    assert f"responses end at token {tiny.EOS} " in started.output
    completions, told = asyncio.run(ask_many(started.url)), started.metrics()
    assert len(completions) == 6
    started.process.send_signal(signal.SIGINT)
    assert ranks.finished(started.process) == (0, "", "")
    assert "npucompile:compiles_after_ready_total 0.0\n" in told
    assert 'npucompile:requests_finished_total{reason="length"} 6.0\n' in told
    assert 'npucompile:bucket_steps_total{bucket="decode-b4-q4"}' in told
    assert re.search(r"vllm:time_to_first_token_seconds_count{.*} 6\.0\n", told)
    logged = [json.loads(line) for line in (tmp_path / "access.jsonl").read_text().splitlines()]
    assert sorted(entry["event"] for entry in logged) == ["http", *["request"] * 6, "websocket"]
    assert {entry["id"] for entry in logged if entry["event"] == "request"} == {done.response_id for done in completions}
    replayed = tiny.cli(tmp_path, "replay", tmp_path / "journal", "--json")
    assert replayed.exit_code == 0, replayed.output
    found = json.loads(replayed.stdout)
    assert (found["requests"], found["divergence"]) == (6, None)
    # A step may give more tokens than its request wants.
    assert found["tokens"] >= sum(len(done.token_ids) for done in completions)


async def ask_many(url):
    """Six streams at once on one socket, of different lengths and kinds."""
    async with await Client.connect(url) as client:
        options = [{}, {"temperature": 1.0, "seed": 3}, {"top_k": 3, "temperature": 0.5}, {"top_p": 0.5, "temperature": 2.0}, {}, {}]
        streams = [
            client.create([7 + i] * (1 + 9 * i), max_output_tokens=8 + i, ignore_eos=True, **chosen) for i, chosen in enumerate(options)
        ]
        return await asyncio.gather(*(stream.completion() for stream in streams))


# --- several ranks ---


def test_what_another_process_builds_is_waited_for(tmp_path, own_artifact, builder):
    """Of two servers of one artifact the first one completes it."""
    tiny.published(own_artifact, lambda manifest, _: replace(manifest, backend="inductor"))
    with ArtifactWriter(own_artifact):
        artifact, building, output = found(tmp_path)
        assert (artifact.path, building, builder.latest) == (own_artifact, None, None)
        assert output == f"process {os.getpid()} builds what {own_artifact.name} lacks; it is run here as well when it is there\n"
    assert found(tmp_path)[1] is builder.latest is not None


def test_no_build_goes_on_behind_ranks(tmp_path, sharded, builder):
    path = tiny.copied(sharded("tp=2"), tmp_path / "artifacts" / "two")
    tiny.published(path, lambda manifest, _: replace(manifest, backend="stub"))
    assert incomplete(Artifact.open(path))
    assert find_or_build(Home(tmp_path, {}), "two", AUTO, False, Progress(quiet=True))[1] is None
    assert builder.latest is None


def test_ranks_are_served_and_one_that_is_killed_while_there_is_nothing_to_do_ends_all(server, sharded):
    """tests/tools/ranks/test_emulated_ranks.py has one that is killed within streams."""
    sharded_server, alone = server(sharded("tp=2")), CpuExecutor(Artifact.open(sharded("")))
    assert "2 ranks of mesh tp=2, a process each" in sharded_server.output
    (expected,) = complete(alone, [[7, 8, 9]], Sampling(), 12, frozenset())
    assert asyncio.run(sharded_server.ask(12)) == expected.token_ids
    (victim,) = sharded_server.others
    os.kill(victim, signal.SIGKILL)
    died = f"rank 1 of mesh tp=2 died: process {victim} was killed by signal 9 (SIGKILL); all ranks end"
    assert sharded_server.ended() == (1, f"Error: {died}\n")


@pytest.mark.long
def test_ctrl_c_ends_ranks_in_order_and_a_rank_0_that_is_killed_takes_the_others_along(server, sharded):
    first, second = server(sharded("tp=2")), server(sharded("tp=2"))
    for pid in (first.process.pid, *first.others):
        os.kill(pid, signal.SIGINT)
    assert first.ended() == (0, "")
    second.process.kill()
    ranks.eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in second.others), 10)


# --- before there is a model ---


def test_a_server_that_builds_answers_and_sigterm_ends_it_with_its_build(tmp_path, tiny_checkpoint):
    """It listened only after the build, and left the build running."""
    model = tmp_path / "model"
    model.symlink_to(tiny_checkpoint)
    port = ranks.free_port()
    process = ranks.spawn(ranks.command("serve", model, "--port", port, "--threads", 1), ranks.environment(tmp_path))
    try:
        ranks.eventually(lambda: probe(port, "/health") == 200, 60)
        ranks.eventually(lambda: ranks.children_of(process.pid), 60)
        assert probe(port, "/ready") == 503
        (build,) = ranks.children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        status, _, output = ranks.finished(process, 60)
    finally:
        process.kill()
        process.wait()
    assert status != 0
    assert "Traceback" not in output
    ranks.eventually(lambda: not is_running(build), 30)


def is_running(pid):
    """Whether a process computes; one that ended may wait for a while to be asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def probe(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return None


def test_a_taken_port_is_found_before_anything_is_built(tmp_path, builder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        output = tiny.refused(tmp_path, "serve", "--port", port)
    assert f"127.0.0.1 port {port}" in output
    assert builder.latest is None
