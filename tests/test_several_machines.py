"""Servers over network namespaces: the documented lines answer as one machine does, and what goes wrong is named on each machine."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support import ranks, tiny
from support.machines import machines
from support.served import emulated

from npucompile.graphs.errors import RequestError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.request import Sampling
from npucompile.server.client import Client
from npucompile.tools.ranks.offline import complete

DOCS = Path(__file__).resolve().parents[1] / "docs"
PROMPTS = [[7, 8, 9], [1] * 9, list(range(20))]
TOKENS = 6
SECRET = "known-to-all-machines"
MASTER = "10.77.0.1"
NODE_0, NODE_1 = "node rank 0 (node0 at 10.77.0.1)", "node rank 1 (node1 at 10.77.0.2)"
URL = "ws://127.0.0.1:8000/v1/responses"
WAIT_S = 90


def lines_of(document, first_words):
    """Commands of a document that begin with these words, without what is said of them."""
    text = (DOCS / document).read_text(encoding="utf-8")
    return [line.partition("#")[0].strip() for line in re.findall(rf"^    (.*{re.escape(first_words)}.*)$", text, re.M)]


def words_of(line, artifact, master, **changes):
    """A documented command with an artifact, an address and other changes in place of what it leaves open."""
    programs = {"npucompile": ranks.command(), "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    words = [changes.get(word, word) for word in shlex.split(line)]
    words = [*programs[words[0]], *words[1:]]
    return [str({"DIR": artifact, "HOST0": master}.get(word, word)) for word in words]


class Process:
    """A command on a machine, whose standard error is read as it comes."""

    def __init__(self, machine, arguments, home, **environment):
        variables = {"NPUCOMPILE_HOME": str(home), "NPUCOMPILE_RANK_TOKEN": "", **environment}
        self.process = machine.popen(arguments, ranks.environment(**variables))
        self.machine, self.output = machine, ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.output += line

    def said(self, text):
        """Waits until it has said this, and returns what it has said."""
        ranks.eventually(lambda: text in self.output or self.process.poll() is not None, WAIT_S)
        if text not in self.output:
            self._reader.join()
        assert text in self.output, self.output
        return self.output

    def last_words(self):
        """The last line of what it said before it ended with an error."""
        status = self.process.wait(WAIT_S)
        self._reader.join()
        assert "Traceback" not in self.output, self.output
        assert status == 1, self.output
        return self.output.splitlines()[-1]

    def ask(self, prompts=PROMPTS, tokens=TOKENS):
        """Greedy tokens after each prompt, of a client on its machine."""

        async def ask():
            async with await Client.connect(URL) as client:
                streams = [client.create(prompt, max_output_tokens=tokens, ignore_eos=True) for prompt in prompts]
                return [(await stream.completion()).token_ids for stream in streams]

        with self.machine.inside():
            return asyncio.run(ask())


@pytest.fixture
def start(tmp_path):
    """Starts the documented line of a machine, with further options; what a token is may be changed."""
    lines = lines_of("fleets.md", "--nnodes 2")

    def started(machine, rank, artifact, *options, master=MASTER, secret=SECRET, **environment):
        token = tmp_path / f"token-{secret}"
        token.write_text(f"{secret}\n")
        line = words_of(lines[rank], artifact, master, token=token)
        return Process(machine, [*line, "--threads", 1, *options], tmp_path / machine.name, **environment)

    return started


def expected(executor):
    return [completion.token_ids for completion in complete(executor, PROMPTS, Sampling(), TOKENS, frozenset())]


def test_two_machines_answer_as_one_and_a_lost_one_is_named(sharded, start):
    reference = expected(CpuExecutor(Artifact.open(sharded(""))))
    with machines(2) as members:
        first, second = (start(machine, rank, sharded("tp=2")) for rank, machine in enumerate(members))
        first.said("talk to it")
        assert first.ask() == reference
        assert f"{NODE_0} of 2: rank 0; meets the others at {MASTER} port 29500 on ether0" in first.output
        assert f"{NODE_1} of 2: rank 1; meets the others at {MASTER} port 29500 on ether1" in second.output
        assert SECRET not in first.output + second.output
        second.process.kill()
        lost = f"{NODE_1} with rank 1 of mesh tp=2 was lost: it closed its connection; all ranks end [node_lost]"
        assert first.last_words() == f"Error: {lost}"


@pytest.mark.long
def test_groups_over_two_machines_that_are_called_by_name(sharded, start):
    """The first machine's own hosts file has its name at 127.0.1.1, which gloo and the other machine must not get to see."""
    reference = expected(CpuExecutor(Artifact.open(sharded(""))))
    with machines(2) as members:
        second = start(members[1], 1, sharded("dp=2"), master="node0")
        why = "node0 is 127.0.1.1 in the hosts file of node0, which other machines do not reach; legal is an address in numbers"
        assert (
            f"{why} (--master-addr), or --host-address beside the name [host_address]"
            in start(members[0], 0, sharded("dp=2"), master="node0").last_words()
        )
        second.said("waiting for node rank 0 at node0 port 29500: nothing listens there yet [node_late]")
        first = start(members[0], 0, sharded("dp=2"), "--host-address", MASTER, master="node0")
        first.said("talk to it")
        assert first.ask() == reference


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2"])
def test_emulated_devices_over_two_machines(npu_artifact, start, tmp_path, mesh):
    with emulated(Artifact.open(npu_artifact(mesh)), tmp_path / "cache") as executor:
        reference = expected(executor)
    with machines(2) as members:
        first, second = (start(machine, rank, npu_artifact(mesh), "--device", "emulated") for rank, machine in enumerate(members))
        first.said("talk to it")
        assert first.ask() == reference
        # The first machine ends all of them in order.
        first.process.terminate()
        assert [process.process.wait(WAIT_S) for process in (first, second)] == [0, 0]


