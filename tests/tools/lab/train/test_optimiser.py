"""tools/lab/train/optimiser.py: matrices follow Muon, vectors and tables Adam."""

from concurrent.futures import ThreadPoolExecutor

import torch

from npucompile.tools.lab.train.optimiser import Optimiser, Rates, is_matrix


def test_a_stack_is_updated_as_its_matrices_are():
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(3, 2, 24, 40, generator=generator)
    grads = torch.randn(stack.shape, generator=generator)
    matrices = {str(i): matrix.clone() for i, matrix in enumerate(stack.flatten(0, 1))}
    before = stack.clone()
    with ThreadPoolExecutor(2) as pool:
        Optimiser({"w": stack}, Rates()).update([grads], 0.5, pool)
        Optimiser(matrices, Rates()).update(grads.flatten(0, 1), 0.5, pool)
    assert torch.equal(stack.flatten(0, 1), torch.stack(list(matrices.values())))
    # The step is the nearest orthogonal matrix, whose singular values Muon gets to within 0.7 to 1.2, times the step size.
    rates = Rates()
    step = (before * (1 - 0.5 * rates.matrix * rates.decay) - stack) / (0.5 * rates.matrix)
    values = torch.linalg.svdvals(step)
    assert 0.3 < values.min() < values.max() < 1.3


def test_vectors_and_tables_follow_adam():
    generator = torch.Generator().manual_seed(2)
    params = {"embed": torch.randn(6, 4, generator=generator), "norm": torch.randn(4, generator=generator)}
    twins = [leaf.clone().requires_grad_() for leaf in params.values()]
    rates = Rates()
    oracle = torch.optim.Adam(twins, lr=rates.other, betas=rates.betas, eps=rates.eps)
    optimiser = Optimiser(params, rates)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            grads = [torch.randn(leaf.shape, generator=generator) for leaf in twins]
            for twin, grad in zip(twins, grads, strict=True):
                twin.grad = grad
            oracle.step()
            optimiser.update(grads, 1.0, pool)
    for leaf, twin in zip(params.values(), twins, strict=True):
        torch.testing.assert_close(leaf, twin.detach())


def test_other_leaves_stay():
    params = {"mtp": {"fc": torch.randn(8, 4), "norm": torch.zeros(4)}, "layers": [torch.ones(4, 4)]}
    before = params["mtp"]["fc"].clone()
    with ThreadPoolExecutor(1) as pool:
        Optimiser(params, Rates(), only="mtp.").update([torch.randn(8, 4), torch.ones(4)], 1.0, pool)
    assert torch.equal(params["layers"][0], torch.ones(4, 4))
    assert not torch.equal(params["mtp"]["fc"], before)


def test_which_leaves_are_matrices():
    assert is_matrix("layers.0.mixer.qkvzba", torch.zeros(4, 4))
    assert not is_matrix("layers.0.mlp.router", torch.zeros(4, 4))
    assert not is_matrix("norm", torch.zeros(4))
