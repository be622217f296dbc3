"""tools/launch_lines/size_rules.py: requests, tokens and batches."""

from __future__ import annotations

import pytest
from support.launch_lines import finding


@pytest.mark.parametrize(
    ("engine", "flags", "status", "why"),
    [
        ("vllm", "--max-model-len 8K", "carried", "--max-model-len 8192"),
        ("sglang", "--context-length 8200", "mapped", "--max-model-len 8192: a multiple of 128 tokens"),
        ("vllm", "--max-model-len 999999999", "mapped", "--max-model-len 262144"),
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


def test_sizes_of_captured_graphs_come_from_the_configuration():
    found = finding("vllm", """--compilation-config '{"cudagraph_capture_sizes": [1, 2, 16], "cudagraph_mode": "FULL_DECODE_ONLY"}'""")
    assert found.status == "mapped"
    assert found.why.startswith("cudagraph_capture_sizes: --buckets 1,2,16; cudagraph_mode: every bucket is one static graph")


def test_a_decode_server_prefills_nothing():
    assert finding("sglang", "--chunked-prefill-size 4096 --disaggregation-mode decode").status == "unnecessary"
    assert finding("sglang", "--cuda-graph-bs 1 2 --disaggregation-mode prefill").status == "unnecessary"
