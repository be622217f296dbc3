"""Inputs of every step of drawn schedules, of all kinds of steps, are what they were: digests that only a deliberate change moves.

A schedule runs on the toy device, so its digest holds which steps are chosen as well as what is packed for them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import toy_device as toy

from npucompile.graphs.steps.table import StepInputs
from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.adjustments import Adjustment
from npucompile.runtime.request import Request, Sampling
from npucompile.runtime.scheduler.kv_cache_manager import PrefixCacheSettings
from npucompile.runtime.steps.pack import pack, without_unused
from npucompile.runtime.steps.resized import long_enough, resized, whole_steps
from npucompile.runtime.steps.rows import DecodeRow, Places, PrefillRow

PAD = 12
"""The token in the places of all pictures."""


pytestmark = pytest.mark.usefixtures("quiet")


def add(digest: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Adds arrays to a digest: names, in their order, types, shapes and bytes."""
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())


# Schedules.


def limits_of(drafts: int, pictures: int = 0) -> Limits:
    """Pages and slots that are scarce, for requests of up to 48 tokens."""
    return Limits(4, 31, 1 + 6 * (drafts + 1) + 2, 48, drafts + 1, drafts, checkpoint_slots=2, picture_rows=pictures)


def buckets_of(drafts: int, encode: Sequence[tuple[int, int]] = ()) -> tuple[Bucket, ...]:
    prefill = ((1, 3), (1, 8), (3, 5), (2, 12))
    kinds = {"encode": encode, "prefill": prefill, "decode": [(rows, drafts + 1) for rows in (1, 2, 4)]}
    return tuple(Bucket(kind, *size) for kind, sizes in kinds.items() for size in sizes)


ENCODE = ((1, 80), (3, 16), (2, 36))
ANY_SIZE = frozenset({"prefill", "decode"})
WORLDS: dict[str, tuple[int, dict[str, Any], str]] = {
    "text": (0, {"prefill_burst": 2}, "3be4feb55bbd19e7"),
    "drafts": (3, {"max_logprobs": 3, "prefix_cache": PrefixCacheSettings()}, "6cbc844aea9464ff"),
    "widths": (3, {"buckets": (*buckets_of(3), Bucket("decode", 4, 1)), "measured": True}, "8c7dc2aa9eba9a5a"),
    "groups": (2, {"groups": 3, "run_ahead": 0}, "b3128ae40aa3629f"),
    "measured": (1, {"itl_target_ms": 2500.0, "buckets": (*buckets_of(1), Bucket("prefill", 1, 24))}, "2acfdb7cd6135d34"),
    "any size": (1, {"any_size": ANY_SIZE, "fixed_tokens": 6.0, "prefix_cache": PrefixCacheSettings()}, "fb3c0df1d5248330"),
    "any size in time": (0, {"any_size": ANY_SIZE, "itl_target_ms": 4500.0}, "cbb8e9b57617cb4f"),
    "pictures": (
        0,
        {"limits": limits_of(0, 30), "buckets": buckets_of(0, ENCODE), "prefix_cache": PrefixCacheSettings()},
        "d42598ac58d6cb7e",
    ),
    "pictures of groups": (2, {"limits": limits_of(2, 24), "buckets": buckets_of(2, ENCODE), "groups": 2}, "cacdee072c7bac94"),
    "pictures in time": (0, {"limits": limits_of(0, 24), "buckets": buckets_of(0, ENCODE), "itl_target_ms": 2500.0}, "0b5a07c6781615be"),
    "pictures of any size": (
        1,
        {"limits": limits_of(1, 24), "buckets": buckets_of(1, ENCODE), "any_size": ANY_SIZE, "itl_target_ms": 3500.0},
        "80c7484a2dac52d4",
    ),
}


def asked(draw: random.Random, name: str, drafts: int, max_logprobs: int, pictures: bool) -> Request:
    """A request of any kind that the toy device computes."""
    prompt: list[int] = []
    shown = []
    for _ in range(draw.randint(1, 5)):
        if pictures and draw.random() < 0.4 and len(prompt) < 24:
            rows, columns = draw.randint(1, 3), draw.randint(1, 3)
            shown.append(toy.picture(len(prompt), rows, columns, draw.randint(0, 4), broken=draw.random() < 0.05))
            prompt += [PAD] * rows * columns
        else:
            prompt += [draw.randint(0, 3) for _ in range(draw.randint(1, 7))]
    temperature = draw.choice([0.0, 0.5, 1.0])
    sampling = Sampling(temperature, draw.randint(0, 5), draw.choice([0.25, 1.0]), draw.choice([0.0, 0.25]), seed=draw.randint(0, 9))
    prompt.append(draw.randint(0, 9))
    request = Request(name, tuple(prompt), draw.randint(1, 30), sampling, pictures=tuple(shown), priority=draw.randint(0, 1))
    speculative, logprobs = draw.choice([None, draw.randint(0, drafts)]), draw.choice([None, max_logprobs]) if max_logprobs else None
    return replace(request, speculative_tokens=speculative, logprobs=logprobs)


