"""runtime/metrics.py: steps, padding, requests and drafts are counted, and snapshots share nothing with the counters."""

from npucompile.graphs.types import Bucket
from npucompile.runtime.metrics import Metrics
from npucompile.runtime.request import FINISH_REASONS


def test_counts_and_shares_nothing():
    metrics = Metrics()
    metrics.count_step(Bucket("decode", 4, 1), 3, 4)
    metrics.count_step(Bucket("decode", 4, 1), 4, 4)
    metrics.count_step(Bucket("prefill", 1, 32), 1, 1)
    metrics.count_failure()
    metrics.count_degraded(Bucket("decode", 2, 1))
    metrics.finished["stop"] += 2
    metrics.finished["error"] += 1
    metrics.discarded_rows += 1
    snapshot = metrics.snapshot()
    assert snapshot["bucket_steps"] == {"decode-b4-q1": 2, "prefill-b1-q32": 1}
    assert (snapshot["steps_total"], snapshot["steps_failed_total"]) == (3, 1)
    assert (snapshot["padded_rows_total"], snapshot["discarded_rows_total"]) == (1, 1)
    assert snapshot["requests_total"] == 3
    assert {r: snapshot[f"requests_finished_{r}"] for r in FINISH_REASONS} == {
        "stop": 2,
        "length": 0,
        "cancelled": 0,
        "timeout": 0,
        "error": 1,
    }
    assert snapshot["degraded_steps"] == {"decode-b2-q1": 1}
    for rows in (10, 9, 10):
        metrics.count_decode_batch(rows)
    assert list(metrics.snapshot()["decode_batch_steps"].items()) == [("9", 1), ("10", 2)]
    snapshot["bucket_steps"]["decode-b4-q1"] = 99
    assert metrics.snapshot()["bucket_steps"]["decode-b4-q1"] == 2
