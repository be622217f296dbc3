"""lowering/ascend/operators/table.py: every operator has a kernel, with the shapes and dtypes of torch_npu's Meta kernels."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend import packages
from npucompile.lowering.ascend.operators.attention import causal_mask
from npucompile.lowering.ascend.operators.exchange import Arguments
from npucompile.lowering.ascend.operators.table import GROUP_KERNELS, KERNELS, group_of

bf16, i8, i32, i64, f32 = torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.float32


def t(*shape: int, d: torch.dtype = bf16) -> torch.Tensor:
    return torch.ones(*shape, dtype=d)


def attention(layout: str, **more: Any) -> Arguments:
    query = {"TND": t(6, 4, 64), "BSND": t(2, 3, 4, 64), "BSH": t(2, 3, 256)}[layout]
    ends = torch.tensor([3, 6]) if layout == "TND" else torch.tensor([3, 3])
    options = {
        "atten_mask": causal_mask(),
        "actual_seq_lengths": ends,
        "actual_seq_lengths_kv": torch.tensor([5, 4]),
        "block_table": torch.zeros(2, 2, dtype=i32),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": layout,
        "sparse_mode": 3,
        "block_size": 16,
    }
    return (query, t(3, 16, 128), t(3, 16, 128)), options | more


def delta(**more: Any) -> Arguments:
    options = {
        "beta": t(4, 4),
        "scale": 1.0,
        "actual_seq_lengths": torch.tensor([2, 2], dtype=i32),
        "ssm_state_indices": torch.arange(4, dtype=i32),
        "num_accepted_tokens": torch.ones(2, dtype=i32),
        "g": -t(4, 4, d=f32),
    }
    return (t(4, 2, 8), t(4, 2, 8), t(4, 4, 16), t(5, 4, 16, 8)), options | more


def chunks() -> Arguments:
    (q, k, v, _), options = delta()
    return (q, k, v), {name: options[name] for name in ("beta", "scale", "actual_seq_lengths", "g")} | {"initial_state": t(2, 4, 16, 8)}


def routing(**more: Any) -> Arguments:
    options = {"active_num": 8, "expert_num": 6, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "active_expert_range": [1, 4]}
    return (t(4, 16), torch.tensor([[1, 2]] * 4, dtype=i32)), options | more


COUNTS = torch.tensor([2, 1, 2])
GROUPS = {"group_list": COUNTS, "split_item": 2, "group_type": 0, "group_list_type": 1}

CACHE, LATENTS = t(5, 8, 1, 16), torch.tensor([11, 5], dtype=i32)
ROTARY = {"query_rope": t(2, 3, 4, 8), "key_rope": t(5, 8, 1, 8)}
TABLE = {"block_table": torch.tensor([[2, 1], [3, 0]], dtype=i32)}

CASES: list[tuple[str, Callable[[], Arguments]]] = [
    ("npu.npu_rms_norm.default", lambda: ((t(2, 3, 16), t(16), 1e-6), {})),
    ("npu.npu_add_rms_norm.default", lambda: ((t(4, 16), t(4, 16), t(16), 1e-6), {})),
    ("npu.npu_add_rms_norm_dynamic_quant.default", lambda: ((t(4, 16), t(4, 16), t(16)), {"epsilon": 1e-5})),
    ("npu.npu_add_rms_norm_dynamic_quant.default", lambda: ((t(4, 16), t(4, 16), t(16)), {"output_mask": [True, True]})),
    ("npu.npu_add_rms_norm_quant.default", lambda: ((t(4, 16), t(4, 16), t(16), t(16), None), {"scales2": t(16)})),
    ("npu.npu_swiglu.default", lambda: ((t(4, 16),), {})),
    ("npu.npu_swiglu.default", lambda: ((t(4, 16), 0), {})),
    ("npu.npu_rotary_mul.default", lambda: ((t(1, 4, 3, 8), t(1, 4, 1, 8), t(1, 4, 1, 8)), {})),
    ("npu.npu_linear.default", lambda: ((t(4, 16), t(5, 16)), {})),
    ("aten.mm.default", lambda: ((t(4, 16), t(16, 5)), {})),
    ("aten.bmm.default", lambda: ((t(2, 4, 16), t(2, 16, 5)), {})),
    ("npu.npu_dynamic_quant.default", lambda: ((t(2, 4, 16),), {})),
    ("npu.npu_quantize.default", lambda: ((t(4, 16), t(1), t(1), torch.int8, -1, False), {})),
    (
        "npu.npu_quant_matmul.default",
        lambda: ((t(4, 16, d=i8), t(16, 32, d=i8), t(32)), {"pertoken_scale": t(4, d=f32), "output_dtype": bf16}),
    ),
    ("npu.npu_weight_quant_batchmatmul.default", lambda: ((t(4, 64), t(64, 2, d=i32), t(2, 16)), {"antiquant_group_size": 32})),
    (
        "npu.npu_scatter_pa_kv_cache_functional.default",
        lambda: ((t(2, 2, 8), t(2, 2, 8), t(3, 4, 2, 8), t(3, 4, 2, 8), torch.arange(2, dtype=i32)), {"cache_mode": "Norm"}),
    ),
    ("npu.npu_scatter_nd_update.default", lambda: ((t(4, 2, 3), torch.tensor([[1], [0]], dtype=i32), t(2, 2, 3)), {})),
    ("npu.npu_scatter_nd_update_.default", lambda: ((t(4, 2, 3), torch.tensor([[1], [0]], dtype=i32), t(2, 2, 3)), {})),
    ("npu.npu_recurrent_gated_delta_rule_functional.default", delta),
    ("npu.npu_recurrent_gated_delta_rule.default", delta),
    (
        "npu.npu_scatter_pa_kv_cache.default",
        lambda: ((t(2, 2, 8), t(2, 2, 8), t(3, 4, 2, 8), t(3, 4, 2, 8), torch.arange(2, dtype=i32)), {"cache_mode": "Norm"}),
    ),
    ("npu.npu_fused_infer_attention_score.default", lambda: attention("BSH", actual_seq_lengths=[3, 3], actual_seq_lengths_kv=[5, 4])),
    ("npu.npu_moe_gating_top_k.default", lambda: ((t(4, 8, d=f32), 3), {"bias": t(8, d=f32), "norm_type": 1, "out_flag": True})),
    (
        "npu.npu_lightning_indexer.default",
        lambda: ((t(2, 3, 4, 16), t(5, 8, 1, 16), t(2, 3, 4)), {"actual_seq_lengths_key": LATENTS, "layout_key": "PA_BSND", **TABLE}),
    ),
    (
        "npu.npu_sparse_flash_attention.default",
        lambda: (
            (t(2, 3, 4, 16), CACHE, CACHE, torch.zeros(2, 3, 1, 2, dtype=i32), 0.2),
            {"actual_seq_lengths_kv": LATENTS, "layout_kv": "PA_BSND", "attention_mode": 2, **ROTARY, **TABLE},
        ),
    ),
    ("npu.npu_moe_gating_top_k_softmax_v2.default", lambda: ((t(4, 8, d=f32),), {"k": 3, "renorm": 1})),
    ("npu.npu_moe_gating_top_k_softmax_v2.default", lambda: ((t(4, 8),), {"k": 3, "output_softmax": True})),
    (
        "npu.npu_dequant_swiglu_quant.default",
        lambda: ((t(6, 16),), {"group_index": COUNTS, "activate_left": True, "quant_mode": 1}),
    ),
    ("_C_ascend.npu_recurrent_gated_delta_rule.default", lambda: delta(actual_seq_lengths=torch.tensor([0, 2, 2], dtype=i32))),
    (
        "npucompile_packages.causal_conv1d_update.default",
        lambda: ((t(2, 3, 16), t(4, 16), t(5, 5, 16), torch.tensor([1, 3]), torch.tensor([2, 1])), {}),
    ),
    ("npucompile_packages.fused_gdn_gating.default", lambda: ((t(6, d=f32), t(4, 6), t(4, 6), t(6, d=f32)), {})),
    ("npucompile_packages.rms_norm_gated.default", lambda: ((t(4, 8), t(8), t(4, 8), 1e-6), {})),
    (
        "npucompile_packages.split_qkv_rmsnorm_rope.default",
        lambda: ((t(4, 6 * 8), t(8), t(8), t(4, 4), 2, 1, 1e-6), {}),
    ),
    ("npucompile_packages.split_qk_norm.default", lambda: ((t(4, 32), t(8, d=f32), t(8, d=f32), 1e-8), {})),
    ("npucompile_packages.split_qkvzba.default", lambda: ((t(4, 2 * 4 + 4 * 8 + 4), 4, 8, 2), {})),
    ("npu.npu_chunk_gated_delta_rule.default", chunks),
    ("npu.npu_moe_init_routing_v2.default", routing),
    ("npu.npu_moe_init_routing_v2.default", lambda: routing(quant_mode=1)),
    ("npu.npu_moe_init_routing_v2.default", lambda: routing(expert_tokens_num_flag=False)),
    ("npu.npu_grouped_matmul.default", lambda: (([t(6, 16)], [t(3, 16, 8)]), dict(GROUPS))),
    (
        "npu.npu_grouped_matmul.default",
        lambda: (
            ([t(6, 16, d=i8)], [t(3, 16, 8, d=i8)]),
            GROUPS | {"scale": [t(3, 8)], "per_token_scale": [t(6, d=f32)], "output_dtype": bf16},
        ),
    ),
    (
        "npu.npu_grouped_matmul.default",
        lambda: (
            ([t(6, 16, d=i8)], [t(3, 16, 1, d=i32)]),
            GROUPS | {"scale": [t(3, 1, 8, d=i64)], "per_token_scale": [t(6, d=f32)], "bias": [t(3, 8, d=f32)], "output_dtype": bf16},
        ),
    ),
    (
        "npu.npu_grouped_matmul_swiglu_quant_v2.default",
        lambda: ((t(6, 16, d=i8), [t(3, 16, 8, d=i8)], [t(3, 8, d=f32)], t(6, d=f32), COUNTS), {"group_list_type": 1}),
    ),
    (
        "npu.npu_grouped_matmul_swiglu_quant_v2.default",
        lambda: (
            (t(6, 16, d=i8), [t(3, 16, 1, d=i32)], [t(3, 8, d=i64)], t(6, d=f32), COUNTS),
            {"group_list_type": 1, "weight_assist_matrix": [t(3, 8, d=f32)]},
        ),
    ),
    (
        "npu.npu_moe_finalize_routing.default",
        lambda: ((t(8, 16), None, None, None, t(4, 2), torch.arange(8, dtype=i32), None), {"drop_pad_mode": 2}),
    ),
    (
        "npu.npu_moe_finalize_routing.default",
        lambda: ((t(2, 4, 16), None, None, None, t(4, 2), torch.arange(8, dtype=i32), None), {"drop_pad_mode": 3}),
    ),
    ("air.npu_fused_infer_attention_score.default", lambda: attention("TND")),
    ("air.npu_fused_infer_attention_score.default", lambda: attention("TND", softmax_lse_flag=True)),
    ("air.npu_fused_infer_attention_score.default", lambda: attention("BSND", softmax_lse_flag=True)),
    ("air.npu_fused_infer_attention_score.default", lambda: attention("BSH", softmax_lse_flag=True)),
]


def dispatch(**more: Any) -> Arguments:
    return (t(4, 16), torch.tensor([[0, 2], [3, 1], [0, 7], [4, 5]], dtype=i32), "world", 2, 0, 8), more


def sent(r: int) -> tuple[torch.Tensor, ...]:
    return tuple(GROUP_KERNELS["npu.npu_moe_distribute_dispatch_v2.default"]([dispatch(), dispatch()])[r])


def fused_experts() -> tuple[Any, ...]:
    """Two members with two experts each."""
    up, down = (torch.zeros(shape, dtype=torch.int32) for shape in ((2, 64, 8), (2, 32, 8)))
    scales, ids = [t(2, 64, d=i64), t(2, 64, d=i64)], torch.arange(2, dtype=torch.int32).repeat(24, 1)
    return t(24, 64), up, down, ids, *scales, t(2, 64, d=f32), t(2, 64, d=f32), t(24, 2, d=f32), "world", 2, 96


GROUP_CASES: list[tuple[str, Callable[[int], Arguments]]] = [
    ("_c10d_functional.all_reduce.default", lambda r: ((t(4, 2), "sum", "tp"), {})),
    ("_c10d_functional.all_gather_into_tensor.default", lambda r: ((t(4, 2), 2, "dp"), {})),
    ("_c10d_functional.reduce_scatter_tensor.default", lambda r: ((t(4, 2), "sum", 2, "world"), {})),
    ("npu.npu_mm_reduce_scatter_base.default", lambda r: ((t(4, 3), t(3, 2), "tp", 2), {"comm_mode": "aiv"})),
    ("_c10d_functional.all_to_all_single.default", lambda r: ((t(4, 2), [2, 2], [2, 2], "tp"), {})),
    ("_c10d_functional.broadcast.default", lambda r: ((t(4, 2), 1, "tp"), {})),
    ("npu.npu_moe_distribute_dispatch_v2.default", lambda r: dispatch(quant_mode=2)),
    ("npu.npu_moe_distribute_dispatch_v2.default", lambda r: dispatch(x_active_mask=torch.tensor([True, True, False, False]))),
    ("npu.npu_moe_distribute_dispatch_v2.default", lambda r: dispatch(expert_scales=t(4, 2, d=f32), global_bs=16, tp_world_size=1)),
    (
        "npu.npu_moe_distribute_combine_v2.default",
        lambda r: ((sent(r)[0], dispatch()[0][1], sent(r)[2], sent(r)[4], t(4, 2, d=f32), "world", 2, 0, 8), {"shared_expert_x": t(4, 16)}),
    ),
    ("npucompile_packages.dispatch_ffn_combine_w4a8.default", lambda r: (fused_experts(), {})),
]


def told(results: Any) -> list[list[Any]]:
    flat = list(results) if isinstance(results, (tuple, list)) else [results]
    return [[list(x.shape), str(x.dtype)] for x in flat if x is not None]


def ask_torch_npu(cases: list[tuple[str, Arguments]], cache_dir: Path) -> list[list[list[Any]]]:
    """Shapes and dtypes of the operators' Meta kernels, computed in a child process that may import torch_npu."""
    from npucompile.lowering.ascend.toolchain import harness

    harness.load(cache_dir)
    packages.declare()
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=_fake_store())
    answers = []
    for name, call in cases:
        namespace, op, overload = name.split(".")
        args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), call)
        known = [torch.distributed.group.WORLD.group_name if a in ("tp", "dp", "world") else a for a in args]
        answers.append(told(getattr(getattr(getattr(torch.ops, namespace), op), overload)(*known, **kwargs)))
    return answers


