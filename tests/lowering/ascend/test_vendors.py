"""lowering/ascend/vendors.py: tables of vendors are found, and types of CANN come from those alone that the build asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.vendors import check_kernels, check_vendors, tables
from npucompile.lowering.platform import Platform
from tests.support.vendors import put_vendor

A3 = Platform("ascend910_93", "9.0")
OF_THE_WHEEL = ["CausalConv1d", "DequantSwigluQuant", "LightningIndexer", "MoeGatingTopK", "RecurrentGatedDeltaRule", "HcPre"]
"""Some of vllm_ascend-0.23.0; four are CANN's own."""


def test_tables_are_found_by_chip_at_any_depth(tmp_path: Path) -> None:
    inside = put_vendor(tmp_path / "package" / "vendors" / "first", "ascend910b", ["A"])
    both = [put_vendor(tmp_path / "package" / "vendors" / "second", chip, ["B"]) for chip in ("ascend910b", "ascend910_93")]
    assert tables(tmp_path / "package") == {"ascend910b": (inside, both[0]), "ascend910_93": (both[1],)}
    assert tables(inside.parents[5]) == {"ascend910b": (inside,)}
    assert tables(tmp_path / "nowhere") == {}
    with pytest.raises(LoweringError, match=r"first at .* has kernels of no chip, and this machine has ascend910b"):
        check_kernels("first", tmp_path / "nowhere", "ascend910b")


def test_types_of_cann_come_from_a_vendor_only_where_the_build_asked_for_its_package(tmp_path: Path) -> None:
    own = put_vendor(tmp_path / "own", "ascend910_93", ["MyOperator"])
    file = put_vendor(tmp_path / "custom_transformer", "ascend910_93", OF_THE_WHEEL)
    variable = f"{own.parents[5]}::{file.parents[5]}"
    with pytest.raises(LoweringError) as refused:
        check_vendors(variable, A3)
    assert str(refused.value).startswith(
        f"{file} defines DequantSwigluQuant, LightningIndexer, MoeGatingTopK, RecurrentGatedDeltaRule, which the graphs take from CANN"
    )
    check_vendors(variable, Platform("ascend910_93", "9.0", ("vllm-ascend",)))
    # Another vendor than that of the package.
    another = put_vendor(tmp_path / "another", "ascend910_93", ["MoeGatingTopK"])
    with pytest.raises(LoweringError, match=f"{another} defines MoeGatingTopK"):
        check_vendors(f"{variable}:{another.parents[5]}", Platform("ascend910_93", "9.0", ("vllm-ascend",)))
    # CANN looks for the chip's table alone.
    check_vendors(variable, Platform("ascend910b", "9.0"))
    check_vendors("", A3)


def test_a_table_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = put_vendor(tmp_path, "ascend910_93", [])
    file.write_text("{")
    with pytest.raises(LoweringError, match=f"{file}, on ASCEND_CUSTOM_OPP_PATH, cannot be read"):
        check_vendors(str(tmp_path), A3)
