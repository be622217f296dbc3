"""tools/advisor/launch_lines/launches.py: every way to start a server is found, in whatever it is wrapped."""

from __future__ import annotations

import pytest

from npucompile.tools.advisor.launch_lines.launches import launches
from npucompile.tools.advisor.launch_lines.shell import read


@pytest.mark.parametrize(
    ("line", "engine", "words"),
    [
        ("python -m sglang.launch_server --model m", "sglang", ("--model", "m")),
        ("sglang serve m --tp 2", "sglang", ("m", "--tp", "2")),
        ("nohup python3 -X faulthandler -m sglang.launch_server --model m > log 2>&1 &", "sglang", ("--model", "m")),
        ("vllm serve m --port 1", "vllm", ("m", "--port", "1")),
        ("/usr/local/bin/vllm serve m", "vllm", ("m",)),
        ("python -m vllm.entrypoints.openai.api_server --model m", "vllm", ("--model", "m")),
        ("python -m vllm.entrypoints.cli.main serve m", "vllm", ("m",)),
        ("docker run -e A=1 --env B=2 --net host image vllm serve m", "vllm", ("m",)),
        ("docker run --rm image bash -c 'export A=1 B=2; vllm serve m --port 3'", "vllm", ("m", "--port", "3")),
        ("env A=1 B=2 vllm serve m", "vllm", ("m",)),
        ("A=1 B=2 numactl -m 0 sglang serve m", "sglang", ("m",)),
        ("python -m sglang_router.launch_router --prefill http://a 8998", "router", ("--prefill", "http://a", "8998")),
        ("python -m sglang.srt.disaggregation.mini_lb --port 1", "router", ("--port", "1")),
    ],
)
def test_a_launch_is_found(line, engine, words):
    (launch,) = launches(read(line))
    assert (launch.engine, launch.words) == (engine, words)
    if "A=1" in line:
        assert launch.variables["A"] == "1"
    if "B=2" in line:
        assert launch.variables["B"] == "2"


def test_what_only_names_an_engine_is_no_launch():
    text = (
        "pip install vllm vllm-router\npkill -f sglang\npgrep -f 'vllm serve'\npython -m sglang.bench_serving --model m\nvllm bench serve\n"
    )
    assert launches(read(text)) == []


def test_launches_come_in_order_with_their_lines():
    found = launches(read("vllm serve a\n\nif x; then\n  sglang serve b &\nfi\n"))
    assert [(launch.engine, launch.line) for launch in found] == [("vllm", 1), ("sglang", 4)]


@pytest.mark.parametrize(
    ("line", "start", "needless"),
    [
        ("python3 -m sglang_router.launch_router --mini-lb", ("python", "-m", "sglang_router.launch_router"), False),
        ("/usr/bin/smg launch --port 1", ("/usr/bin/smg", "launch"), False),
        ("vllm-router --policy round_robin", ("vllm-router",), False),
        ("python3 a/load_balance_proxy_server_example.py --port 1", ("python", "a/load_balance_proxy_server_example.py"), False),
        ("python toy_proxy_server.py --port 1", ("python", "toy_proxy_server.py"), False),
        ("python load_balance_proxy_layerwise_server_example.py --port 1", None, True),
    ],
)
def test_a_router_can_be_started_as_it_is(line, start, needless):
    (launch,) = launches(read(line))
    assert launch.engine == "router"
    assert start is None or launch.start == start
    assert bool(launch.needless) == needless