def _fake_store() -> Any:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


ALL = [(name, case) for name, case in CASES] + [(name, lambda case=case: case(0)) for name, case in GROUP_CASES]

CHILD = """
import importlib.util, json, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("cases", sys.argv[1])
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)
print("ANSWER" + json.dumps(cases.ask_torch_npu([(name, case()) for name, case in cases.ALL], Path(sys.argv[2]))))
"""


@pytest.fixture(scope="module")
def metas(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[Any]]]:
    """Shapes and dtypes that torch_npu gives for every case, from a child process."""
    command = [sys.executable, "-c", CHILD, __file__, str(tmp_path_factory.mktemp("stubs"))]
    child = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, check=False)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.partition("ANSWER")[2])


@pytest.mark.parametrize("i", range(len(CASES)), ids=[name.split(".")[1] for name, _ in CASES])
def test_results_are_as_torch_npu_says(metas: list[list[list[Any]]], i: int) -> None:
    name, case = CASES[i]
    args, kwargs = case()
    assert told(KERNELS[name](*args, **kwargs)) == metas[i]


@pytest.mark.parametrize("i", range(len(GROUP_CASES)), ids=[name.split(".")[1] for name, _ in GROUP_CASES])
def test_results_of_groups_are_as_torch_npu_says(metas: list[list[list[Any]]], i: int) -> None:
    name, case = GROUP_CASES[i]
    for result in GROUP_KERNELS[name]([case(0), case(1)]):
        assert told(result) == metas[len(CASES) + i]


