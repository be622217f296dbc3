"""lowering/ascend/hccl.py: HCCL groups have the options that torch_npu knows, the names of every start, and buffers of their own size."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend import device, hccl
from npucompile.lowering.ascend.toolchain import harness
from npucompile.lowering.device_error import DeviceError
from npucompile.runtime.distributed.process_groups import ProcessGroups

MESH, MIB = Mesh.parse("dp=2,tp=2"), 2**20


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return harness.load(tmp_path_factory.mktemp("stubs")).torch_npu._C._distributed_c10d.ProcessGroupHCCL


def recorder(real, made):
    """ProcessGroupHCCL with its real options, and a communicator that is a name."""

    class Recorder(ProcessGroupGloo):
        Options = real.Options

        def __init__(self, store, rank, size, options):
            super().__init__(HashStore(), 0, 1)
            self.chosen = options
            made.append((rank, size, self))  # torch keeps no Python object; pybind finds the class of ProcessGroupHCCL again

        def get_hccl_comm_name(self, rank, init_comm):
            assert init_comm
            return hccl.NAME_PREFIX + self.chosen.group_id

    return SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=SimpleNamespace(ProcessGroupHCCL=Recorder)))


def start(real, rank, buffers):
    made: list = []
    torch_npu = recorder(real, made)
    symbols = ("tp", "dp", "world", "dispatch")
    make_group = hccl.group_maker(torch_npu, buffers)
    with ProcessGroups(MESH, rank, HashStore(), "127.0.0.1", 90, symbols=symbols, make_group=make_group) as groups:
        return device.communicators(groups.groups, rank), made


def test_what_hccl_refuses_is_said_with_what_to_look_at(real):
    class Refuses:
        Options = real.Options

        def __init__(self, *_):
            raise RuntimeError("EI0006: Getting socket times out")

    torch_npu = SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=SimpleNamespace(ProcessGroupHCCL=Refuses)))
    with pytest.raises(DeviceError, match=r"making HCCL's group tp failed: EI0006.*\(EI0006: ranks do not reach each other"):
        hccl.group_maker(torch_npu, {})("tp", (0, 1), 0, HashStore(), "127.0.0.1", 90)


def test_every_symbol_has_a_communicator_with_the_same_name_at_every_start(real):
    names, _ = start(real, 3, {})
    assert names == {
        "dispatch": "group_name_npucompile_dispatch_0",
        "dp": "group_name_npucompile_dp_1",
        "tp": "group_name_npucompile_tp_2",
        "world": "group_name_npucompile_world_0",
    }
    assert start(real, 3, {})[0] == names
    # The ranks of a group agree on its name, and no two groups of the mesh share one.
    members: dict = {}
    for rank in range(MESH.size):
        for symbol, name in start(real, rank, {})[0].items():
            members.setdefault(name, set()).add((symbol, MESH.group(symbol, rank)))
    assert all(len(groups) == 1 for groups in members.values())
    assert len(members) == 2 + 2 + 1 + 1


def test_buffers_are_of_the_planned_size_in_mib(real):
    _, made = start(real, 1, {"tp": 200 * MIB, "dispatch": 900 * MIB + 1})
    by_name = {backend.chosen.hccl_config["group_name"]: (rank, size, backend.chosen) for rank, size, backend in made}
    assert {name: options.hccl_config.get("hccl_buffer_size") for name, (_, _, options) in by_name.items()} == {
        "tp_0": 200, "dispatch_0": 901, "dp_1": None, "world_0": None,
    }  # fmt: skip
    rank, size, options = by_name["dispatch_0"]
    assert (rank, size, options.global_ranks_in_group, options._timeout.total_seconds()) == (1, 4, [0, 1, 2, 3], 90)


def test_torch_npu_takes_the_arguments_as_far_as_its_first_call_of_cann(real):
    torch_npu = SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=SimpleNamespace(ProcessGroupHCCL=real)))
    with pytest.raises(DeviceError, match="Failed to find function aclrtSetOpWaitTimeout"):
        hccl.group_maker(torch_npu, {"tp": MIB})("tp", (0, 1), 0, HashStore(), "127.0.0.1", 5.0)
    assert "arg0: typing.SupportsInt" in real.get_hccl_comm_name.__doc__
    assert (
        (Path(find_spec("torch_npu").submodule_search_locations[0]) / "lib" / "libtorch_npu.so")
        .read_bytes()
        .count(hccl.NAME_PREFIX.encode())
    )
