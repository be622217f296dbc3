"""tools/advisor/plan/predict.py: every published row, and laws that hold for all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from npucompile.graphs.errors import SpecError
from npucompile.tools.advisor.plan.predict import predict, uncalibrated
from npucompile.tools.advisor.plan.published import case_of, ids
from npucompile.tools.advisor.plan.system import Workload

PARTS = {"attention", "products", "experts", "exchange", "collectives", "head", "drafts", "launches", "host", "prefill", "rest"}


@pytest.mark.parametrize("name", ids())
def test_every_row_is_predicted(name: str) -> None:
    case = case_of(name)
    prediction = predict(case)
    data = prediction.as_dict()
    work = case.workload
    assert data["binding"] in ("memory", "prefill", "decode", "bucket", "exchange")
    for key in ("tpot_ms", "output_tok_s", "ttft_ms", "e2e_ms"):
        low, high = data["interval"][key]
        assert low < data[key] < high
    assert set(data["breakdown_ms"]) == PARTS
    # The parts of a token's time are that time, up to the drain of requests that share no step, and to stalls before first tokens leave.
    assert sum(prediction.parts_ms.values()) == pytest.approx(prediction.tpot_ms.mean, rel=0.35)
    # Little's law.
    in_flight = prediction.output_tok_s * prediction.e2e_ms.mean / 1e3 / work.mean_output
    assert in_flight <= work.concurrency * 1.001
    assert prediction.e2e_ms.mean == pytest.approx(prediction.ttft_ms.mean + prediction.tpot_ms.mean * (work.mean_output - 1), rel=0.001)
    assert data["memory_gib"]["rest"] > 0


def test_kernels_without_a_row_widen_the_interval():
    assert uncalibrated(case_of("qwen35-397b-a3x8-in3k5-out1k5-50ms")) == "linear attention"
    assert uncalibrated(case_of("qwen3-235b-a3x24-pd-3.5k-1.5k-50ms")) == "fused expert exchange"
    wide, narrow = (predict(case_of(name)) for name in ("dsv32-a3x32-pd-64k-1k-30ms", "dsr1-a3x8-mix-2k-2k-50ms"))
    ratio = [np.log(p.interval["tpot_ms"][1] / p.interval["tpot_ms"][0]) for p in (wide, narrow)]
    assert ratio[0] > 2 * ratio[1]


def test_what_binds_is_said():
    case = case_of("qwen3-32b-a3x2-mix-2k-2k-50ms")
    small = replace(case, serving=replace(case.serving, max_tokens=40_000))
    assert predict(small).binding == "memory"
    padded = replace(case, decode=replace(case.decode, buckets=(120,)), workload=Workload.uniform(2000, 2000, 40, 80))
    assert predict(padded).binding == "bucket"
    prompts = replace(case, workload=Workload.uniform(2000, 20, 120, 480))
    assert predict(prompts).binding == "prefill"


def test_a_request_that_no_rank_holds_is_refused():
    case = case_of("qwen3-32b-a3x2-mix-2k-2k-50ms")
    with pytest.raises(SpecError, match="legal are more ranks"):
        predict(replace(case, workload=Workload.uniform(10_000_000, 10, 1, 1)))
