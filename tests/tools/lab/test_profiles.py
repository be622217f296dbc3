"""tools/lab/profiles.py: tables of msprof and of msopmodeling become forms."""

from __future__ import annotations

import zipfile

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.lowering.ascend.operators.tensor_type import TensorType
from npucompile.tools.lab.profiles import read

MSPROF = """Op Name,OP Type,Task Duration(us),Task Wait Time(us),Input Shapes,Input Data Types,Output Shapes,Output Data Types
a,QuantBatchMatmulV3,23.8,1.4,"""  # one field with commas, quoted as msprof quotes it
MSPROF += '''"""8,4096;32,256,16,32;1024""",INT8;INT8;FLOAT,"""8,1024""",DT_BF16
b,QuantBatchMatmulV3,25.8,1.0,"""8,4096;32,256,16,32;1024""",INT8;INT8;FLOAT,"""8,1024""",DT_BF16
c,RmsNorm,N/A,1.0,"""8,4096""",DT_BF16,"""8,4096""",DT_BF16
d,Compressor,3.0,1.0,"""8""",DT_STRANGE,"""8""",DT_BF16
'''
MSOP = """op_name,kernel_type,profiling_time,inputs_shape,inputs_dtype,outputs_shape,outputs_dtype
x,MatMulV3,10,"[[8, 16], [4, 16]]","['torch.bfloat16', 'torch.bfloat16']","[[8, 4]]",['torch.bfloat16']
x,MatMulV2,30,"[[8, 16], [4, 16]]","['torch.bfloat16', 'torch.bfloat16']","[[8, 4]]",['torch.bfloat16']
x,,0,"[[8]]",['torch.int32'],"[[8]]",['torch.int64']
Cast_x,,2,"[[8]]",['torch.int32'],"[[8]]",['torch.int64']
"""


def test_a_table_of_msprof_is_read_by_form(tmp_path):
    (tmp_path / "op_summary_0.csv").write_text("﻿" + MSPROF)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    profiles, unread = read([tmp_path], "A3")
    (product,) = profiles
    assert (product.chip, product.type, product.launches) == ("A3", "QuantBatchMatmulV3", 2)
    assert product.seconds == pytest.approx(24.8e-6)
    assert product.inputs == (TensorType("i8", (8, 4096)), TensorType("i8", (32, 256, 16, 32)), TensorType("f32", (1024,)))
    assert product.outputs == (TensorType("bf16", (8, 1024)),)
    assert unread.total() == 2
    assert any("N/A" in why for why in unread)


def test_tables_in_a_wheel_are_of_the_chip_that_their_names_say_and_versions_are_one_operator(tmp_path):
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
        wheel.writestr("ops/matmul_910B4_1.csv", MSOP)
        wheel.writestr("ops/readme.txt", MSOP)
    profiles, unread = read([tmp_path / "some.whl"], "A3")
    assert [(p.chip, p.type, p.seconds, p.launches) for p in profiles] == [
        ("910B4", "MatMul", pytest.approx(20e-6), 2), ("910B4", "Cast", pytest.approx(2e-6), 1)
    ]  # fmt: skip
    assert not unread


def test_what_has_no_table_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SpecError, match=r"no table in .*; legal are CSV files of msprof"):
        read([tmp_path], "A3")
