"""runtime/metrics.py: steps, padding, requests and drafts are counted, and snapshots share nothing with the counters."""

from npucompile.graphs.types import Bucket
from npucompile.runtime.metrics import Metrics
from npucompile.runtime.request import FINISH_REASONS


def test_counts_and_shares_nothing():
    metrics = Metrics()
    metrics.count_step(Bucket("decode", 4, 1), 3)
    metrics.count_step(Bucket("decode", 4, 1), 4)
    metrics.count_step(Bucket("prefill", 1, 32), 1)
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


def test_padding_of_all_groups_is_counted():
    metrics = Metrics()
    metrics.count_step(Bucket("decode", 4, 1), 5, groups=3)
    assert (metrics.snapshot()["padded_rows_total"], metrics.snapshot()["steps_total"]) == (7, 1)


def speculation(metrics):
    return {name.removeprefix("spec_decode_num_"): value for name, value in metrics.snapshot().items() if name.startswith("spec_decode")}


def test_drafts_are_counted_by_place():
    metrics = Metrics(drafts=3)
    for drafted, accepted in ((3, 3), (3, 0), (2, 1), (0, 0)):
        metrics.count_verified(drafted, accepted)
    assert speculation(metrics) == {
        "drafts_total": 3,
        "draft_tokens_total": 8,
        "accepted_tokens_total": 4,
        "accepted_tokens_per_pos": {"0": 2, "1": 1, "2": 1},
    }
    metrics.snapshot()["spec_decode_num_accepted_tokens_per_pos"]["0"] = 99
    assert speculation(metrics)["accepted_tokens_per_pos"]["0"] == 2


def test_without_drafts_there_are_no_places():
    assert speculation(Metrics()) == {
        "drafts_total": 0,
        "draft_tokens_total": 0,
        "accepted_tokens_total": 0,
        "accepted_tokens_per_pos": {},
    }
