"""tools/advisor/launch_lines/report.py: a table of flags by what becomes of them, each reason once."""

from __future__ import annotations

from support.launch_lines import LINE

from npucompile.tools.advisor.launch_lines.imported import import_text
from npucompile.tools.advisor.launch_lines.report import report


def said(text: str) -> str:
    return "\n".join(report(import_text(text)))


def test_every_flag_stands_in_the_table_under_what_becomes_of_it():
    text = said(LINE)
    headings = ["mapped: the same meaning, said otherwise", "refused"]
    assert [text.index(f"  {heading}\n") for heading in headings] == sorted(text.index(f"  {heading}\n") for heading in headings)
    for flag in ("--tp-size 4", "--quantization modelslim", "--max-running-requests 16", "--context-length 8192", "--enable-lroa"):
        assert text.count(f"    {flag} ") == 1
    assert "the nearest is --enable-lora" in text
    assert "assumed: target ascend-a3" in text
    assert text.rstrip().endswith("npucompile serve qwen3-32b --checkpoint /models/Qwen3-32B-w8a8 --port 30000")


def test_what_is_true_of_several_flags_is_said_once():
    flags = ["--enable-lora", "--lora-paths a", "--max-loras-per-batch 3", "--enable-eplb", "--eplb-algorithm auto"]
    text = said(f"{LINE} {' '.join(flags)}")
    assert text.count("adapters are not served") == 1
    assert text.count("experts stay on the ranks") == 1
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("    --enable-lora "))
    assert [line.split("  ")[2] for line in lines[at : at + 3]] == flags[:3]
    script = "\n".join(f"vllm serve qwen3-8b --tensor-parallel-size 2 --port {port}" for port in (8000, 8001))
    assumed = [line for line in said(script).splitlines() if line.startswith("  assumed: ")]
    assert len(assumed) == len(set(assumed)) > 0


def test_a_published_deployment_is_named():
    text = (
        "sglang serve DeepSeek-V3.2-w8a8 --tp-size 32 --dp-size 8 --enable-dp-attention --nnodes 2 --disaggregation-mode decode "
        "--max-running-requests 32 --cuda-graph-bs 1 2 3 4 --quantization modelslim --speculative-algorithm NEXTN --speculative-num-steps 3"
    )
    assert "this is the published deployment dsv32-a3x32-pd-64k-1k-30ms (" in said(text)
