"""tools/advisor/launch_lines/published.py: the launch line of every published row is that row."""

from __future__ import annotations

import json

import pytest
from support.launch_lines import parsed

from npucompile.models import registry
from npucompile.tools.advisor.launch_lines import proposal
from npucompile.tools.advisor.launch_lines.imported import import_text
from npucompile.tools.advisor.launch_lines.published import matching, phase_of
from npucompile.tools.builder.deployments import Deployment, Phase, deployments

INSTANCES = [(row, phase) for row in deployments().values() if row.model in registry.presets() for phase in row.phases.values()]


def _checkpoint(row: Deployment) -> str:
    return f"/models/{row.model}" if row.quantization == "bf16" else f"/models/{row.model}-{row.quantization}"


def line_of(row: Deployment, phase: Phase) -> str:
    """The launch line that a row was read from, as far as the table has it."""
    dp, tp = phase.mesh.axis("dp"), phase.mesh.axis("tp")
    words: list[object] = []
    if row.engine == "sglang":
        words += ["sglang serve", _checkpoint(row), "--tp-size", dp * tp, "--dp-size", dp, "--enable-dp-attention"]
        words += ["--max-running-requests", phase.max_running_requests, "--chunked-prefill-size", phase.chunk_len or -1]
        words += ["--cuda-graph-bs", *phase.buckets] if phase.buckets else ["--disable-cuda-graph"]
        words += ["--disaggregation-mode", phase.name] if phase.name != "mixed" else []
        words += ["--max-total-tokens", phase.max_total_tokens] if phase.max_total_tokens else []
        words += ["--context-length", phase.context_len] if phase.context_len else []
        if phase.num_speculative_tokens:
            words += ["--speculative-algorithm NEXTN --speculative-num-steps", phase.num_speculative_tokens]
        words += [] if row.quantization == "bf16" else ["--quantization modelslim"]
    else:
        words += ["vllm serve", _checkpoint(row), "--tensor-parallel-size", tp, "--data-parallel-size", dp]
        words += ["--max-num-seqs", phase.max_running_requests // dp, "--max-model-len", phase.context_len]
        words += ["--max-num-batched-tokens", phase.chunk_len] if phase.chunk_len else []
        sizes = [rows * (phase.num_speculative_tokens + 1) for rows in phase.buckets]
        words += ["--compilation-config", f"'{json.dumps({'cudagraph_capture_sizes': sizes})}'"] if sizes else []
        role = {"prefill": "kv_producer", "decode": "kv_consumer"}.get(phase.name)
        words += ["--kv-transfer-config", f"'{json.dumps({'kv_role': role})}'"] if role else []
        if phase.num_speculative_tokens:
            words += ["--speculative-config", f"'{json.dumps({'method': 'mtp', 'num_speculative_tokens': phase.num_speculative_tokens})}'"]
    return " ".join(map(str, words))


FIRST = {(row.model, phase.name): row.id for row, phase in reversed(INSTANCES)}
"""Of each model and phase a row whose line `make test` reads."""


@pytest.mark.parametrize(
    ("row", "phase"),
    [pytest.param(*each, marks=() if FIRST[each[0].model, each[1].name] == each[0].id else pytest.mark.long) for each in INSTANCES],
    ids=lambda part: getattr(part, "id", getattr(part, "name", "")),
)
def test_the_line_of_a_row_is_that_row(row, phase):
    (role,) = import_text(line_of(row, phase), target_name=row.target).roles
    proposal = role.proposal
    assert row.id in (proposal.deployment.id, *proposal.also)
    assert {deployments()[name].quantization for name in (proposal.deployment.id, *proposal.also)} == {row.quantization}
    same = deployments()[proposal.deployment.id].phases[phase.name]
    assert (same.mesh, same.buckets, same.max_running_requests) == (phase.mesh, phase.buckets, phase.max_running_requests)
    assert proposal.problem == ""
    # Of MiniMax-M2's heads no configuration is known: the build names one, or drafts nothing.
    without = ["--speculative-config"] if phase.num_speculative_tokens and not proposal.plan.limits.drafts else []
    assert [finding.name for finding in role.findings if finding.status == "refused"] == without
    groups = phase.mesh.axis("dp")
    replicated = phase.name == "mixed" and phase.nodes == 1 and groups > 1 and not proposal.plan.model.config.num_experts
    assert len(role.replicas) == (groups + 2 if replicated else 0)


@pytest.fixture
def unplanned(monkeypatch):
    """Which row a line is does not depend on plans, which take seconds."""
    monkeypatch.setattr(proposal, "_planned", lambda proposed: proposed)


PAIRS = [row for row in deployments().values() if "prefill" in row.phases]


@pytest.mark.usefixtures("unplanned")
@pytest.mark.parametrize("row", PAIRS, ids=lambda row: row.id)
def test_the_lines_of_a_published_pair_come_back_as_one_build_and_a_line_a_machine(row):
    """Each phase's line as often as it has machines; a machine's number and address are what tells them apart."""
    lines, rank = [], "--node-rank" if row.engine == "sglang" else "--data-parallel-start-rank"
    for name, phase in row.phases.items():
        for instance in range(phase.instances):
            for node in range(phase.nodes):
                own = f"--nnodes {phase.nodes} {rank} {node} --port 9000" if phase.nodes > 1 else "--port 9000"
                lines.append(f"{line_of(row, phase)} {own} --host 10.0.{name == 'decode':d}.{instance * phase.nodes + node}")
    imported = import_text("\n".join(lines), target_name=row.target)
    assert [role.name for role in imported.roles] == ["prefill", "decode"]
    ids = {name for role in imported.roles for name in (role.proposal.deployment.id, *role.proposal.also)}
    assert row.id in ids
    build, *served = imported.commands
    assert build.startswith(f"npucompile build {row.model} --deployment ")
    assert "--phase" not in build
    params = [parsed(line) for line in served]
    assert len(params) == row.nodes
    first = row.phases["prefill"]
    urls = ",".join(f"http://10.0.0.{instance * first.nodes}:9000" for instance in range(first.instances))
    assert {(each["role"], each["prefill"]) for each in params} == {("prefill", None), ("decode", urls)}
    for role in ("prefill", "decode"):
        same, nodes = [each for each in params if each["role"] == role], row.phases[role].nodes
        assert [(each["nnodes"], each["node_rank"]) for each in same] == [(nodes, node) for node in range(nodes)] * row.phases[
            role
        ].instances
    assert "refused" not in {finding.status for finding in imported.findings}


def test_a_row_is_no_longer_meant_when_any_of_its_sizes_differs():
    row, phase = INSTANCES[4]
    text = line_of(row, phase)
    (role,) = import_text(text).roles
    facts = role.proposal and _facts(text)
    assert matching(facts, row.model, None)[0][0].id == row.id
    for change in (
        {"sglang_requests": 7},
        {"sglang_tp": 64},
        {"speculative_steps": 1},
        {"pool": 5},
        {"context": 77},
        {"sglang_buckets": [1]},
    ):
        other = type(facts)(facts.engine, {**facts.values, **change})
        assert matching(other, row.model, None) == []
    assert matching(facts, row.model, "ascend-a2") == []
    assert phase_of(facts).max_running_requests == phase.max_running_requests


def _facts(text: str):
    from npucompile.tools.advisor.launch_lines import imported

    (group,) = imported._instances(imported.launches(imported.read(text)))
    return group[0].facts


R1 = {name: deployments()[f"dsr1-a3x{name}-3.5k-1.5k-50ms"] for name in ("32-pd", "16-pd")}
"""Two rows whose prefill servers have the same flags, with other weights and other decode servers."""


def _rows(text: str) -> list[str | None]:
    return [role.proposal.deployment and role.proposal.deployment.id for role in import_text(text).roles]


@pytest.mark.usefixtures("unplanned")
@pytest.mark.parametrize("name", R1)
def test_a_prefill_line_is_the_row_of_its_weights_or_of_its_script(name):
    row = R1[name]
    prefill, decode = (line_of(row, row.phases[phase]) for phase in ("prefill", "decode"))
    nameless = prefill.replace(_checkpoint(row), "$MODEL_PATH")
    assert _rows(prefill) == [row.id]
    assert _rows(f"{nameless}\n{decode}") == [row.id, row.id]
    assert _rows(f"{decode}\n{nameless}") == [row.id, row.id]


@pytest.mark.usefixtures("unplanned")
def test_a_prefill_line_that_names_no_weights_is_no_row():
    row = R1["32-pd"]
    text = line_of(row, row.phases["prefill"]).replace(_checkpoint(row), "/models/deepseek-r1")
    (role,) = import_text(text).roles
    assert role.proposal.deployment is None
    said = next(each for each in role.proposal.assumed if each.startswith("no deployment"))
    assert all(f"{other.id} ({other.quantization}, {other.npus} NPUs)" in said for other in R1.values())


@pytest.mark.usefixtures("unplanned")
def test_a_loop_says_how_many_instances_a_row_has():
    row = R1["32-pd"]
    text = line_of(row, row.phases["prefill"]).replace(_checkpoint(row), "/models/deepseek-r1")
    looped = f"for i in {{1..{row.phases['prefill'].instances}}}; do\n{text} --port 800$i\ndone"
    (role,) = import_text(looped).roles
    assert role.proposal.deployment.id == row.id
    assert "2 instances: serve is started once for each, with its own --port 8001, 8002" in role.proposal.assumed
