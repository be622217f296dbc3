"""tools/launch_lines/serve_rules.py: how a server is started."""

from __future__ import annotations

import pytest
from support.launch_lines import finding

from npucompile.tools.launch_lines.imported import import_text


@pytest.mark.parametrize(
    ("engine", "flags", "status", "why"),
    [
        ("sglang", "--watchdog-timeout 9000", "carried", "serve --step-timeout 9000"),
        ("sglang", "--log-level debug", "mapped", "serve --verbose"),
        ("vllm", "--uvicorn-log-level warning", "unnecessary", "logs"),
        ("sglang", "--log-requests", "mapped", "serve --access-log"),
        ("vllm", "--no-enable-log-requests", "unnecessary", "only with --access-log"),
        ("sglang", "--api-key secret", "mapped", "NPUCOMPILE_API_KEY"),
        ("vllm", "--api-key a b", "refused", "serve --api-key FILE"),
        ("vllm", """--allowed-origins '["http://a"]'""", "mapped", "serve --allowed-origin"),
        ("vllm", """--allowed-origins '["*"]'""", "refused", "name each origin"),
        ("vllm", "--chat-template ./t.jinja", "carried", "serve --chat-template ./t.jinja"),
        ("sglang", "--chat-template qwen2-vl", "refused", "names a template of that engine"),
        ("vllm", "--enable-auto-tool-choice", "unnecessary", "always read"),
        ("vllm", "--max-logprobs 5", "carried", "--max-logprobs 5"),
        ("vllm", "--max-logprobs 50", "refused", "legal are 0 to 20"),
        ("vllm", "--tool-call-parser hermes", "carried", "serve --tool-call-parser hermes"),
        ("sglang", "--tool-call-parser qwen25", "mapped", "serve --tool-call-parser hermes"),
        ("sglang", "--tool-call-parser pythonic", "refused", "has nothing for pythonic"),
        ("sglang", "--sampling-defaults model", "mapped", "serve --default-sampling checkpoint"),
        ("vllm", "--otlp-traces-endpoint http://c:4318/v1/traces", "carried", "serve --otlp-traces-endpoint http://c:4318/v1/traces"),
        ("vllm", "--otlp-traces-endpoint http://c:4317", "refused", "http://c:4317 is a collector's gRPC"),
        ("sglang", "--enable-trace --otlp-traces-endpoint http://c:4318/v1/traces", "unnecessary", "serve sends spans"),
        ("sglang", "--enable-trace", "refused", "name the collector"),
        ("sglang", "--enable-response-store", "unnecessary", "--max-stored-bytes"),
        (
            "vllm",
            "--override-generation-config '{}'",
            "refused",
            "penalties included, are those of the checkpoint's generation_config",
        ),
        ("vllm", """--additional-config '{"enable_cpu_binding": true}'""", "unnecessary", "enable_cpu_binding: it binds processes"),
        ("vllm", """--additional-config '{"eplb_config": {"x": 1}}'""", "refused", "eplb_config: experts stay"),
        ("vllm", "--no-enable-prefix-caching", "mapped", "serve --no-prefix-cache"),
        ("sglang", "--disable-radix-cache", "mapped", "serve --no-prefix-cache"),
        ("vllm", "--enable-prefix-caching", "unnecessary", "prefixes are kept"),
    ],
)
def test_what_becomes_of_a_flag(engine, flags, status, why):
    found = finding(engine, flags)
    assert found.status == status, found
    assert why in found.why


def test_a_key_is_in_the_environment_and_not_on_the_command_line():
    serve = import_text("sglang serve m --api-key 'a b'").roles[0].serve
    assert serve == "NPUCOMPILE_API_KEY='a b' npucompile serve m --port 30000"


def test_several_names_are_each_served():
    serve = import_text("vllm serve m --served-model-name a b --port 1").roles[0].serve
    assert serve == "npucompile serve m --served-model-name a --served-model-name b --port 1"


def test_what_an_artifact_sets_itself_is_left_to_it():
    (role,) = import_text("HCCL_BUFFSIZE=200 GLOO_SOCKET_IFNAME=lo sglang serve m").roles
    assert "HCCL_BUFFSIZE" not in role.serve
    assert role.serve.startswith("GLOO_SOCKET_IFNAME=lo npucompile serve")
