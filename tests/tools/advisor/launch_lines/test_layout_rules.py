"""tools/advisor/launch_lines/layout_rules.py: devices, machines and parts of serving."""

from __future__ import annotations

import json

import pytest
from support.launch_lines import finding

from npucompile.tools.advisor.launch_lines.imported import import_text


@pytest.mark.parametrize(
    ("engine", "flags", "status", "why"),
    [
        ("sglang", "--enable-dp-attention --dp-size 4", "mapped", "--mesh dp=4,tp=4"),
        ("sglang", "--attn-dp-size 8", "mapped", "--mesh dp=8,tp=2"),
        ("sglang", "--dp-size 2", "mapped", "replicas are dp groups of one server"),
        ("vllm", "--data-parallel-size 2", "mapped", "--mesh dp=2,tp=16"),
        ("vllm", "-dp 2", "mapped", "--mesh dp=2,tp=16"),
        ("vllm", "--data-parallel-size-local 1 --nnodes 2", "mapped", "serve --nnodes 2 --node-rank I"),
        ("vllm", "--headless", "unnecessary", "rank 0 alone listens"),
        ("sglang", "--nnodes 1", "unnecessary", "a process for each NPU"),
        ("sglang", "--nnodes 4", "carried", "serve --nnodes 4"),
        ("sglang", "--node-rank 1 --nnodes 2", "carried", "serve --node-rank 1"),
        ("sglang", "--dist-init-addr 10.0.0.1:5000 --nnodes 2", "mapped", "serve --master-addr 10.0.0.1:5000"),
        ("vllm", "--data-parallel-rpc-port 13389 --nnodes 2", "mapped", "serve --master-addr HOST:13389"),
        ("vllm", "--data-parallel-address 10.0.0.1", "unnecessary", "the ranks of one machine need no address"),
        ("sglang", "--ep-size 16", "mapped", "whole experts are spread over all 16 ranks"),
        ("sglang", "--ep-size 4", "refused", "other groups are built for published deployments alone"),
        ("vllm", "--enable-expert-parallel", "mapped", "whole experts are spread over all 16 ranks"),
        ("sglang", "--attn-cp-size 16", "mapped", "--prefill-cp 16"),
        ("sglang", "--enable-dsa-prefill-context-parallel", "mapped", "--prefill-cp 16"),
        ("sglang", "--attn-cp-size 1", "unnecessary", "share the heads of attention"),
        ("sglang", "--attn-cp-size 4", "refused", "4 ranks of a group of 16 share a prompt; legal are 1 and 16"),
        ("sglang", "--dsa-prefill-cp-mode in-seq-split", "unnecessary", "one from either end"),
        ("sglang", "--dsa-prefill-cp-mode round-robin-split", "refused", "gives ranks single tokens"),
        ("sglang", "--device npu", "mapped", "--target ascend-a3"),
        ("sglang", "--device cuda", "refused", "legal are NPUs and CPUs; cuda is neither"),
        ("sglang", "--device xpu", "refused", "legal are NPUs and CPUs; xpu is neither"),
        ("sglang", "--base-gpu-id 2", "mapped", "ASCEND_RT_VISIBLE_DEVICES=2,3,4"),
        ("sglang", "--base-gpu-id 0", "unnecessary", "from the first"),
        ("vllm", "--device-ids 4,5", "mapped", "ASCEND_RT_VISIBLE_DEVICES=4,5"),
        ("sglang", "--pp-size 1", "unnecessary", "it asks for what is so here"),
        ("sglang", "--pp-size 2", "refused", "layers are not spread over ranks"),
        ("sglang", "--disaggregation-mode decode", "mapped", "serve --role decode --prefill URL"),
        ("sglang", "--disaggregation-transfer-backend nixl", "unnecessary", "moves nothing"),
        ("sglang", "--disaggregation-transfer-backend ascend --disaggregation-mode prefill", "mapped", "in place of ascend"),
        ("sglang", "--disaggregation-bootstrap-port 8998", "unnecessary", "ask a prefill server at its --port"),
        ("sglang", "--disaggregation-decode-enable-offload-kvcache", "refused", "stay on the NPUs"),
        ("vllm", "--data-parallel-start-rank 8", "unnecessary", "runs all dp groups"),
        ("vllm", "--kv-transfer-config []", "refused", "no JSON object"),
        ("sglang", "--disaggregation-mode null", "unnecessary", "a server prefills and decodes"),
        ("vllm", "--max-model-len 8K", "carried", "--max-model-len 8192"),
        ("sglang", "--context-length 8200", "mapped", "--max-model-len 8192: a multiple of 128 tokens"),
        ("vllm", "--max-model-len 999999999", "refused", "--max-model-len 262144 is built: qwen3.5-397b takes no more"),
        ("vllm", "--max-model-len -1", "mapped", "--max-model-len 262144: the model's own"),
        ("vllm", "--max-num-seqs 24", "carried", "--max-num-seqs 24"),
        ("sglang", "--max-running-requests 100 --dp-size 4 --enable-dp-attention", "mapped", "--max-num-seqs 25: 100 in all 4 dp groups"),
        ("sglang", "--max-total-tokens 16384", "carried", "--max-total-tokens 16384"),
        ("sglang", "--max-total-tokens 16400", "mapped", "--max-total-tokens 16512: pages of 128 tokens"),
        ("sglang", "--max-total-tokens 99999999", "unnecessary", "has room at full length"),
        ("sglang", "--max-total-tokens 128", "mapped", "--max-total-tokens 8192: a request at full length takes as many"),
        ("vllm", "--kv-cache-memory-bytes 12G", "mapped", "--kv-cache-memory 12884901888: KV pages alone"),
        ("vllm", "--num-gpu-blocks-override 1024 --block-size 128", "carried", "--max-total-tokens 131072"),
        ("vllm", "--num-gpu-blocks-override 4096", "refused", "does not say how many tokens a block has"),
        ("vllm", "--gpu-memory-utilization 0.9", "unnecessary", "--kv-cache-memory SIZE or --max-total-tokens of build bounds the cache"),
        ("sglang", "--mem-fraction-static 0.8 --max-total-tokens 16384", "unnecessary", "--max-total-tokens 16384 bounds the cache"),
        ("sglang", "--chunked-prefill-size 4096", "mapped", "--prefill 4096 (4096 tokens)"),
        ("sglang", "--chunked-prefill-size 8192 --dp-size 4 --enable-dp-attention", "mapped", "--prefill 2048 (8192 tokens in all 4"),
        ("sglang", "--chunked-prefill-size -1", "mapped", "whole prompts, which a static graph takes in equal chunks"),
        ("vllm", "--max-num-batched-tokens 4K", "mapped", "--prefill 4096"),
        ("vllm", "--enable-chunked-prefill", "unnecessary", "always taken in chunks"),
        ("vllm", "--no-enable-chunked-prefill", "refused", "are taken in chunks, with the same tokens"),
        ("sglang", "--page-size 128", "carried", "pages have 128 tokens"),
        ("vllm", "--block-size 16", "unnecessary", "not 16; no answer depends on it"),
        ("sglang", "--cuda-graph-bs 1 2 4 8", "mapped", "--buckets 1,2,4,8"),
        ("sglang", "--cuda-graph-max-bs 4", "mapped", "--buckets 1,2,4"),
        ("sglang", "--disable-cuda-graph-padding --cuda-graph-max-bs 5", "mapped", "--buckets 1,2,...,5"),
        ("vllm", "--cudagraph-capture-sizes 1 2 4", "mapped", "--buckets 1,2,4"),
        ("vllm", "--enforce-eager", "unnecessary", "graphs are static and proved"),
        ("vllm", "--compilation-config.mode 3", "unnecessary", "mode: graphs are compiled by the build"),
    ],
)  # fmt: skip
def test_what_becomes_of_a_flag(engine, flags, status, why):
    found = finding(engine, flags)
    assert found.status == status, found
    assert why in found.why


