"""docs/kubernetes: manifests fit Kubernetes' schemas, and name options, paths, ports, metrics and objects that there are."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.engine import Engine
from npucompile.server.engine.lifecycle import Lifecycle
from npucompile.server.engine.service import ServedModel
from npucompile.server.pages import probes
from npucompile.server.pages.exposition import render_metrics
from npucompile.tools.commands import serve
from npucompile.tools.serve.options import TRANSFER_PORTS

FOLDER = Path(__file__).resolve().parents[1] / "docs/kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
PAGE = FOLDER.with_suffix(".md")
VERSION = kubernetes_validate.latest_version()
WORKLOADS = ("Deployment", "StatefulSet")
NPUS = "huawei.com/Ascend910"
PATHS = {route.path for route in probes.routes(Lifecycle(), lambda: 0)}

Object = dict[str, Any]


@functools.cache
def objects(file: Path) -> list[Object]:
    return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))


def of_kind(file: Path, *kinds: str) -> list[Object]:
    return [each for each in objects(file) if each["kind"] in kinds]


def servers(file: Path) -> Iterator[tuple[Object, Object, dict[str, Any]]]:
    """Workloads of our image: the object, its container, and what `serve` reads of the arguments."""
    for workload in of_kind(file, *WORKLOADS):
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        if container["image"].startswith("npucompile:"):
            command, *words = [re.sub(r"\$\(POD_IP\)", "10.0.0.1", word) for word in container["args"]]
            assert command == "serve"
            yield workload, container, serve.command.make_context("serve", words).params


def labels_of(workload: Object) -> dict[str, str]:
    return dict(workload["spec"]["template"]["metadata"]["labels"])


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_there_are_three_kinds_of_deployments_and_the_page_has_them() -> None:
    assert [file.stem for file in FILES] == ["one-server", "pair", "replicas"]
    assert all(f"kubernetes/{file.name}" in PAGE.read_text(encoding="utf-8") for file in FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_schemas_of_kubernetes_are_met(file: Path) -> None:
    for each in objects(file):
        kubernetes_validate.validate(each, VERSION, strict=True)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects(file)]
    assert len(set(names)) == len(names)


def test_a_field_that_there_is_not_is_caught() -> None:
    (service, *_) = objects(FILES[0])
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**service, "spec": {**service["spec"], "selectors": {}}}, VERSION, strict=True)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_servers_are_probed_and_reached_where_they_listen(file: Path) -> None:
    found = list(servers(file))
    assert found
    for workload, container, options in found:
        (port,) = container["ports"]
        assert (port["name"], port["containerPort"], options["host"]) == ("http", options["port"], "0.0.0.0")
        probed = {name: container[name]["httpGet"] for name in ("livenessProbe", "readinessProbe")}
        assert {each["port"] for each in probed.values()} == {"http"}
        assert (probed["livenessProbe"]["path"], probed["readinessProbe"]["path"]) == ("/health", "/ready")
        annotations = workload["spec"]["template"]["metadata"]["annotations"]
        assert annotations["prometheus.io/port"] == str(options["port"])
        assert {"/health", "/ready", annotations["prometheus.io/path"]} <= PATHS
        # Clients that use the name of a service send it as Host.
        for service in of_kind(file, "Service"):
            if selects(service["spec"]["selector"], labels_of(workload)):
                name = service["metadata"]["name"]
                own = f"{workload['metadata']['name']}-0.{name}" if service["spec"].get("clusterIP") == "None" else name
                assert own in options["allowed_host"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_servers_have_time_to_end_and_what_they_read(file: Path) -> None:
    for workload, container, options in servers(file):
        pod = workload["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] >= options["drain_notice"] + options["drain_timeout"] + 10
        # A readiness that fails within the notice takes a server out before it refuses.
        readiness = container["readinessProbe"]
        assert readiness["periodSeconds"] * readiness["failureThreshold"] < options["drain_notice"]
        resources = container["resources"]
        assert resources["requests"][NPUS] == resources["limits"][NPUS]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
        assert options["artifact_or_model"].startswith(f"{mounts['models']}/")
        assert str(options["api_key"]).startswith(f"{mounts['keys']}/")
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_objects_that_are_named_are_there(file: Path) -> None:
    assert of_kind(file, "Secret") == []
    accounts = {each["metadata"]["name"] for each in of_kind(file, "ServiceAccount")}
    for workload in of_kind(file, *WORKLOADS):
        assert selects(workload["spec"]["selector"]["matchLabels"], labels_of(workload))
        assert {workload["spec"]["template"]["spec"].get("serviceAccountName")} - {None} <= accounts
        if workload["kind"] == "StatefulSet":
            assert workload["spec"]["serviceName"] in {each["metadata"]["name"] for each in of_kind(file, "Service")}
    for service in of_kind(file, "Service"):
        assert any(selects(service["spec"]["selector"], labels_of(workload)) for workload in of_kind(file, *WORKLOADS))
    for scaler in of_kind(file, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in {(each["kind"], each["metadata"]["name"]) for each in of_kind(file, *WORKLOADS)}


def test_a_pair_finds_each_other_and_its_transfers_pass() -> None:
    file = FOLDER / "pair.yaml"
    by_role = {options["role"]: (workload, container, options) for workload, container, options in servers(file)}
    (prefill, container, computed), (_, _, asks) = by_role["prefill"], by_role["decode"]
    name = prefill["metadata"]["name"]
    assert asks["prefill"] == f"http://{name}-0.{prefill['spec']['serviceName']}:{computed['port']}"
    (policy,) = of_kind(file, "NetworkPolicy")
    ports = [port for rule in policy["spec"]["ingress"] for port in rule["ports"]]
    ranks = int(container["resources"]["limits"][NPUS])
    for _, _, options in by_role.values():
        first = options["transfer_port"]
        assert {"protocol": "TCP", "port": first, "endPort": first + TRANSFER_PORTS * ranks - 1} in ports
    assert all(selects(policy["spec"]["podSelector"]["matchLabels"], labels_of(workload)) for workload, _, _ in by_role.values())
    # Only the port of clients is open to others than the pair.
    open_to_all = [port for rule in policy["spec"]["ingress"] if "from" not in rule for port in rule["ports"]]
    assert open_to_all == [{"protocol": "TCP", "port": computed["port"]}]


def test_a_router_finds_the_replicas() -> None:
    file = FOLDER / "replicas.yaml"
    ((replica, _, options),) = servers(file)
    (router,) = (each for each in of_kind(file, "Deployment") if each is not replica)
    (container,) = router["spec"]["template"]["spec"]["containers"]
    said = dict(word.removeprefix("--").partition("=")[::2] for word in container["args"])
    assert said["selector"] == f"app={labels_of(replica)['app']}"
    assert said["service-discovery-port"] == str(options["port"])
    assert said["health-check-endpoint"] in PATHS


@pytest.fixture(scope="module")
def metrics(tiny_artifact: Path) -> set[str]:
    stats = {**Engine(CpuExecutor(Artifact.open(tiny_artifact)), refresh_every_s=None).stats(), "websocket_connections": 0}
    families = text_string_to_metric_families(render_metrics(stats, ServedModel("tiny", 64, 260)))
    return {sample.name for family in families for sample in family.samples}


def test_what_is_scaled_by_is_measured(metrics: set[str]) -> None:
    file = FOLDER / "replicas.yaml"
    ((rules,),) = ([yaml.safe_load(each["data"]["config.yaml"])["rules"]] for each in of_kind(file, "ConfigMap"))
    named = set(itertools.chain.from_iterable(re.findall(r"vllm:\w+|npucompile:\w+", str(rule)) for rule in rules))
    assert len(named) == 2
    assert named <= metrics
    (scaler,) = of_kind(file, "HorizontalPodAutoscaler")
    assert {each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"]} == {rule["name"]["as"] for rule in rules}
