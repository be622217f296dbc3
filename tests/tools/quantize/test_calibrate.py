"""tools/quantize/calibrate.py: ranges of activations are those that transformers' modules see."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import oracle
from support.tiny import QUIET

from npucompile.graphs.errors import SpecError
from npucompile.tools.quantize.calibrate import calibrated
from npucompile.tools.quantize.layout import Activations


@pytest.mark.parametrize("name", ["plain", "dense", "moe"])
def test_ranges_are_those_of_transformers(name):
    random = oracle.case(name)
    batches = [torch.tensor([random.prompt(length, seed=length)], dtype=torch.int32) for length in (9, 17)]
    last = len(random.model.config.layer_kinds) - 1
    modules = {"qkv": "self_attn.k_proj", "out": "self_attn.o_proj"}
    if name == "moe":
        modules |= {"shared_gate_up": "mlp.shared_expert.gate_proj", "shared_down": "mlp.shared_expert.down_proj"}
    else:
        modules |= {"gate_up": "mlp.up_proj", "down": "mlp.down_proj"}
    paths = {path.rpartition(".")[2]: path for path, _ in oracle.tree.flatten(random.weights) if path.startswith(f"layers.{last}.")}
    wanted = {paths[leaf]: f"model.layers.{last}.{module}" for leaf, module in modules.items()}
    inputs: dict[str, list[torch.Tensor]] = {module: [] for module in wanted.values()}
    hooks = [
        random.theirs.get_submodule(module).register_forward_pre_hook(lambda _, args, module=module: inputs[module].append(args[0]))
        for module in inputs
    ]
    for tokens in batches:
        random.logits(tokens[0].tolist())
    for hook in hooks:
        hook.remove()
    found = calibrated(random.model, random.weights, batches, wanted, QUIET)
    for path, module in wanted.items():
        seen = torch.cat([x.flatten() for x in inputs[module]])
        scale, offset = Activations.of_range(float(seen.min()), float(seen.max()))
        assert found[path].scale == pytest.approx(scale, rel=1e-4), module
        assert abs(found[path].offset - offset) <= 1, module


def test_a_matrix_that_is_not_multiplied_by_is_named():
    random = oracle.drafting("dense")
    (path,) = (path for path, _ in oracle.tree.flatten(random.weights) if path.startswith("mtp.") and path.endswith(".gate_up"))
    tokens = torch.tensor([random.prompt(4)], dtype=torch.int32)
    with pytest.raises(SpecError, match=r"mtp\.up can have no scale for all tokens: the calibration ran no product of it, nor of 0 more"):
        calibrated(replace(random.model, drafting=False), random.weights, [tokens], {path: "mtp.up"}, QUIET)
