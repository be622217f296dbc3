"""tools/prove/bringup/recording.py: what is recorded is what the interpreter of the whole graph computes; one layer of each kind runs."""

from __future__ import annotations

import pytest
import torch

from npucompile.graphs.types import COORDS, Mesh
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.tools.prove.bringup import recording
from npucompile.tools.prove.bringup.recording import StepRecorder, distinct_bodies, shipped_buckets
from npucompile.tools.prove.bringup.steps import StepPlanner
from npucompile.tools.ranks.random_weights import random_params


@pytest.fixture
def setup(npu_artifact):
    graph = shipped_buckets(npu_artifact)[0]
    planner = StepPlanner(npu_artifact.manifest.limits, 260)
    state = planner.initial_state(graph.signature.state)
    return graph, planner, state, lambda rank: random_params(npu_artifact, rank)


def test_without_skipping_a_recording_is_the_interpreters_run(setup, monkeypatch):
    graph, planner, state, load = setup
    monkeypatch.setattr(recording, "_skipped", lambda graph: (set(), []))
    recorder = StepRecorder(graph, Mesh(), load, state)
    params = dict(load(0)([leaf.name for leaf in graph.signature.params]))
    own = [pool.clone() for pool in state]
    interpreter = Interpreter(graph.whole.ge_file, Mesh())
    for step in planner.of_one_bucket(graph.bucket, 3):
        inputs = {**step.tensors[0], COORDS: Mesh().coords(0)}
        operands = [*(params[leaf.name] for leaf in graph.signature.params), *own, *(inputs[leaf.path] for leaf in graph.signature.inputs)]
        (expected,) = interpreter([operands])
        values = recorder.run(step)
        for tensor, right in zip(graph.whole.results, expected, strict=False):
            assert torch.equal(values[tensor], right)


def test_repeated_layers_do_not_run_and_need_no_parameters(setup):
    graph, planner, state, load = setup
    asked = []

    def counted(rank):
        def read(names):
            asked.extend(names)
            return load(rank)(names)

        return read

    values = StepRecorder(graph, Mesh(), counted, state).run(planner.of_one_bucket(graph.bucket, 1)[0])
    kinds = distinct_bodies(graph)
    assert [prefix for prefix in kinds if prefix.startswith("layer0")] == [
        "layer00_prologue",
        "layer00_linear_attention",
        "layer03_full_attention",
    ]
    # A layer ends with the first norm of the next one.
    assert {name.split(".")[2] for name in asked if ".mixer." in name and ".layers." in name} == {"0", "3"}
    assert not any(name.startswith(("layer01_linear_attention/Mat", "layer02_linear_attention/Mat")) for name in values)
    assert all(tensor in values for tensor in graph.whole.results[: graph.whole.ge_file.outputs])
