"""models/: whatever was drafted and accepted, a request leaves the state of one that never speculated."""

from __future__ import annotations

import random

import pytest
import torch
from support import speculators

MODELS = ["dense", "moe"]
LEAVES, NEAR = 24, 3e-6


def memories(course, server, **knobs):
    """Device memory of three requests that never speculate, by request and number of computed tokens."""
    requests, by_start = [course.request(i, **knobs) for i in range(3)], [{}, {}, {}]
    server.prefill(requests)
    for _ in range(LEAVES + 8):
        for memory, request in zip(by_start, requests, strict=True):
            memory[request.start] = server.memory(request)
        server.decode(requests)
    assert all(set(request.counts) == {1} for request in requests)
    return by_start


def speculated(course, server):
    """The same of requests that accept any number of drafts in each step, with their prompts prefilled together."""
    requests, draw = [course.request(i) for i in range(3)], random.Random(3)
    server.prefill(requests)
    while max(len(request.output) for request in requests) < LEAVES:
        for i, request in enumerate(requests):
            yield i, request.start, server.memory(request)
            server.plant_drafts(request, course.truth[i], draw.randint(0, server.drafts))
        server.decode(requests)
    server.expect_untouched([1, 2, 3])


def error(actual, want):
    """Relative error of a tensor."""
    return float((actual - want).norm() / want.norm())


@pytest.mark.parametrize("name", MODELS)
def test_state_is_bit_for_bit_that_of_requests_with_their_drafts_off(courses, name):
    """Recurrent and convolution state, keys and values of the layers and of the draft head, the request slot and the drafts in it.

    In steps of one width all kernels except products compute a token the same in any row; products run token by token here.
    """
    course, run = courses(name), {"run": speculators.token_by_token}
    truth = memories(course, course.server(3, **run), drafts=0)
    for i, start, memory in speculated(course, course.server(3, **run)):
        for what, tensor in memory.items():
            assert torch.equal(tensor, truth[i][start][what]), f"{what} of request {i} at {start}"


@pytest.mark.parametrize("drafts", [1, 3, 7])
@pytest.mark.parametrize("name", MODELS)
def test_state_is_that_of_programs_without_drafts(courses, name, drafts):
    """To within NEAR: steps of one token have other product shapes, and torch has another exponential kernel for strided values."""
    course = courses(name)
    truth = memories(course, course.server(0))
    for i, start, memory in speculated(course, course.server(drafts)):
        for what, tensor in truth[i][start].items():
            if what == "request_slots":
                assert torch.equal(memory[what][:2], tensor), f"place and token of request {i} at {start}"
            else:
                assert error(memory[what], tensor) < NEAR, f"{what} of request {i} at {start}"
