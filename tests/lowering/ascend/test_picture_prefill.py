"""Chunks with rows of pictures as graphs for NPUs give transformers' logits, and so do decode steps behind them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import encode_graphs, towers

from npucompile.graphs import tree
from npucompile.graphs.ir.trace import trace
from npucompile.graphs.passes.optimise import optimise
from npucompile.graphs.spmd.partition import partition
from npucompile.graphs.types import Bucket, Mesh, Program, Rules
from npucompile.lowering.ascend.acl_graph.file import decode as acl_decode
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.lowering.ascend.ge_file import decode

TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    yield tmp_path_factory.mktemp("pictures")
    torch.set_num_threads(threads)


class OnNpu(towers.Server):
    """The same programs as graphs for NPUs, which write the pools in place."""

    chosen, home = "ge", Path()

    def forward(self, program: Program, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if program.bucket not in self.runs:
                graph = optimise(partition(trace(program), Mesh(), Rules()))
                _, made = encode_graphs.compiled(graph, self.chosen, self.home)
                assert isinstance(made.data, bytes)
                file = decode(made.data) if self.chosen == "ge" else acl_decode(made.data)
                self.runs[program.bucket] = Interpreter(file, Mesh()), graph.signature
            run, signature = self.runs[program.bucket]
            kept = [tensor for part in (self.weights, self.state) for _, tensor in tree.flatten(part)]
            results = run([[*kept, *(inputs[leaf.path] for leaf in signature.inputs)]])[0]
        return {leaf.path: result for leaf, result in zip(signature.outputs, results, strict=True)}


@pytest.mark.parametrize("chosen", ["ge", pytest.param("aclgraph", marks=pytest.mark.long)])
def test_chunks_that_begin_and_end_in_pictures_give_the_logits_of_transformers(chosen: str, home: Path) -> None:
    directory = home / "width 64"
    server = OnNpu("width 64", directory if directory.exists() else towers.saved("width 64", directory))
    server.chosen, server.home, server.runs = chosen, home, {}
    requests = [towers.prompt("width 64", [3, (4, 6), 2, (2, 4), 4], 5), towers.prompt("width 64", [9], 6)]
    requests[1].place = 1
    for request in requests:
        server.encode(request)
    bucket = Bucket("prefill", 2, 8)
    for begin in (0, 8, 16):
        live = [request for request in requests if begin < request.count]
        wanted = [request.logits("width 64")[min(begin + 8, request.count) - 1] for request in live]
        out = server.prefill(bucket, live, begin, begin + 8)
        torch.testing.assert_close(out["logits"][:, 0], torch.stack(wanted), **TOLERANCE)
        for request, token in zip(live, out["tokens"][:, 0].tolist(), strict=True):
            request.tokens += [token] if request.count <= begin + 8 else []
    wanted = [request.logits("width 64")[-1] for request in requests]
    out = server.decode(Bucket("decode", 2, 1), requests)
    torch.testing.assert_close(out["logits"][:, 0], torch.stack(wanted), **TOLERANCE)
