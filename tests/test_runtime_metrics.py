from npucompile.graphs.types import Bucket
from npucompile.runtime.metrics import Metrics
from npucompile.runtime.request import FINISH_REASONS


def test_counts_and_shares_nothing():
    metrics = Metrics()
    metrics.count_step(Bucket("decode", 4, 1), 3)
    metrics.count_step(Bucket("decode", 4, 1), 4)
    metrics.count_step(Bucket("prefill", 1, 32), 1)
    metrics.finished["stop"] += 2
    metrics.finished["error"] += 1
    snapshot = metrics.snapshot()
    assert snapshot["bucket_steps"] == {"decode-b4-q1": 2, "prefill-b1-q32": 1}
    assert snapshot["steps_total"] == 3
    assert snapshot["padded_rows_total"] == 1
    assert snapshot["requests_total"] == 3
    assert {r: snapshot[f"requests_finished_{r}"] for r in FINISH_REASONS} == {"stop": 2, "length": 0, "cancelled": 0, "error": 1}
    snapshot["bucket_steps"]["decode-b4-q1"] = 99
    assert metrics.snapshot()["bucket_steps"]["decode-b4-q1"] == 2


def test_padding_of_all_groups_is_counted():
    metrics = Metrics()
    metrics.count_step(Bucket("decode", 4, 1), 5, groups=3)
    assert (metrics.snapshot()["padded_rows_total"], metrics.snapshot()["steps_total"]) == (7, 1)
