"""tools/advisor/launch_lines/imported.py: published scripts come in with every flag and variable, and the commands are legal."""

from __future__ import annotations

import functools
import json
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.launch_lines import parsed

from npucompile.graphs.errors import SpecError
from npucompile.tools.advisor.launch_lines.imported import NOWHERE, Imported, import_text
from npucompile.tools.advisor.launch_lines.launches import LAYERWISE
from npucompile.tools.advisor.launch_lines.proposal import options_of
from npucompile.tools.advisor.launch_lines.tables import variables
from npucompile.tools.advisor.launch_lines.verdicts import STATUSES
from npucompile.tools.serve.lines import PAIRS_ITSELF, TOKEN

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
    for role in imported.roles:
        if role.proposal is None:
            continue
        words = shlex.split(role.build)
        assert words[:2] == ["npucompile", "build"]
        options = tiny.options_of(words[2:])
        if role.proposal.plan is not None:
            assert options == options_of(role.proposal)
            planned += 1
            kinds = {bucket.kind for bucket in role.proposal.plan.buckets}
            assert kinds >= ({"prefill", "decode"} if role.name == "mixed" else {role.name})
        assert set(role.serve.splitlines()) <= set(imported.commands)
        assert sum(len(server.machines) for server in role.servers) == len(role.serve.splitlines())
        for line in role.serve.splitlines():
            parsed(line)
    return planned


@pytest.mark.parametrize(
    "entry", [pytest.param(entry, id=str(number), marks=pytest.mark.long if number % 2 else ()) for number, entry in enumerate(CORPUS)]
)
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
    misspelt = {finding.name for finding in imported.findings if finding.kind == "flag" and "has no flag" in finding.why}
    assert misspelt <= {"--num-gpus", "--disaggregation-enable-decode-radix-cache"}


SCRIPT = """
export HCCL_BUFFSIZE=400 SGLANG_NPU_USE_MLAPO=1 HCCL_SOCKET_IFNAME=eth0 HCCL_SOCKET_IFNAM=eth0 MY_OWN=1
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
    place = shlex.split(decode.build)[-1]
    for rank, line in enumerate(decode.serve.splitlines()):
        assert line == (
            f"HCCL_SOCKET_IFNAME=eth0 npucompile serve {place} --role decode --prefill http://p:8000 --checkpoint "
            f"/models/DeepSeek-R1-W8A8 --port 30000 --nnodes 2 --node-rank {rank} --master-addr h:5000"
        )
    assert len({role.build for role in imported.roles[:2]}) == 2
    assert "--out" in prefill.build
    assert {finding.status for finding in router.findings if finding.name in ("--prefill", "--decode")} == {"unnecessary"}
    assert {f.status for f in router.findings if f.name in ("HCCL_BUFFSIZE", "HCCL_SOCKET_IFNAME")} == {"unnecessary"}
    assert next(f.status for f in router.findings if f.name == "--polcy") == "unnecessary"
    assert (router.build, router.serve, imported.commands[-1]) == ("", "", router.routes[0])
    line = "python -m sglang_router.launch_router --pd-disaggregation --prefill http://p:8000 8000 --decode http://d:8001"
    assert router.routes[0].startswith(line)
    assert imported.as_dict()["command"].splitlines() == imported.commands
    assert imported.notes == [TOKEN]


def test_variables_are_carried_unnecessary_or_misspelt():
    findings = {finding.name: finding for finding in import_text(SCRIPT).roles[0].findings if finding.kind == "variable"}
    assert (findings["HCCL_SOCKET_IFNAME"].status, findings["HCCL_BUFFSIZE"].status) == ("carried", "unnecessary")
    assert findings["HCCL_SOCKET_IFNAM"].status == "refused"
    assert "the nearest is HCCL_SOCKET_IFNAME" in findings["HCCL_SOCKET_IFNAM"].why
    unknown = import_text("VLLM_CHANGE_ANSWERS=1 vllm serve Qwen/Qwen3-32B").roles[0].findings
    assert next(finding.status for finding in unknown if finding.kind == "variable") == "refused"
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


PAIR = """
vllm serve qwen3.5-397b -tp 2 -dp 8 --max-num-seqs 8 --max-model-len 4096 --host 10.0.0.1 --port 30050 --kv-transfer-config
'{"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer", "kv_port": "23010", "engine_id": "0"}'
export VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=480
for start in 0 8; do
vllm serve qwen3.5-397b -tp 2 -dp 16 -dpl 8 -dpr $start -dpa 10.0.0.2 -dpp 6884 --max-num-seqs 8 --max-model-len 4096 --host 0.0.0.0 \\
  --port 9 --kv-transfer-config '{"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_consumer", "kv_port": "36010", "engine_id": "1"}'
