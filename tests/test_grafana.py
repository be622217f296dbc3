"""docs/grafana/npucompile.json: every query parses, and names metrics and labels that a server really has."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import promql_parser as promql
import pytest
from prometheus_client.parser import text_string_to_metric_families

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.engine import Engine
from npucompile.runtime.kv_transfer.layout import instance_of
from npucompile.runtime.request import FinishEvent, Request
from npucompile.server.engine.service import ServedModel
from npucompile.server.fleet.decode_engine import DecodeEngine
from npucompile.server.fleet.prefill_hub import PrefillHub
from npucompile.server.pages.exposition import render_metrics

BOARD = json.loads((Path(__file__).resolve().parents[1] / "docs/grafana/npucompile.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds."""
GRAFANA = {"$__rate_interval": "5m"}
"""What Grafana writes into a query, besides variables in strings."""

Metrics = dict[str, set[str]]


@pytest.fixture(scope="module")
def metrics(tiny_artifact: Path) -> Metrics:
    """Labels by name of the samples of an engine that served a request, of a server of either role."""
    artifact = Artifact.open(tiny_artifact)
    engine = Engine(CpuExecutor(artifact), refresh_every_s=None)
    ends: list[FinishEvent] = []
    engine.submit(Request("a", (1, 2, 3), 8), lambda event: ends.append(event) if isinstance(event, FinishEvent) else None)
    deadline = time.monotonic() + 60
    while not ends and time.monotonic() < deadline:
        engine.step()
    pools: Any = SimpleNamespace(sessions=[])
    prefill = PrefillHub(engine, pools, instance_of(artifact.manifest))
    with contextlib.closing(DecodeEngine(engine, instance_of(artifact.manifest), pools, ["http://127.0.0.1:9"], {})) as decode:
        pair = {**prefill.stats(), **decode.stats(), "kv_transfer_failures": {"timeout": 1}}
    stats = {**engine.stats(), **pair, "websocket_connections": 0, "degraded_steps": {"decode-b1-q4": 1}}
    text = render_metrics(stats, ServedModel("tiny", 64, 260))
    found: Metrics = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def queries() -> Iterator[tuple[str, str]]:
    for panel in PANELS:
        yield from ((f"{panel['title']} {target['refId']}", target["expr"]) for target in panel["targets"])


def wrong(query: str, metrics: Metrics) -> list[str]:
    """What a query names that is not there."""
    for name, value in GRAFANA.items():
        query = query.replace(name, value)
    found: list[str] = []

    def see(expression: Any) -> None:
        if isinstance(expression, promql.VectorSelector):
            labels = {matcher.name for matcher in expression.matchers.matchers}
            if expression.name not in metrics:
                found.append(f"no metric {expression.name}")
            else:
                found.extend(f"{expression.name} has no label {label}" for label in sorted(labels - metrics[expression.name] - SCRAPED))
        elif isinstance(expression, promql.AggregateExpr) and expression.modifier:
            inside = re.findall(r"\b[a-z]+:\w+", str(expression.expr.prettify()))
            grouped = set(expression.modifier.labels) - SCRAPED
            found.extend(f"{name} has no label {label}" for name in inside if name in metrics for label in sorted(grouped - metrics[name]))
        for child in children(expression):
            see(child)

    see(promql.parse(query))
    return found


def children(expression: Any) -> list[Any]:
    """The expressions inside one."""
    found = [getattr(expression, name, None) for name in ("expr", "lhs", "rhs", "param", "vector_selector", "vs")]
    return [child for child in [*found, *getattr(expression, "args", [])] if isinstance(child, promql.Expr)]


@pytest.mark.parametrize(("title", "query"), list(queries()), ids=[title for title, _ in queries()])
def test_every_query_finds_what_it_names(title: str, query: str, metrics: Metrics) -> None:
    assert wrong(query, metrics) == []


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("sum(rate(vllm:no_such_total[5m]))", "no metric vllm:no_such_total"),
        ('1 / sum(vllm:num_requests_running{pod="a"})', "vllm:num_requests_running has no label pod"),
        ("sum by (reason) (rate(vllm:request_success_total[$__rate_interval]))", "vllm:request_success_total has no label reason"),
        ("histogram_quantile(0.5, sum by (le) (rate(vllm:nothing_bucket[5m])))", "no metric vllm:nothing_bucket"),
    ],
)
def test_a_wrong_query_is_caught(query: str, message: str, metrics: Metrics) -> None:
    assert wrong(query, metrics) == [message]


def test_the_dashboard_holds_together(metrics: Metrics) -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for variable in BOARD["templating"]["list"][1:]:
        metric, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
        assert label in metrics[metric] | SCRAPED
    used = set(re.findall(r"\$(\w+)", json.dumps(PANELS).replace("${datasource}", "$datasource"))) - {"__rate_interval"}
    assert used == {variable["name"] for variable in BOARD["templating"]["list"]}
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24


def test_every_histogram_is_shown(metrics: Metrics) -> None:
    shown = {name for _, query in queries() for name in re.findall(r"vllm:(\w+)_(?:bucket|sum)", query)}
    histograms = {name.removeprefix("vllm:").removesuffix("_bucket") for name in metrics if name.endswith("_bucket")}
    assert histograms - shown == {"request_inference_time_seconds", "request_params_max_tokens"}