def played(drafts: int, options: dict[str, Any]) -> str:
    """The digest of all steps of a schedule."""
    options = {"limits": limits_of(drafts), "buckets": buckets_of(drafts)} | options
    served = toy.serving(**options)
    launch, digest, draw, kinds = served.device.launch, hashlib.sha256(), random.Random(7), set[str]()

    def launched(bucket: Bucket, inputs: Sequence[Mapping[str, np.ndarray]]) -> toy.ToyStep:
        digest.update(bucket.name.encode())
        for arrays in inputs:
            add(digest, arrays)
        kinds.add(bucket.kind)
        return launch(bucket, inputs)

    served.device.launch = launched  # type: ignore[method-assign]
    for number in range(120):
        if draw.random() < 0.3:
            name = f"r{number}"
            served.submit(asked(draw, name, drafts, options.get("max_logprobs", 0), bool(options["limits"].picture_rows)))
            if draw.random() < 0.1:
                served.engine.cancel(name)
        served.engine.step()
    served.drain()
    served.engine.stepper.check()
    assert kinds == {bucket.kind for bucket in options["buckets"]}
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("name", WORLDS)
def test_steps_of_a_schedule_have_the_inputs_that_they_had(name: str) -> None:
    drafts, options, expected = WORLDS[name]
    assert played(drafts, options) == expected


# Rows that the toy device does not compute: with bitmasks and adjustments, and at other sizes.

FULL = Limits(4, 20, 13, 16, 3, 2, bitmasks=2, bitmask_words=3, logit_adjustments=4, adjusted_tokens=70, picture_rows=20)


def row_of(draw: random.Random, bucket: Bucket, i: int) -> PrefillRow | DecodeRow:
    """A row of any kind; the first two have a bitmask, and the first three adjustments."""
    width = bucket.q_len if bucket.kind == "decode" else 1
    numbers = np.random.default_rng(draw.randint(0, 99))
    mask = numbers.integers(-9, 9, (width, FULL.bitmask_words)).astype(np.int32) if i < 2 else None
    bias, penalty = numbers.random((2, 70), np.float32)
    more = tuple({draw.randint(0, 69): 0.5} for _ in range(width - 1))
    seen = numbers.integers(0, 9, 3).astype(np.int32)
    adjustment = Adjustment(bias, None if i else penalty, more, seen, ((4,), (4, 9))[: width - 1], 1.5) if i < 3 else None
    sampling = Sampling(0.5, 3, 0.25, 0.5)
    pages = [draw.randint(1, 19) for _ in range(4)]
    if bucket.kind == "decode":
        slots, drafts = draw.sample(range(1, 13), 3), draw.randint(0, width - 1)
        uniforms = [draw.random() for _ in range(5)]
        return DecodeRow(1 + i, draw.randint(0, 8), pages, slots, drafts, sampling, uniforms, draw.random() < 0.5, mask, adjustment)
    count = draw.randint(1, bucket.q_len)
    places = Places(numbers.integers(0, 9, (count, 3)).astype(np.int32), [draw.randint(0, 19) for _ in range(count + 1)]) if i % 2 else None
    row = PrefillRow(range(5, 5 + count), draw.randint(0, 4), pages, 1 + i, 1 + i, draw.randint(-1, 9), sampling, draw.random())
    return row._replace(logprobs=draw.random() < 0.5, bitmask=mask, adjustment=adjustment, places=places, start_slot=draw.choice([None, 9]))


@pytest.mark.parametrize(
    "bucket, expected",
    [
        (Bucket("decode", 4, 3), "44015d883eef1ff4"),
        (Bucket("decode", 6, 2), "6382826ed8dc0f99"),
        (Bucket("prefill", 4, 6), "4758dca1347c71d6"),
        (Bucket("prefill", 1, 2), "1bb50086a2959788"),
    ],
    ids=lambda value: value.name if isinstance(value, Bucket) else "",
)
def test_rows_with_all_that_they_can_have_are_packed_and_resized_as_they_were(bucket: Bucket, expected: str) -> None:
    draw, digest = random.Random(bucket.name), hashlib.sha256()
    limits = replace(FULL, picture_rows=20 if bucket.kind == "prefill" else 0)
    for count in range(1, min(bucket.batch, 4) + 1):
        rows = [row_of(draw, bucket, i) for i in range(count)]
        arrays = pack(bucket, rows, limits, max_logprobs=count % 2)
        add(digest, arrays)
        add(digest, without_unused(arrays))
        logprobs = count % 2 > 0
        exact = pack(replace(bucket, batch=count), rows, limits, max_logprobs=count % 2)
        add(digest, long_enough(replace(bucket, batch=count), exact, limits, logprobs=logprobs))
        add(digest, resized(arrays, range(count)[::2], StepInputs(replace(bucket, batch=2), limits, logprobs)))
        larger = [replace(bucket, batch=rows) for rows in (1, 3)]
        for part in whole_steps(bucket, exact, larger, limits, logprobs=logprobs):
            digest.update(f"{part.bucket.name} {part.rows}".encode())
            add(digest, part.inputs)
    assert digest.hexdigest()[:16] == expected
