"""tools/launch_lines/imported.py: published scripts come in with every flag and variable accounted for, and the commands are legal."""

from __future__ import annotations

import functools
import json
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.graphs.errors import LoweringError, SpecError
from npucompile.runtime.executor import check_serving
from npucompile.tools.builder import plan as planning
from npucompile.tools.commands import build, serve
from npucompile.tools.launch_lines.imported import Imported, import_text
from npucompile.tools.launch_lines.proposal import options_of
from npucompile.tools.launch_lines.tables import variables
from npucompile.tools.launch_lines.verdicts import STATUSES

CORPUS = json.loads(Path(__file__).with_name("corpus.json").read_text())
"""Launch scripts of the public guides of SGLang and vllm-ascend, without comments and lines that launch nothing; each with its source."""

STARTS = re.compile(r"sglang\.launch_server|sglang serve|sglang_router\.launch_router|vllm serve|vllm\.entrypoints\.openai\.api_server")


read_entry = functools.cache(import_text)


def flags_by_shlex(text: str) -> set[str]:
    """Names of the flags of launch commands, by Python's own lexer of shells; {} for a command that it cannot read."""
    joined = re.sub(r"\\[ \t]*(#[^\n]*)?\n", " ", text)
    names: set[str] = set()
    for line in joined.splitlines():
        if not STARTS.search(line) or line.lstrip().startswith("#") or re.search(r"bash -c|pgrep", line):
            continue
        try:
            words = shlex.split(STARTS.split(line, maxsplit=1)[1].split(" 2>&1")[0], comments=True)
        except ValueError:
            continue
        names |= {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word) and " " not in word}
    return names


def legal(imported: Imported) -> int:
    """Parses every command by the command itself, and asks the server whether it takes the build; the number of builds that are planned."""
    planned = 0
    for role in [*imported.roles, *(role.instead for role in imported.roles if role.instead)]:
        if role.proposal is None:
            continue
        words = shlex.split(role.build)
        assert words[:2] == ["npucompile", "build"]
        params = build.command.make_context("build", words[2:]).params
        if role.proposal.plan is not None:
            options = planning.Options(**{name: params[name] for name in planning.Options.__dataclass_fields__})
            assert options == options_of(role.proposal)
            planned += 1
            if role.serve:
                check_serving(role.proposal.plan.buckets, {})
            else:
                with pytest.raises(LoweringError, match="serving needs at least one"):
                    check_serving(role.proposal.plan.buckets, {})
        if role.instead:
            assert not role.serve
            assert role.serve not in imported.commands
            assert {role.instead.build, role.instead.serve} <= set(imported.commands)
            continue
        served = shlex.split(role.serve)
        given = served[served.index("serve") + 1 :]
        for option in ("--checkpoint", "--chat-template"):
            # Those must exist, which is another machine's.
            if option in given:
                del given[given.index(option) : given.index(option) + 2]
        serve.command.make_context("serve", given)
    return planned


@pytest.mark.parametrize("entry", CORPUS, ids=range(len(CORPUS)))
def test_published_scripts_leave_no_flag_unmentioned(entry):
    imported = read_entry(entry["text"])
    plain = imported.as_dict()
    assert {finding["status"] for finding in plain["flags"]} <= set(STATUSES)
    assert all(finding["why"] and finding["name"] for finding in plain["flags"])
    given = {finding["given"].split()[0].partition("=")[0] for finding in plain["flags"] if finding["kind"] == "flag"}
    assert flags_by_shlex(entry["text"]) <= given
    exported = set(re.findall(r"^\s*export ([A-Z][A-Z0-9_]+)=", entry["text"], flags=re.MULTILINE)) & set(variables())
    unset = set(re.findall(r"unset ([A-Z_]+)", entry["text"]))
    if len(imported.roles) == 1:
        assert exported - unset <= {finding["name"] for finding in plain["flags"] if finding["kind"] == "variable"}
    rows = {f"{role['deployment']}/{role['name']}" for role in plain["roles"] if role.get("deployment")}
    assert rows == set(entry["deployments"])
    legal(imported)


def test_no_published_flag_is_unknown_unless_it_is_misspelt():
    unknown = {
        finding.name
        for entry in CORPUS
        for finding in read_entry(entry["text"]).findings
        if finding.kind == "flag" and "has no flag" in finding.why
    }
    assert unknown <= {"--num-gpus", "--disaggregation-enable-decode-radix-cache"}


