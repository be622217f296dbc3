"""tools/advisor/launch_lines/serve_rules.py: how a server is started."""

from __future__ import annotations

import pytest
from support.launch_lines import finding

from npucompile.tools.advisor.launch_lines.imported import import_text


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
        ("vllm", "--tool-call-parser glm47 --reasoning-parser glm45", "carried", "serve --tool-call-parser glm47"),
        ("sglang", "--tool-call-parser minimax-m2", "mapped", "serve --tool-call-parser minimax_m2"),
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
        ("vllm", "--enable-prefix-caching", "mapped", "--checkpoint-slots 32: a model with recurrent states keeps a prefix only in"),
        ("sglang", "--max-mamba-cache-size 40", "mapped", "--checkpoint-slots 8: a model with recurrent states"),
        ("sglang", "--max-mamba-cache-size 32", "refused", "no prefix is kept: a model with recurrent states"),
        ("sglang", "--max-mamba-cache-size 40 --disable-radix-cache", "unnecessary", "a request has one recurrent state slot for each"),
        ("vllm", "--seed 1024", "unnecessary", "a request that brings `seed` has the same tokens every time"),
        ("sglang", "--random-seed 7", "unnecessary", "one that brings none draws a seed of its own"),
        ("sglang", "--skip-server-warmup", "unnecessary", "GE compiles graphs at the first start"),
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


@pytest.mark.parametrize("name", ["SGLANG_WARMUP_TIMEOUT", "VLLM_ENGINE_READY_TIMEOUT_S"])
def test_a_start_is_as_long_as_it_takes(name):
    found = next(each for each in import_text(f"{name}=600 sglang serve m").findings if each.name == name)
    assert (found.status, "no time limits a start: on NPUs GE compiles graphs at the first start" in found.why) == ("unnecessary", True)


@pytest.mark.parametrize(
    ("line", "slots"),
    [
        ("vllm serve qwen3.5-27b -tp 4 --max-num-seqs 8 --max-model-len 4096 --enable-prefix-caching", 8),
        # As many as are in flight by default, where the line says nothing of that.
        ("vllm serve qwen3.5-27b -tp 4 --max-model-len 4096 --enable-prefix-caching", 16),
        ("vllm serve qwen3.5-27b -tp 4 --max-num-seqs 8 --max-model-len 4096", 0),
        ("vllm serve qwen3-8b -tp 4 --max-num-seqs 8 --max-model-len 4096 --enable-prefix-caching", 0),
        ("sglang serve qwen3.5-27b --tp 4 --dp 2 --enable-dp-attention --max-running-requests 8 --max-mamba-cache-size 40", 16),
    ],
)
def test_what_is_said_of_prefixes_is_what_the_build_keeps(line, slots):
    (role,) = import_text(line).roles
    assert role.proposal.plan.limits.checkpoint_slots == slots
    kept = [each.why for each in role.findings if each.name in ("--enable-prefix-caching", "--max-mamba-cache-size")]
    assert all(why.startswith(f"--checkpoint-slots {slots}: " if slots else "prefixes are kept unless") for why in kept)


GLM = "vllm serve Eco-Tech/GLM-5.2-W8A8C8 --tensor-parallel-size 8 --max-num-seqs 4 --max-model-len 8192 --quantization ascend"


@pytest.mark.parametrize(
    ("switches", "dtype"),
    [
        ('"enable_sparse_li_c8": true, "c8_enable_reshape_optim": true', "int8-indexer"),
        ('"enable_sparse_c8": true', "int8-indexer"),
        ('"enable_sparse_li_c8": true, "enable_sparse_sfa_c8": true', "int8"),
        ('"enable_sparse_li_c8": false', "bfloat16"),
        ('"enable_cpu_binding": true', None),
        ('"enable_sparse_sfa_c8": true', None),
    ],
)
def test_switches_of_int8_caches_are_a_type_of_the_cache(switches, dtype):
    imported = import_text(f"{GLM} --additional-config '{{{switches}}}'")
    (role,) = imported.roles
    assert role.proposal.arguments.get("kv-cache-dtype") == dtype
    caches = role.proposal.plan.model.config.variant.formats.of_cache
    assert (caches("model.layers.0.self_attn") != "float") == (dtype == "int8")
    assert (caches("model.layers.0.self_attn.indexer") != "float") == (dtype in ("int8", "int8-indexer"))
    (found,) = (found for found in imported.findings if found.name == "--additional-config")
    wanted = "refused" if "sfa" in switches and dtype is None else "mapped" if dtype else "unnecessary"
    assert (found.status, f"--kv-cache-dtype {dtype}" in found.why) == (wanted, dtype is not None)


def test_a_model_without_an_indexer_ignores_the_switches():
    found = finding("vllm", """--additional-config '{"enable_sparse_li_c8": true}'""")
    assert (found.status, "the model has no indexer" in found.why) == ("unnecessary", True)