@pytest.mark.long
def test_the_line_of_torchrun(sharded, tmp_path):
    (line,) = lines_of("serving-on-npus.md", "torchrun")
    reference = expected(CpuExecutor(Artifact.open(sharded(""))))
    with machines(2) as members:
        words = [words_of(line, sharded("dp=2,tp=2"), MASTER, I=str(rank), **{"16": "2"}) for rank in range(2)]
        started = [
            Process(machine, own, tmp_path / machine.name, NPUCOMPILE_RANK_TOKEN=SECRET)
            for machine, own in zip(members, words, strict=True)
        ]
        started[0].said("talk to it")
        assert started[0].ask() == reference
        assert f"{NODE_0} of 2: ranks 0, 1; meets the others at {MASTER}" in started[0].output
        assert f"{NODE_1} of 2: ranks 2, 3; meets the others at {MASTER}" in started[1].output
        assert SECRET not in started[0].output + started[1].output


# --- faults ---


@pytest.mark.long
def test_a_machine_that_is_cut_off_while_it_serves_is_named_on_both_sides(sharded, start):
    with machines(2) as members:
        first, second = (start(machine, rank, sharded("dp=2,tp=2")) for rank, machine in enumerate(members))
        first.said("talk to it")
        first.ask()
        members[1].cut()
        lost = f"{NODE_1} with rank 2, 3 of mesh dp=2,tp=2 was lost: its machine has not answered for"
        with pytest.raises(RequestError, match=re.escape(lost)):
            first.ask()
        for process, words in ((first, lost), (second, f"on {NODE_1} lost rank 0 at {MASTER}: its machine has not answered for")):
            last = process.last_words()
            assert words in last
            assert last.endswith("[node_lost]")


@pytest.mark.long
def test_a_machine_that_is_late_is_named_on_the_others(sharded, start):
    came = f"those that came: {NODE_0} [node_late]"
    with machines(2) as members:
        alone = start(members[0], 0, sharded("tp=2"), "--join-timeout", 5)
        assert re.search(rf"waiting for node rank 1 \(rank 1\) at {MASTER} port 29500, \d s more; {re.escape(came)}", alone.said(came))
        late = f"node rank 1 (rank 1) of 2 machines did not come to {MASTER} within 5 s (--join-timeout)"
        assert alone.last_words() == f"Error: {late}; {came}"
        other = start(members[1], 1, sharded("tp=2"), "--join-timeout", 4)
        where = f"node rank 0 at {MASTER} port 29500"
        other.said(f"waiting for {where}: nothing listens there yet [node_late]")
        assert other.last_words() == f"Error: node rank 1 did not find {where} within 4 s: nothing listens there yet [node_late]"