def test_connectors_are_refused_with_their_name():
    text = 'vllm serve qwen3-32b --tensor-parallel-size 16 --kv-transfer-config \'{"kv_connector": "AscendStore", "kv_role": "kv_both"}\''
    found = next(each for each in import_text(text).findings if each.name == "--kv-transfer-config")
    assert found.status == "refused"
    assert found.why.startswith("AscendStore: cached keys and values stay on the NPUs")


@pytest.mark.parametrize(
    ("name", "mode", "value", "status", "why"),
    [
        ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "decode", "600", "mapped", "serve --handover-timeout 600"),
        ("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "prefill", "12.5", "mapped", "serve --handover-timeout 12.5"),
        ("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "null", "600", "unnecessary", "waits for no other"),
        ("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "decode", "long", "refused", "'long' is no number of seconds"),
        ("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "decode", "0", "refused", "0 is no time to wait"),
        ("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "decode", "5", "unnecessary", "within bounds that are set for it"),
        ("ASCEND_TRANSFER_TIMEOUT", "decode", "9000", "carried", "set for serve"),
        ("MMC_LOCAL_CONFIG_PATH", "decode", "a", "refused", "stay on the NPUs"),
    ],
)
def test_variables_of_pairs(name, mode, value, status, why):
    imported = import_text(f"{name}={value} sglang serve qwen3-32b --tp-size 4 --max-running-requests 4 --disaggregation-mode {mode}")
    (found,) = (each for each in imported.findings if each.name == name)
    assert (found.status, why in found.why) == (status, True), found
    assert ("--handover-timeout" in imported.roles[0].serve) == (status == "mapped")


def test_of_several_connectors_those_that_keep_are_refused():
    connectors = [{"kv_connector": "MooncakeConnectorV1", "kv_port": "20001"}, {"kv_connector": "AscendStoreConnector"}]
    config = {"kv_connector": "MultiConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"connectors": connectors}}
    (role,) = import_text(f"vllm serve qwen3-32b -tp 4 --kv-transfer-config '{json.dumps(config)}'").roles
    found = next(each for each in role.findings if each.name == "--kv-transfer-config")
    assert found.status == "refused"
    assert found.why.startswith("AscendStoreConnector: cached keys and values stay on the NPUs")
    assert "serve --role prefill takes the place of the others" in found.why
    assert "--role prefill" in role.serve


def test_a_dense_model_has_no_experts_to_spread():
    found = next(
        f for f in import_text("vllm serve qwen3-32b -tp 16 --enable-expert-parallel").findings if f.name == "--enable-expert-parallel"
    )
    assert (found.status, found.why) == ("unnecessary", "the model has no experts")


def test_the_devices_are_set_for_serve():
    assert (
        import_text("sglang serve qwen3-32b --tp-size 2 --base-gpu-id 4")
        .roles[0]
        .serve.startswith("ASCEND_RT_VISIBLE_DEVICES=4,5 npucompile serve")
    )


def test_sizes_of_captured_graphs_come_from_the_configuration():
    found = finding("vllm", """--compilation-config '{"cudagraph_capture_sizes": [1, 2, 16], "cudagraph_mode": "FULL_DECODE_ONLY"}'""")
    assert found.status == "mapped"
    assert found.why.startswith("cudagraph_capture_sizes: --buckets 1,2,16; cudagraph_mode: every bucket is one static graph")


def test_a_decode_server_prefills_nothing():
    assert finding("sglang", "--chunked-prefill-size 4096 --disaggregation-mode decode").status == "unnecessary"
    assert finding("sglang", "--cuda-graph-bs 1 2 --disaggregation-mode prefill").status == "unnecessary"
