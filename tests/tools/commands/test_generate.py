"""tools/commands/generate.py: prompts as text or ids, from an artifact or a model, and refused options."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from support import ranks, tiny

from npucompile.graphs.errors import SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.request import Sampling
from npucompile.server.text.tokenizer import TextTokenizer
from npucompile.tools.commands.generate import parse_ids
from npucompile.tools.ranks.offline import complete

PROMPT = "in the"


@pytest.fixture(scope="module")
def expected(tiny_artifact):
    """What six tokens after the prompt are."""
    artifact = Artifact.open(tiny_artifact)
    codec = TextTokenizer.load(tiny_artifact / artifact.manifest.tokenizer)
    ids = codec.encode(PROMPT)
    (completion,) = complete(CpuExecutor(artifact), [ids], Sampling(), 6, frozenset())
    return ids, completion.token_ids, codec.decode(completion.token_ids)


def generated(tmp_path, *arguments):
    result = tiny.cli(tmp_path, "generate", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_says_all_there_is(tmp_path, tiny_artifact, expected):
    ids, tokens, text = expected
    answer = generated(tmp_path, tiny_artifact, "--prompt", PROMPT, "--max-tokens", 6)
    artifact = Artifact.open(tiny_artifact)
    record = answer.pop("record")
    steps, accepted = record["verify_steps"], record["accepted_per_position"]
    assert answer == {
        "text": text, "token_ids": list(tokens), "finish_reason": "length",
        "usage": {"prompt_tokens": len(ids), "completion_tokens": 6, "total_tokens": len(ids) + 6},
        "acceptance_length": 1 + sum(accepted) / steps, "acceptance_rates": [times / steps for times in accepted],
        "model": "tiny", "dtype": "f32", "artifact": artifact.digest,
        "backends": {entry.bucket.name: "eager" for entry in artifact.manifest.graphs},
    }  # fmt: skip
    assert record["prefill_chunks"] == ["prefill-b1-q16"]
    assert record["decode_steps"] == [["decode-b1-q4", steps]]
    assert (record["drafted_tokens"], len(accepted)) == (3 * steps, 3)
    # The last step may give more than is wanted of it.
    assert 6 <= 1 + steps + sum(accepted) < 6 + 4
    assert record["padded_rows"] == record["preemptions"] == 0


def test_plain_output_is_the_text_and_the_ids_stay_out_of_it(tmp_path, tiny_artifact, expected):
    _, tokens, text = expected
    result = tiny.cli(tmp_path, "generate", tiny_artifact, "--prompt", PROMPT, "--max-tokens", 6)
    assert result.stdout == text + "\n"
    assert result.stderr == f"token ids: {','.join(map(str, tokens))}\n"


def test_an_output_that_the_context_cuts_is_said_to_be(tmp_path, tiny_artifact, expected):
    room = Artifact.open(tiny_artifact).manifest.limits.max_model_len - len(expected[0])
    arguments = ("generate", tiny_artifact, "--prompt", PROMPT, "--ignore-eos", "--max-tokens")
    cut = tiny.cli(tmp_path, *arguments, room + 1)
    assert f"cut at {room} of --max-tokens {room + 1}: prompt and output fill the context" in cut.stderr
    assert tiny.cli(tmp_path, *arguments, room).stderr == cut.stderr.partition("\n")[2]


def test_the_end_of_text_ends_it_unless_it_is_ignored(own_artifact, tmp_path, expected):
    _, tokens, _ = expected
    tiny.published(own_artifact, lambda manifest, _: replace(manifest, model={**manifest.model, "eos_ids": [tokens[2]]}))
    arguments = ("tiny", "--prompt", PROMPT, "--max-tokens", 6)
    stopped = generated(tmp_path, *arguments)
    assert (stopped["token_ids"], stopped["finish_reason"]) == (list(tokens[: tokens.index(tokens[2])]), "stop")
    assert generated(tmp_path, *arguments, "--ignore-eos")["token_ids"] == list(tokens)


def test_sampling_options_reach_the_sampler(tmp_path, tiny_artifact, expected):
    hot = (tiny_artifact, "--prompt", PROMPT, "--max-tokens", 6, "--temperature", 50)
    _, tokens, _ = expected
    first = generated(tmp_path, *hot, "--seed", 1)["token_ids"]
    assert first == generated(tmp_path, *hot, "--seed", 1)["token_ids"]
    assert first != generated(tmp_path, *hot, "--seed", 2)["token_ids"]
    for narrow in (("--top-k", 1), ("--top-p", 1e-9), ("--min-p", 1)):
        assert generated(tmp_path, *hot, "--seed", 1, *narrow)["token_ids"] == list(tokens)


def test_drafts_can_be_left_out_and_change_no_token(tmp_path, tiny_artifact):
    request = (tiny_artifact, "--prompt", PROMPT, "--max-tokens", 24, "--ignore-eos")
    free, single, off = (generated(tmp_path, *request, *more) for more in ((), *(("--speculative-tokens", k) for k in (1, 0))))
    assert free["token_ids"] == single["token_ids"] == off["token_ids"]
    assert free["acceptance_length"] > 1
    assert free["acceptance_rates"][0] > 0
    assert single["acceptance_rates"][0] > single["acceptance_rates"][1] == 0
    assert (off["acceptance_length"], off["acceptance_rates"], off["record"]["decode_steps"]) == (1.0, [], [["decode-b1-q4", 23]])
    message = tiny.refused(tmp_path, "generate", *request, "--speculative-tokens", 4)
    assert "speculative_tokens is 4; legal is an integer from 0 to 3" in message


def test_log_probabilities_are_told_as_a_server_tells_them(tmp_path, tiny_artifact, expected):
    _, tokens, _ = expected
    request = (tiny_artifact, "--prompt", PROMPT, "--max-tokens", 6)
    answer = generated(tmp_path, *request, "--logprobs", 2)
    assert answer["token_ids"] == list(tokens)
    assert [entry["token_id"] for entry in answer["logprobs"]] == list(tokens)
    codec = TextTokenizer.load(tiny_artifact / Artifact.open(tiny_artifact).manifest.tokenizer)
    assert [(entry["token"], bytes(entry["bytes"])) for entry in answer["logprobs"]] == list(map(codec.token_text, tokens))
    for entry in answer["logprobs"]:
        best, next_best = entry["top_logprobs"]
        assert {**entry, "top_logprobs": None} == {**best, "top_logprobs": None}
        assert 0 > best["logprob"] >= next_best["logprob"]
    (chosen, *_) = generated(tmp_path, *request, "--logprobs", 0)["logprobs"]
    assert (chosen["logprob"], chosen["top_logprobs"]) == (answer["logprobs"][0]["logprob"], [])
    assert "logprobs" not in generated(tmp_path, *request)
    assert "--logprobs is printed with --json only" in tiny.refused(tmp_path, "generate", *request, "--logprobs", 2)
    assert "logprobs is 21; legal is an integer from 0 to 20" in tiny.refused(tmp_path, "generate", *request, "--json", "--logprobs", 21)


def test_a_model_is_traced_and_run_and_leaves_nothing(tmp_path, tiny_checkpoint, expected):
    _, tokens, _ = expected
    answer = generated(tmp_path, tiny_checkpoint, "--prompt", PROMPT, "--max-tokens", 6, "--dtype", "float32")
    assert answer["token_ids"] == list(tokens)
    assert set(answer["backends"].values()) == {"eager"}
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give exactly one of --prompt and --token-ids"),
        (("--prompt", "a", "--token-ids", "1"), "give exactly one of --prompt and --token-ids"),
        (("--token-ids", "1,260"), "prompt has token id 260; legal is an integer from 0 to 259"),
        (("--prompt", ""), "the prompt has 0 tokens; legal is 1 to 63"),
        (("--prompt", "x" * 64), "the prompt has 64 tokens; legal is 1 to 63 (max_model_len 64 less one token to generate)"),
        (("--prompt", "a", "--temperature", "-1"), "temperature is -1.0; legal is a number from 0.0 to 100.0"),
        (("--prompt", "a", "--top-p", "0"), "top_p is 0; legal is above 0"),
    ],
)
def test_refusals_name_what_is_legal(tmp_path, tiny_artifact, arguments, message):
    assert message in tiny.refused(tmp_path, "generate", tiny_artifact, *arguments)


def test_text_needs_a_tokenizer_and_ids_do_not(own_artifact, tmp_path):
    tiny.published(own_artifact, lambda manifest, _: replace(manifest, tokenizer=None))
    assert "tiny has no tokenizer, so no --prompt; legal is --token-ids" in tiny.refused(tmp_path, "generate", "tiny", "--prompt", "a")
    answer = generated(tmp_path, "tiny", "--token-ids", "1", "--max-tokens", 2)
    assert (answer["text"], len(answer["token_ids"])) == ("", 2)
    answer = generated(tmp_path, "tiny", "--token-ids", "1", "--max-tokens", 2, "--logprobs", 1)
    assert [(entry["token"], entry["token_id"]) for entry in answer["logprobs"]] == [("", token) for token in answer["token_ids"]]


@pytest.mark.parametrize("text", ["", ",", "1,", "-1", "1.0", "²", "0x1"])
def test_what_is_no_list_of_ids_is_refused(text):
    with pytest.raises(SpecError, match="non-negative integers"):
        parse_ids(text)


# --- several ranks ---

SHARDED = ("--token-ids", "1,2,3,4,5,6,7", "--max-tokens", 8, "--ignore-eos")


def test_an_artifact_for_npus_runs_on_an_emulated_device_and_with_another_copy_of_its_weights(tmp_path, npu_artifact):
    """The environment that it plans is set in this process, and is taken back after the test."""
    path = npu_artifact("")
    checkpoint = tiny.copied(Path(Artifact.open(path).manifest.build_arguments[0]), tmp_path / "copy")
    with mock.patch.dict(os.environ):
        emulated = ("--device", "emulated", "--token-ids", "1,2,3", "--max-tokens", 8, "--ignore-eos")
        stored, read = generated(tmp_path, path, *emulated), generated(tmp_path, path, *emulated, "--checkpoint", checkpoint)
    assert stored["token_ids"] == read["token_ids"]
    assert len(stored["token_ids"]) == 8
    assert stored["backends"] == {entry.bucket.name: "ge" for entry in Artifact.open(path).manifest.graphs}
    on_cpu = generated(tmp_path, checkpoint, *emulated[2:])
    assert stored["token_ids"] == on_cpu["token_ids"]


def test_ranks_that_it_starts_say_what_one_device_says(tmp_path, sharded):
    threads = torch.get_num_threads()
    try:
        alone, together = (generated(tmp_path, sharded(mesh), *SHARDED) for mesh in ("", "tp=2"))
    finally:
        torch.set_num_threads(threads)
    assert together["token_ids"] == alone["token_ids"]
    assert together["record"]["decode_steps"] == alone["record"]["decode_steps"]
    assert together["record"]["verify_steps"] > 0
    assert together["artifact"] == Artifact.open(sharded("tp=2")).digest


@pytest.mark.long
def test_ranks_of_torchrun_say_what_one_device_says_and_only_rank_0_speaks(tmp_path, sharded):
    alone = generated(tmp_path, sharded(""), *SHARDED)["token_ids"]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "npucompile.tools.cli"]
    process = ranks.spawn([*run, "generate", sharded("tp=2"), *SHARDED, "--json"], ranks.environment(tmp_path))
    status, out, message = ranks.finished(process)
    assert status == 0, message
    assert json.loads(out)["token_ids"] == alone