SCRIPT = """
export HCCL_BUFFSIZE=400 SGLANG_NPU_USE_MLAPO=1 HCCL_SOCKET_IFNAME=eth0 SGLANG_NPU_USE_MLAPOO=1 MY_OWN=1
MODEL=/models/DeepSeek-R1-W8A8
if [ $ROLE = prefill ]; then
  export TASK_QUEUE_ENABLE=2
  python -m sglang.launch_server --model-path $MODEL --disaggregation-mode prefill --tp-size 16 --nnodes 1 --quantization modelslim
fi
python -m sglang.launch_server --model $MODEL --disaggregation-mode decode --tp-size 32 --nnodes 2 --node-rank 0 --dist-init-addr h:5000
python -m sglang.launch_server --model $MODEL --disaggregation-mode decode --tp-size 32 --nnodes 2 --node-rank 1 --dist-init-addr h:5000
python -m sglang_router.launch_router --pd-disaggregation --prefill http://p:8000 8998 --decode http://d:8001 --polcy cache_aware
"""


def test_a_script_of_several_servers_has_a_role_for_each():
    imported = import_text(SCRIPT)
    assert [(role.name, role.lines) for role in imported.roles] == [("prefill", (6,)), ("decode", (8, 9)), ("router", (10,))]
    prefill, decode, router = imported.roles
    assert "TASK_QUEUE_ENABLE" in {finding.name for finding in prefill.findings}
    assert "TASK_QUEUE_ENABLE" not in {finding.name for finding in decode.findings}
    assert decode.serve.startswith(
        "HCCL_SOCKET_IFNAME=eth0 torchrun --nnodes 2 --nproc-per-node 16 --master-addr h -m npucompile.tools.cli serve"
    )
    assert len({role.build for role in imported.roles[:2]}) == 2
    assert "--out" in prefill.build
    assert {finding.status for finding in router.findings if finding.kind == "flag"} == {"refused"}
    assert {finding.status for finding in router.findings if finding.name.startswith("HCCL")} == {"unnecessary"}
    assert next(f.why for f in router.findings if f.name == "--polcy") == "router has no flag --polcy; the nearest is --policy"
    assert (router.build, router.serve) == ("", "")
    assert imported.as_dict()["command"].splitlines() == imported.commands


def test_variables_are_carried_unnecessary_or_misspelt():
    findings = {finding.name: finding for finding in import_text(SCRIPT).roles[0].findings if finding.kind == "variable"}
    assert (findings["HCCL_SOCKET_IFNAME"].status, findings["HCCL_BUFFSIZE"].status) == ("carried", "unnecessary")
    assert findings["SGLANG_NPU_USE_MLAPOO"].status == "refused"
    assert "the nearest is SGLANG_NPU_USE_MLAPO" in findings["SGLANG_NPU_USE_MLAPOO"].why
    assert findings["MODEL"].why == "a variable of the script; its value stands in the flags that use it"
    assert findings["MY_OWN"].status == "unnecessary"


def test_the_last_of_a_repeated_flag_counts():
    imported = import_text("sglang serve m --port 1 --host a --port 2")
    assert [(f.given, f.status) for f in imported.findings if f.name == "--port"] == [("--port 1", "unnecessary"), ("--port 2", "carried")]
    assert imported.roles[0].serve == "npucompile serve m --host a --port 2"


def test_pieces_of_json_are_read_together():
    one = "vllm serve qwen3.5-397b --max-num-seqs 8 --speculative-config.method mtp --speculative-config.num_speculative_tokens 2"
    other = """vllm serve qwen3.5-397b --max-num-seqs 8 --speculative-config '{"method": "mtp", "num_speculative_tokens": 2}'"""
    assert import_text(one).roles[0].build == import_text(other).roles[0].build
    assert "--speculative-tokens 2" in import_text(one).roles[0].build


def test_what_launches_nothing_is_refused():
    with pytest.raises(SpecError, match=r"no launch of a server in it; legal is `python -m sglang"):
        import_text("echo vllm")


FLAGS = [
    "--tp-size 4",
    "--max-running-requests 32",
    "--cuda-graph-bs 1 2 4",
    "--context-length 8192",
    "--port 9000",
    "--dtype bfloat16",
    "--trust-remote-code",
]


@settings(max_examples=6, deadline=None)
@given(st.permutations(FLAGS))
def test_the_order_of_flags_does_not_matter(flags):
    wanted, got = (import_text(f"sglang serve qwen3-32b {' '.join(order)}") for order in (FLAGS, flags))
    assert got.roles[0].build == wanted.roles[0].build
    assert sorted((f.name, f.status, f.why) for f in got.findings) == sorted((f.name, f.status, f.why) for f in wanted.findings)
    assert legal(got) == 1
