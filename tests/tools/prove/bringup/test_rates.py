"""tools/prove/bringup/rates.py: what a device does is timed on it, beside what the cost model takes of its chip."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from support.faulty import FaultyDevice, right

from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend.cost.parameters import parameters
from npucompile.lowering.ascend.emulator.device import open_device
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.tools.prove.bringup.device_graph import Host
from npucompile.tools.prove.bringup.rates import ELSEWHERE, Rate, RatesCase, chain, measured, slow_dies

CHIP = "ascend910_93"
SPEEDS = parameters(CHIP)


@pytest.fixture
def device():
    made = open_device(0)
    yield made
    made.close()


def test_all_rates_are_measured_and_have_what_the_model_takes_beside_them(device, tmp_path):
    judgement = RatesCase(CHIP).judge(Host(device, tmp_path))
    assert (judgement.failures, judgement.spent, "slow" in judgement.facts) == ((), True, False)
    rates = judgement.facts["rates"]
    assert list(rates) == ["copy to the device", "copy from the device", "memory", "bf16 product", "launch, eager", "launch, replayed"]
    assert all(rate["measured"] > 0 for rate in rates.values())
    assert (rates["memory"]["nameplate"], rates["memory"]["model"]) == (
        SPEEDS.hbm_bytes_per_s,
        SPEEDS.hbm_bytes_per_s * SPEEDS.memory_fraction,
    )
    assert rates["launch, replayed"]["model"] == SPEEDS.vector_launch_s


def test_a_slower_device_is_measured_as_such(tmp_path):
    """A step that takes 50 ms: of 8 additions each takes 6 ms, and a product of 32 x 32 is as slow."""

    def slow(executable, operands):
        time.sleep(0.05)
        return right(executable, operands)

    rates = measured(Host(FaultyDevice(slow), tmp_path), SPEEDS, ELSEWHERE)
    assert 0.05 / 8 < rates["launch, eager"].measured < 1.0
    assert rates["bf16 product"].measured < 2 * 32**3 / 0.05
    assert rates["memory"].measured < 2 * ELSEWHERE.copied_bytes / 0.05
    assert rates["bf16 product"].slow
    assert rates["launch, replayed"].slow


@pytest.mark.parametrize(
    ("unit", "measured_rate", "slow"), [("B/s", 4.0, True), ("B/s", 6.0, False), ("s", 21.0, True), ("s", 19.0, False)]
)
def test_less_than_half_of_what_the_model_takes_is_slow(unit, measured_rate, slow):
    assert Rate(measured_rate, unit, model=10.0).slow == slow
    assert not replace(Rate(measured_rate, unit), nameplate=1e9).slow


@pytest.mark.parametrize("captured", [False, True])
def test_a_chain_computes_what_it_says(captured):
    value = torch.arange(8.0)
    (result,) = Interpreter(chain("aten.add.Tensor", value, 5, captured=captured), Mesh())([[value]])[0]
    torch.testing.assert_close(result, 6 * value)
    square = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    (result,) = Interpreter(chain("aten.mm.default", square), Mesh())([[square]])[0]
    torch.testing.assert_close(result, square @ square)


def test_a_die_that_is_slower_than_the_others_is_named():
    rates = {"memory": [1.5e12, 1.49e12, 1.1e12, 1.52e12], "bf16 product": [3e14, 3e14, 2.9e14, 2.5e14]}
    assert slow_dies(rates) == ["rank 2: memory 1.1e+12, the median is 1.5e+12"]
