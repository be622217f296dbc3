"""tools/build/kv_cache_choice.py: int8 where it is asked for or the checkpoint has scales, refused where no operator takes it."""

from __future__ import annotations

import pytest
import torch
from support import modelslim

from npucompile.graphs.errors import SpecError
from npucompile.models.quant.formats import Formats
from npucompile.tools.build import choices
from npucompile.tools.build import plan as planning
from npucompile.tools.build.kv_cache_choice import choose_kv_cache
from npucompile.tools.build.plan import Options
from npucompile.tools.commands.build import command

C8 = modelslim.FIXTURES / "dense_w8a8c8"
STATIC = (("model.layers.*.self_attn", "int8_static"),)


@pytest.mark.parametrize(
    ("requested", "found", "chosen"),
    [
        ("auto", (), ()),
        ("auto", STATIC, STATIC),
        ("bfloat16", STATIC, ()),
        ("int8", (), (("?*", "int8"),)),
        ("int8", STATIC, (*STATIC, ("?*", "int8"))),
    ],
)
def test_scales_of_the_checkpoint_come_first(
    requested: str, found: tuple[tuple[str, str], ...], chosen: tuple[tuple[str, str], ...]
) -> None:
    formats = choose_kv_cache(requested, Formats(kv_cache=found), torch.bfloat16)
    assert formats.kv_cache == chosen
    assert formats.of_cache("") == "float", "a draft head's layer has no name, and caches floats"
    assert Formats.of_fields(formats.as_fields()) == formats


def cache(plan: planning.Plan) -> dict[str, torch.dtype]:
    pools = plan.model.state(plan.limits, plan.dtype)["layers"][-1]
    return {name: aval.dtype for name, aval in pools.items()}


def test_plans_have_the_pools_that_are_chosen() -> None:
    static = planning.plan(Options(str(C8), backend="null"))
    assert cache(static) == {"k": torch.int8, "v": torch.int8}
    assert "keys and values are cached as int8, scales of the checkpoint, one a head's channel" in static.notes
    assert cache(planning.plan(Options(str(C8), backend="null", dtype="bfloat16", kv_cache_dtype="bfloat16"))) == dict.fromkeys(
        "kv", torch.bfloat16
    )
    dynamic = planning.plan(Options("qwen3.5-tiny", backend="null", kv_cache_dtype="int8"))
    assert cache(dynamic) == {"k": torch.int8, "v": torch.int8, "k_scale": torch.float32, "v_scale": torch.float32}
    assert dynamic.arguments[dynamic.arguments.index("--kv-cache-dtype") + 1] == "int8"


def test_twice_the_tokens_are_cached() -> None:
    """A deployment whose pool fills what memory is left: 132 bytes a token and head of 128 channels for 256."""
    options = Options("qwen3-30b-a3b", deployment="qwen3-30b-a3x1-mix-3.5k-1.5k-50ms")
    floats, integers = (planning.plan(Options(options.model, deployment=options.deployment, kv_cache_dtype=d)) for d in ("auto", "int8"))
    pages = [plan.limits.num_pages - 1 for plan in (floats, integers)]
    full = 192 * 5120 // 128
    assert pages[0] < full
    assert pages[1] == min(full, pages[1])
    assert pages[1] >= min(full, int(pages[0] * 1.9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "qwen3.5-tiny", "dtype": "float32", "kv_cache_dtype": "bfloat16"}, "computes in torch.float32 and caches no others"),
        (
            {"model": "deepseek-r1", "target": "ascend-a3", "mesh": "tp=16", "kv_cache_dtype": "int8"},
            "caches no keys and values of heads but latents",
        ),
        ({"model": "qwen3.5-tiny", "kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8'; legal are auto, bfloat16, int8"),
    ],
)
def test_what_has_no_operator_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        planning.plan(Options(**options, backend="null"))


def test_the_command_lists_what_the_plan_takes() -> None:
    (option,) = [option for option in command.params if option.name == "kv_cache_dtype"]
    assert tuple(option.type.choices) == choices.KV_CACHE_DTYPES  # type: ignore[attr-defined]
