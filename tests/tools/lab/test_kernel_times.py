"""tools/lab/kernel_times.py: profiles beside the cost model, and times of kernels fitted to them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from npucompile.lowering.ascend.cost.parameters import parameters
from npucompile.lowering.ascend.operators.table import BY_TYPE
from npucompile.lowering.ascend.operators.tensor_type import TensorType
from npucompile.lowering.ascend.operators.work import AS_MOST, KernelTime
from npucompile.tools.cli import main
from npucompile.tools.lab.kernel_times import MANY, Judged, estimated, fit, judge, lines, speeds_of
from npucompile.tools.lab.profiles import Profile

A3 = parameters("ascend910_93")
TRUE = KernelTime(5e-6, 2.0)


def norm(rows, width=4096, seconds=1e-5, chip="A3"):
    x = TensorType("bf16", (rows, width))
    return Profile(chip, "RmsNorm", (x, TensorType("bf16", (width,))), (x, TensorType("f32", (rows, 1))), seconds, 3)


def as_true(rows):
    """A profile of a kernel whose time is `TRUE` over the model's rates."""
    form = estimated(norm(rows))
    return replace(norm(rows), seconds=TRUE.fixed_s + TRUE.slowdown * form.busy_s)


def table(tmp_path, profiles):
    rows = ["Op Name,OP Type,Task Duration(us),Input Shapes,Input Data Types,Output Shapes,Output Data Types"]
    for profile in profiles:
        sides = [
            (";".join(",".join(map(str, each.shape)) for each in side), ";".join(f"DT_{each.dtype.upper()}" for each in side))
            for side in (profile.inputs, [replace(each, dtype="bf16") for each in profile.outputs])
        ]
        cells = ",".join(f'"{shapes}",{dtypes}' for shapes, dtypes in sides)
        rows.append(f"x,{profile.type},{profile.seconds * 1e6},{cells}")
    file = tmp_path / "op_summary.csv"
    file.write_text("\n".join(rows) + "\n")
    return file


def test_the_model_of_a_profile_is_that_of_a_step():
    small, large = estimated(norm(8)), estimated(norm(4096))
    assert small.launch_s == A3.vector_launch_s
    moved = 2 * 4096 * 4096 * 2 + 4096 * (2 + 4)
    assert large.busy_s == pytest.approx(moved / (A3.cache_bytes_per_s * A3.vector_cache_fraction), rel=0.01)
    # Beyond the cache a launch reads and writes HBM.
    beyond = estimated(norm(8192)).busy_s / large.busy_s
    assert beyond == pytest.approx(
        2 * A3.cache_bytes_per_s * A3.vector_cache_fraction / (A3.hbm_bytes_per_s * A3.memory_fraction), rel=0.01
    )


def test_a_weight_is_read_from_memory():
    given = TensorType("bf16", (8, 4096)), TensorType("bf16", (4096, 4096))
    form = estimated(Profile("A3", "MatMul", given, (TensorType("bf16", (8, 4096)),), 3e-5, 1))
    assert form.busy_s == pytest.approx(4096 * 4096 * 2 / (A3.hbm_bytes_per_s * A3.memory_fraction), rel=0.01)


def test_a_chip_with_fewer_cores_is_slower():
    assert speeds_of("910B4").bf16_ops_per_s == pytest.approx(20 * 8192 * 1.65e9, rel=0.01)
    assert speeds_of("A3") == A3


def test_a_fit_finds_the_time_that_profiles_were_made_with():
    forms = [estimated(as_true(rows)) for rows in (1, 2, 4, 8, 16, 512, 1024, 2048, 4096)]
    found = fit(forms, A3.launch_gap_s)
    assert found.fixed_s == pytest.approx(TRUE.fixed_s)
    assert found.slowdown == pytest.approx(TRUE.slowdown, rel=0.06)
    assert all(form.ratio(found, A3.launch_gap_s) == pytest.approx(1.0, rel=0.06) for form in forms)


def test_forms_that_hardly_work_say_nothing_of_a_slowdown():
    assert fit([estimated(as_true(rows)) for rows in (1, 2, 3, 4)], A3.launch_gap_s) == pytest.approx(KernelTime(5e-6, 1.0))


def test_many_forms_are_judged_by_those_that_were_not_fitted(tmp_path):
    rows = [2**i + j for i in range(12) for j in (0, 1)]
    assert len(rows) > MANY
    (norms,), left = judge([table(tmp_path, map(as_true, rows))], "A3")
    assert (norms.type, norms.forms, norms.launches) == ("RmsNorm", len(set(rows)), len(rows))
    assert norms.fit is not None
    assert norms.fit[0] == pytest.approx(1.0, rel=0.06)
    assert norms.plain[0] > 1.3
    assert not left


def test_what_the_model_does_not_know_is_counted(tmp_path):
    unknown = [replace(norm(8), type="HcPreSinkhorn"), replace(norm(8), type="GroupedMatmul"), norm(8)]
    judged, left = judge([table(tmp_path, unknown)], "A3")
    assert [each.type for each in judged] == ["RmsNorm"]
    assert judged[0].time is None
    assert any("HcPreSinkhorn: no operator of ours" in why for why in left)
    assert "not judged: 2 rows" in lines(judged, left)


def test_the_command_prints_them(tmp_path):
    file = table(tmp_path, map(as_true, (1, 8, 1024, 4096)))
    shown = CliRunner().invoke(main, ["calibrate", "--profile", str(file)])
    assert shown.exit_code == 0, shown.output
    assert "RmsNorm                      4        4" in shown.output
    told = json.loads(CliRunner().invoke(main, ["calibrate", "--profile", str(file), "--json"]).output)
    assert told["operators"]["RmsNorm"]["time"]["fixed_s"] == pytest.approx(5e-6)
    assert set(told["operators"]["RmsNorm"]) == set(Judged.__dataclass_fields__)
    assert told["not_judged"] == {}


def test_kernels_with_a_time_of_their_own_are_slower_than_most():
    times = {kind: operator.time for kind, operator in BY_TYPE.items() if operator.time != AS_MOST}
    assert {"RmsNorm", "MoeGatingTopK", "QuantBatchMatmulV3"} <= times.keys()
    assert all(time.slowdown >= 1 and time.fixed_s is not None and 1e-6 < time.fixed_s < 2e-5 for time in times.values())