done
PROXY
""".replace("--kv-transfer-config\n'", "--kv-transfer-config '")


@pytest.mark.parametrize("out", [None, "there"])
def test_a_pair_of_vllm_is_two_builds_and_a_line_a_machine(out):
    proxy = "python load_balance_proxy_server_example.py --port 8000 --prefiller-hosts 10.0.0.1 --decoder-hosts 10.0.0.2"
    imported = import_text(PAIR.replace("PROXY", proxy), out=out)
    places = ["there-prefill", "there-decode"] if out else ["qwen3.5-397b-prefill-2", "qwen3.5-397b-decode-5"]
    built = [shlex.split(line) for line in imported.commands[:2]]
    assert [words[words.index("--out") + 1] for words in built] == places
    assert imported.commands[2:] == [
        f"npucompile serve {places[0]} --role prefill --host 10.0.0.1 --port 30050 --transfer-port 23010",
        *(
            f"npucompile serve {places[1]} --role decode --prefill http://10.0.0.1:30050 --host 0.0.0.0 --port 9 --transfer-port 36010 "
            f"--handover-timeout 480 --nnodes 2 --node-rank {rank} --master-addr 10.0.0.2:6884"
            for rank in (0, 1)
        ),
        proxy,
    ]
    assert imported.notes == [TOKEN]
    layerwise = import_text(PAIR.replace("PROXY", proxy.replace("proxy", "proxy_layerwise")))
    assert [role.routes for role in layerwise.roles] == [()] * 3
    assert layerwise.notes == [TOKEN, LAYERWISE]
    assert import_text(PAIR.replace("PROXY", "")).notes == [PAIRS_ITSELF, TOKEN]


def test_both_phases_of_a_deployment_are_one_build():
    (entry,) = (
        each for each in CORPUS if set(each["deployments"]) == {f"dsr1-a3x32-pd-3.5k-1.5k-50ms/{name}" for name in ("prefill", "decode")}
    )
    commands = import_text(entry["text"]).commands
    assert commands[0] == "npucompile build deepseek-r1 --deployment dsr1-a3x32-pd-3.5k-1.5k-50ms --dtype bfloat16"
    first, second, *decode = map(parsed, commands[1:])
    assert [each["host"] for each in (first, second, *decode)] == [
        f"your {name} ip{number}" for name in ("prefill", "decode") for number in (1, 2)
    ]
    named = import_text(entry["text"], out="there").commands
    assert named[0] == f"{commands[0]} --out there"
    assert [next(word for word in shlex.split(line) if "there" in word) for line in named[1:]] == [
        *["there-prefill"] * 2,
        *["there-decode"] * 2,
    ]


def test_lines_that_name_one_checkpoint_are_of_one_model():
    (entry,) = (each for each in CORPUS if each["deployments"] == ["dsr1-a3x32-pd-6k-1.6k-20ms/prefill"])
    prefill, decode = import_text(entry["text"]).roles
    assert decode.proposal.model == prefill.proposal.model == "deepseek-r1"
    assert decode.proposal.deployment is None
    assert decode.proposal.arguments["quantization"] == "w8a8"
    assert decode.proposal.planned


def test_a_process_of_vllm_for_each_group_is_one_server():
    text = "for i in 0 1 2 3; do vllm serve qwen3-32b -tp 2 -dp 4 -dpn $i --max-num-seqs 4 --max-model-len 4096; done"
    (role,) = import_text(text).roles
    assert role.serve == "npucompile serve qwen3-32b"


def test_a_prefill_server_that_no_other_machine_reaches_is_said():
    proxy = import_text(PAIR.replace("PROXY", "").replace("--host 10.0.0.1 ", ""))
    (decode,) = (role for role in proxy.roles if role.name == "decode")
    assert decode.servers[0].prefill == ("http://PREFILL:30050",)
    assert NOWHERE in decode.proposal.assumed
    (known,) = (role for role in import_text(PAIR.replace("PROXY", "")).roles if role.name == "decode")
    assert NOWHERE not in known.proposal.assumed