def test_every_kernel_is_compared() -> None:
    assert {name for name, _ in CASES} == set(KERNELS)
    assert {name for name, _ in GROUP_CASES} == set(GROUP_KERNELS)


@pytest.mark.parametrize(("name", "case"), GROUP_CASES, ids=[name.split(".")[1] for name, _ in GROUP_CASES])
def test_groups_are_found_in_the_arguments(name: str, case: Callable[[int], Arguments]) -> None:
    args, kwargs = case(0)
    wanted = next(a for a in args if a in ("tp", "dp", "world"))
    assert group_of(name, args, kwargs) == wanted
    at = args.index(wanted)
    names = {"npu_moe_distribute": "group_ep", "dispatch_ffn": "group", "npu_mm": "hcom", "npu_all": "hcom"}
    by_name = {next((by for start, by in names.items() if name.split(".")[1].startswith(start)), "group_name"): wanted}
    assert group_of(name, args[:at], by_name) == wanted


def test_what_does_not_talk_has_no_group() -> None:
    with pytest.raises(LoweringError, match=r"npu.npu_linear.default does not communicate"):
        group_of("npu.npu_linear.default", (), {})
    with pytest.raises(LoweringError, match="its group is None"):
        group_of("_c10d_functional.all_reduce.default", (t(1), "sum"), {})
