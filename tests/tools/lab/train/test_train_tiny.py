"""tools/lab/train/train_tiny.py: the schedule, the gradients of a split batch, and the loss curve."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from npucompile.tools.lab.train import train_tiny
from npucompile.tools.lab.train.train_tiny import TrainingPhase


def test_the_step_size_rises_stays_and_falls_to_zero() -> None:
    phase = TrainingPhase(steps=1000, decay=200, tokens=64, length=16)
    factors = [phase.factor(step) for step in range(phase.steps)]
    assert factors[0] == pytest.approx(1 / train_tiny.WARMUP)
    assert factors[train_tiny.WARMUP : 800] == [1.0] * (800 - train_tiny.WARMUP)
    assert factors[-1] == pytest.approx(1 / 200)
    assert all(a >= b for a, b in pairwise(factors[800:]))


def test_a_longer_run_shares_its_first_steps_and_windows_double_in_the_descent() -> None:
    short, long = TrainingPhase(1000, 200, 64, 16), TrainingPhase(3000, 200, 64, 16)
    assert [short.factor(s) for s in range(800)] == [long.factor(s) for s in range(800)]
    assert (short.window(799), short.window(800)) == (16, 32)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_gradients_of_a_split_batch_are_those_of_the_whole(parts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, generator=generator, requires_grad=True)
    unread = torch.zeros(2, requires_grad=True)
    windows = torch.randn(8, 3, generator=generator)

    def loss(part: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        value = ((part @ weight) ** 2).mean()
        return value, [float(value.detach())]

    with ThreadPoolExecutor(parts) as pool:
        grads, terms = train_tiny.gradients(pool, parts, windows, loss, [weight, unread])
    (whole,) = torch.autograd.grad(loss(windows)[0], [weight])
    norm = float(whole.norm())
    torch.testing.assert_close(grads[0], whole * min(1.0, train_tiny.CLIP / (norm + 1e-6)))
    assert not grads[1].any()
    assert terms == pytest.approx([float(loss(windows)[0].detach()), norm])


def test_a_curve_has_a_row_a_step_and_empty_fields(tmp_path) -> None:
    curve = train_tiny.LossCurve(tmp_path / "curve" / "loss.csv", ("step", "tokens", "loss", "val"))
    curve.add(10, 640, 7.5, None)
    curve.add(20, 1280, 7.25, 7.125)
    assert curve.path.read_text().splitlines() == ["step,tokens,loss,val", "10,640,7.5000,", "20,1280,7.2500,7.1250"]
