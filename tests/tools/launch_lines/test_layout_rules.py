"""tools/launch_lines/layout_rules.py: devices, machines and parts of serving."""

from __future__ import annotations

import pytest
from support.launch_lines import finding

from npucompile.tools.launch_lines.imported import import_text


@pytest.mark.parametrize(
    ("engine", "flags", "status", "why"),
    [
        ("sglang", "--enable-dp-attention --dp-size 4", "mapped", "--mesh dp=4,tp=4"),
        ("sglang", "--attn-dp-size 8", "mapped", "--mesh dp=8,tp=2"),
        ("sglang", "--dp-size 2", "mapped", "replicas are dp groups of one server"),
        ("vllm", "--data-parallel-size 2", "mapped", "--mesh dp=2,tp=16"),
        ("vllm", "-dp 2", "mapped", "--mesh dp=2,tp=16"),
        ("vllm", "--data-parallel-size-local 1 --nnodes 2", "mapped", "torchrun --nnodes 2"),
        ("vllm", "--headless", "unnecessary", "rank 0 alone listens"),
        ("sglang", "--nnodes 1", "unnecessary", "a process for each NPU"),
        ("sglang", "--nnodes 4", "mapped", "torchrun --nnodes 4"),
        ("sglang", "--node-rank 1 --nnodes 2", "mapped", "torchrun --node-rank 1"),
        ("sglang", "--dist-init-addr 10.0.0.1:5000 --nnodes 2", "mapped", "torchrun --master-addr 10.0.0.1 --master-port 5000"),
        ("vllm", "--data-parallel-rpc-port 13389 --nnodes 2", "mapped", "torchrun --master-port 13389"),
        ("vllm", "--data-parallel-address 10.0.0.1", "unnecessary", "the ranks of one machine need no address"),
        ("sglang", "--ep-size 16", "mapped", "whole experts are spread over all 16 ranks"),
        ("sglang", "--ep-size 4", "refused", "other groups are built for published deployments alone"),
        ("vllm", "--enable-expert-parallel", "mapped", "whole experts are spread over all 16 ranks"),
        ("sglang", "--device npu", "mapped", "--target ascend-a3"),
        ("sglang", "--device cuda", "refused", "legal are NPUs and CPUs; cuda is neither"),
        ("sglang", "--device xpu", "refused", "legal are NPUs and CPUs; xpu is neither"),
        ("sglang", "--base-gpu-id 2", "mapped", "ASCEND_RT_VISIBLE_DEVICES=2,3,4"),
        ("sglang", "--base-gpu-id 0", "unnecessary", "from the first"),
        ("vllm", "--device-ids 4,5", "mapped", "ASCEND_RT_VISIBLE_DEVICES=4,5"),
        ("sglang", "--pp-size 1", "unnecessary", "it asks for what is so here"),
        ("sglang", "--pp-size 2", "refused", "layers are not spread over ranks"),
        ("sglang", "--disaggregation-mode decode", "refused", "no server hands keys and values to another"),
        ("sglang", "--disaggregation-mode null", "unnecessary", "a server prefills and decodes"),
    ],
)
def test_what_becomes_of_a_flag(engine, flags, status, why):
    found = finding(engine, flags)
    assert found.status == status, found
    assert why in found.why


def test_connectors_are_refused_with_their_name():
    text = 'vllm serve qwen3-32b --tensor-parallel-size 16 --kv-transfer-config \'{"kv_connector": "AscendStore", "kv_role": "kv_both"}\''
    found = next(each for each in import_text(text).findings if each.name == "--kv-transfer-config")
    assert found.status == "refused"
    assert found.why.startswith("AscendStore: cached keys and values stay on the NPUs")


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
