"""lowering/ascend/legality/torch_operators.py: rows speak of arguments that operators have, and of operands that the table has."""

from __future__ import annotations

from typing import Any

import pytest
from support import ge_bodies as gb

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.artifact.graph_io import find_target
from npucompile.lowering.ascend import packages
from npucompile.lowering.ascend.legality.table import FORM, table
from npucompile.lowering.ascend.legality.torch_operators import arguments, read, torch_operators
from npucompile.lowering.ascend.operators.table import GROUP_KERNELS, KERNELS

ROWS = list({row.operators: row for row in torch_operators().values()}.values())


@pytest.fixture(scope="module", autouse=True)
def operators(tmp_path_factory: pytest.TempPathFactory) -> None:
    gb.loaded(tmp_path_factory.mktemp("stubs"))
    packages.declare()


def test_schemas_are_those_of_torch_npu_and_torch() -> None:
    for name, row in torch_operators().items():
        target: Any = find_target(name)
        if name.startswith("npu."):
            assert str(target._schema) == f"{target._schema.name}{row.schema}", name
        assert [argument.name for argument in arguments(name, row.schema)] == [argument.name for argument in target._schema.arguments]


def test_rows_map_arguments_to_operands_of_the_table() -> None:
    for row in filter(lambda row: row.runs, ROWS):
        form = next(fact for fact in reversed(table().by_operator[row.runs]) if fact.what == FORM)
        assert set(row.inputs.values()) <= form.inputs.keys(), row
        assert set(row.attributes.values()) <= form.attributes.keys(), row
        assert set(row.outputs) <= form.outputs.keys(), row
        required = {name for name, kind in form.inputs.items() if kind == "required"}
        assert required <= set(row.inputs.values()), (row, "an operand can never be given")
        for name in row.operators:
            named = {argument.name for argument in arguments(name, row.schema)}
            assert row.inputs.keys() | row.attributes.keys() | row.free | row.packed <= named, (name, named)


def test_every_operator_that_is_emulated_has_a_row() -> None:
    """`air` operators are of GE alone; acl_graph/host_lists.py replaces them."""
    assert not [
        name for name in {*KERNELS, *GROUP_KERNELS} - torch_operators().keys() if not name.startswith(("air.", "_c10d_functional.b"))
    ]


ROW = {"operators": ["aten.add.Tensor"], "runs": "aclnnAdd", "outputs": ["out"], "source": "somewhere"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{**ROW, "operands": {}}], r"has the fields .*'operands'.*; legal are .*'outputs'"),
        ([{key: ROW[key] for key in ("operators", "runs", "outputs")}], "has the fields"),
        ([{**ROW, "runs": "aclnnAddV9"}], r"run aclnnAddV9, of which the legality table has no facts"),
        ([ROW, ROW], r"torch operators \['aten.add.Tensor'\] have two rows"),
    ],
)
def test_rows_that_are_refused(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        read(rows)


def test_arguments_have_defaults_and_need_a_declaration() -> None:
    row = torch_operators()["npu.npu_fused_infer_attention_score.default"]
    defaults = {argument.name: argument.default for argument in arguments("npu.npu_fused_infer_attention_score.default", row.schema)}
    assert (defaults["query"], defaults["input_layout"], defaults["num_heads"]) == (None, "BSH", 1)
    with pytest.raises(LoweringError, match=r"no operator 'npu\.nothing\.default' is registered"):
        arguments("npu.nothing.default", "")
