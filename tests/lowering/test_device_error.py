"""lowering/device_error.py: the runtime's code is found in the texts that devices gave, and RuntimeError gets a name."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import click
import pytest
import torch
from support.emulated import DeviceGraph, on_device, opened

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.emulator.device import EmulatedDevice
from npucompile.lowering.ascend.emulator.fault import RAISES, Fault
from npucompile.lowering.device_error import OUT_OF_MEMORY, DeviceError, code_of, known, known_errors, named, with_way_out
from npucompile.tools.cli import COMMANDS, main
from npucompile.tools.prove.bringup.results import Wanted

CODES = [(code, row) for row in known_errors() for code in row.codes]
PAGE = (Path(__file__).parents[2] / "docs" / "on-hardware.md").read_text()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("synchronize:build/CMakeFiles/torch_npu NPU function error: aclrtSynchronizeStream, error code is 507015", "507015"),
        ("EZ9999: Inner Error!\n rtStreamSynchronize execute failed, reason=[aicore exception], error code:507035", "507035"),
        ("call aclnnMm failed, detail:EZ1001: Tensor self not implemented", "EZ1001"),
        ("[ERROR] ret = 107030", "107030"),
        ("NPU out of memory. Tried to allocate 2.00 GiB", OUT_OF_MEMORY),
        ("Expected 4 tensors of 2048 elements at 0x7f2071234500", ""),
    ],
)
def test_the_code_of_a_text(text, code):
    assert code_of(text) == code


def test_what_the_runtime_raises_is_a_device_error_that_says_what_was_called():
    with (
        pytest.raises(DeviceError, match=r"^a step on npu:0 failed: error code is 507015 \(507015: a kernel ") as caught,
        named("a step on npu:0"),
    ):
        raise RuntimeError("error code is 507015")
    assert (caught.value.code, isinstance(caught.value, LoweringError)) == ("507015", True)
    with pytest.raises(DeviceError, match="allocating on npu:0 failed: NPU out of memory"), named("allocating on npu:0"):
        raise torch.OutOfMemoryError("NPU out of memory")
    with pytest.raises(DeviceError, match=r"^a copy failed: no text$"), named("a copy"):
        raise RuntimeError("no text")


@pytest.mark.parametrize(("code", "row"), CODES, ids=[code for code, _ in CODES])
def test_a_step_that_fails_with_a_code_says_what_it_means_and_what_to_type(code, row, tmp_path):
    graph = DeviceGraph()
    x = graph.operand(0, "f32[2,4]")
    made = graph.file(graph.op("Add", {"x1": x, "x2": x}, "sum", ["f32[2,4]"]))
    device = EmulatedDevice(0, Fault(1, RAISES, row.like.format(code=code)))
    try:
        operands = [on_device(device, torch.ones(2, 4))]
        executable = opened(device, made, tmp_path)
        executable.compile(operands)
        with pytest.raises(DeviceError) as caught:
            executable(operands)
    finally:
        device.close()
    said = f"({code}: {row.meaning}. Next: {row.next})"
    if code == row.codes[0] or "{code}" in row.like:
        assert str(caught.value).endswith(said)
    assert str(caught.value).count("Next: ") == 1
    assert with_way_out(str(caught.value)) == str(caught.value)
    assert row.source
    assert with_way_out(f"it says {code}") == f"it says {code} {said}"


def test_the_code_that_says_more_is_explained():
    inner, compiler = (
        "EZ9999: Inner Error! error code is 507015",
        "E40021: Failed to compile Op [x]. build op model failed, result = 500002",
    )
    assert [known(text)[0] for text in (inner, compiler)] == ["507015", "E40021"]
    assert known("Expected 4 tensors") is None
    assert with_way_out("Expected 4 tensors") == "Expected 4 tensors"


def test_what_is_to_be_typed_exists():
    for row in known_errors():
        program, *words = shlex.split(row.next)
        if program != "npucompile":
            assert program in ("npu-smi", "hccn_tool")
            continue
        assert words[0] in COMMANDS
        command = main.get_command(click.Context(main), words[0])
        options = {name: option for option in command.params for name in option.opts}
        for name, value in itertools.pairwise(words):
            if name.startswith("--") and isinstance(options[name].type, click.Choice):
                assert value in options[name].type.choices
            if name == "--only":
                Wanted.of([value])
        assert set(filter(lambda word: word.startswith("--"), words)) <= set(options)


def test_the_page_of_the_day_on_hardware_has_every_code():
    section = PAGE.split("## Error, meaning, next command")[1].split("\n## ")[0]
    assert re.findall(r"^- .*$", section, re.MULTILINE) == [
        f"- {', '.join(row.codes)}: {row.meaning}. `{row.next.removeprefix('npucompile ')}`" for row in known_errors()
    ]
