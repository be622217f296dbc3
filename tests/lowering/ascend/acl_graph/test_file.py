"""lowering/ascend/acl_graph/file.py: a file is read as it was written, and what is none is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support import acl_graphs as ag
from support import ge_bodies as gb

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.artifact.graph_io import NamedOperator
from npucompile.lowering.ascend.acl_graph.file import AclFile, decode, encode, graph_of
from npucompile.lowering.ascend.acl_graph.make import acl_file
from npucompile.lowering.ascend.ge_file import Folded


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> AclFile:
    gb.loaded(tmp_path_factory.mktemp("stubs"))
    return acl_file(*gb.two_kinds(2), captured=True)


def test_a_file_is_read_as_it_was_written(made: AclFile) -> None:
    assert decode(encode(made)) == made
    folded = replace(
        made, inputs=made.inputs - 1, written=(1,), folded=Folded(b"graph", (0, 1), 1), beside=((made.operands, made.operands + 1),)
    )
    assert decode(encode(folded)) == folded
    assert folded.operands == made.operands


def test_operators_need_not_be_registered_to_read_a_graph(made: AclFile) -> None:
    targets = [node.target for node in graph_of(made).graph.nodes if node.op == "call_function"]
    assert all(isinstance(target, NamedOperator) for target in targets)
    assert "npu.npu_fused_infer_attention_score.default" in ag.names(made)
    with pytest.raises(LoweringError, match=r"^npu.npu_linear.default has no kernel in this process"):
        NamedOperator("npu.npu_linear.default")(1)


def test_what_is_no_file_or_contradicts_itself_is_refused(made: AclFile, tmp_path: Path) -> None:
    for data in (b"nothing", b"\x80"):
        with pytest.raises(LoweringError, match="this is not a file of format"):
            decode(data)
    first = made.operands
    for wrong, message in (
        ({"written": (made.inputs,)}, f"writes operands \\[{made.inputs}\\]; legal are 0 to {made.inputs - 1}"),
        ({"cuts": (first - 1,)}, "legal are increasing numbers of these"),
        ({"cuts": (first + 2, first + 1)}, "legal are increasing numbers of these"),
        ({"beside": ((first + 1, first + 3), (first + 2, first + 4))}, "are beside the others; legal are increasing numbers of these"),
        ({"folded": Folded(b"", (made.inputs,), 0)}, f"folds operands \\[{made.inputs}\\]"),
    ):
        with pytest.raises(LoweringError, match=message):
            encode(replace(made, **wrong))