@pytest.mark.long
def test_a_machine_of_another_artifact_is_named_on_both_sides_with_both_digests(sharded, start, tmp_path):
    other = tiny.published(tiny.copied(sharded("tp=2"), tmp_path / "other"), lambda manifest, _: replace(manifest, source_digest="another"))
    digest = Artifact.open(sharded("tp=2")).digest
    with machines(2) as members:
        processes = [start(members[0], 0, sharded("tp=2")), start(members[1], 1, other.path)]
        both = f"artifact is {other.digest} on rank 1 on {NODE_1} and {digest} on rank 0 on {NODE_0}"
        for process in processes:
            last = process.last_words()
            assert both in last
            assert last.endswith("[artifact_mismatch]")


@pytest.mark.long
def test_an_address_that_the_others_do_not_reach_is_named(sharded, start):
    """A second interface, whose network the first machine has no route to."""
    with machines(2) as members:
        for words in ("link add apart type veth peer name elsewhere", "address add 10.99.0.2/24 dev apart", "link set apart up"):
            assert members[1].run(["ip", *words.split()]).returncode == 0
        first = start(members[0], 0, sharded("tp=2"))
        second = start(members[1], 1, sharded("tp=2"), "--host-address", "10.99.0.2", "--join-timeout", 8)
        answer = "no answer within 3 s to 10.99.0.2: the machine is off, or has no route back to this address"
        second.said(f"waiting for node rank 0 at {MASTER} port 29500: {answer} [node_unreachable]")
        assert second.last_words().endswith(f"within 8 s: {answer} [node_unreachable]")
        first.said("waiting for node rank 1 (rank 1)")
        wrong = start(members[1], 1, sharded("tp=2"), "--host-address", "10.98.0.1").last_words()
        assert "--host-address 10.98.0.1 is no address of this machine, node1; legal are 127.0.0.1 (lo)" in wrong
        assert wrong.endswith("10.99.0.2 (apart) [host_address]")


@pytest.mark.long
def test_two_machines_that_do_not_reach_each_other_are_named_on_all(sharded, start):
    """Each reaches the first one; the second has no way to the third."""
    with machines(4) as members:
        assert members[1].run(["ip", "route", "add", "unreachable", members[2].address]).returncode == 0
        own = [("--nnodes", 4, "--node-rank", rank) for rank in range(4)]
        processes = [start(machine, 0, sharded("dp=2,tp=2"), *options) for machine, options in zip(members, own, strict=True)]
        for process in processes:
            last = process.last_words()
            assert f"{NODE_1} does not reach node rank 2 (node2 at 10.77.0.3): from 10.77.0.2: " in last
            assert last.endswith("[node_unreachable]")


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--nnodes", 4), "nnodes_mismatch", ("was started as one of 4 machines", "as one of 2", "legal is one --nnodes on all machines")),
        ((), "node_rank_taken", ("are two machines; legal is each --node-rank from 0 to 1 once",)),
    ],
)
def test_a_machine_that_counts_otherwise_is_named_on_all(sharded, start, options, code, words):
    with machines(3) as members:
        first = start(members[0], 0, sharded("dp=2,tp=2"))
        first.said("waiting for node rank 1")
        others = [start(members[2], 1, sharded("dp=2,tp=2"), *options)]
        if not options:
            others.append(start(members[1], 1, sharded("dp=2,tp=2")))
        for process in (first, *others):
            last = process.last_words()
            assert last.endswith(f"[{code}]")
            # A machine that comes when all have been refused is told that it is too late.
            assert all(part in last for part in words) or "takes no ranks any more" in last
        assert all(part in first.output for part in ("node rank 1 (node2 at 10.77.0.3)", *words))


@pytest.mark.long
def test_a_token_that_is_missing_or_another_one_is_named_and_printed_nowhere(sharded, start):
    with machines(2) as members:
        first = start(members[0], 0, sharded("tp=2"), "--join-timeout", 40)
        empty = start(members[1], 1, sharded("tp=2"), secret="").last_words()
        assert empty.endswith("is empty; legal is what `openssl rand -hex 16` draws, the same on all machines [rank_token]")
        second = start(members[1], 1, sharded("tp=2"), secret="another")
        assert (
            second.last_words() == "Error: rank 0 has another token than this rank, or none; legal is the same on all machines [rank_token]"
        )
        first.said("turned away a process at 10.77.0.2: it has another token than rank 0, or none [rank_token]")
        right = start(members[1], 1, sharded("tp=2"))
        first.said("talk to it")
        assert not any(secret in process.output for process in (first, second, right) for secret in (SECRET, "another\n"))
