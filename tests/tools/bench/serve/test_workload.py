"""tools/bench/serve/workload.py: prompts of the lengths asked for, shared where they should be, the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.texts import byte_tokenizer, trained_tokenizer

from npucompile.graphs.errors import ModelError, SpecError
from npucompile.tools.bench.serve.workload import Vocabulary, drawn, read, shared_prefix, traced

BYTES = Vocabulary(byte_tokenizer())


def test_special_tokens_are_never_drawn() -> None:
    vocabulary = Vocabulary(trained_tokenizer())
    assert 0 not in vocabulary.ids  # <|end|>
    assert len(vocabulary.ids) == trained_tokenizer().get_vocab_size() - 1
    prompts = drawn(vocabulary, 20, 50, 4, 0.0, 1)
    assert set().union(*(prompt.token_ids for prompt in prompts)) <= set(vocabulary.ids)


def test_random_lengths_are_exact_or_within_the_ratio() -> None:
    prompts = drawn(BYTES, 5, 30, 7, 0.0, 1)
    assert [(len(prompt.token_ids), prompt.output_tokens) for prompt in prompts] == [(30, 7)] * 5
    assert prompts == drawn(BYTES, 5, 30, 7, 0.0, 1) != drawn(BYTES, 5, 30, 7, 0.0, 2)
    varied = drawn(BYTES, 400, 30, 10, 0.5, 1)
    assert {len(prompt.token_ids) for prompt in varied} == set(range(15, 46))
    assert {prompt.output_tokens for prompt in varied} == set(range(5, 16))
    with pytest.raises(SpecError, match="is 1; legal is from 0"):
        drawn(BYTES, 5, 30, 7, 1, 1)


def test_groups_share_their_prefix_and_nothing_else() -> None:
    prompts = shared_prefix(BYTES, groups=3, per_group=4, system_tokens=20, question_tokens=10, output_tokens=2, seed=5)
    assert {(len(prompt.token_ids), prompt.output_tokens) for prompt in prompts} == {(30, 2)}
    groups: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.token_ids[:20], set()).add(prompt.token_ids[20:])
    assert [len(questions) for questions in groups.values()] == [4, 4, 4]
    order = [prompt.token_ids[:20] for prompt in prompts]
    assert order != sorted(order, key=list(groups).index), "shuffled"


def write(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_a_trace_keeps_its_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    file = write(
        tmp_path / "trace.jsonl",
        {"timestamp": 4000, "input_length": 1030, "output_length": 3, "hash_ids": [1, 2, 3]},
        {"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [1, 9]},
        {"timestamp": 1500.5, "input_length": 40, "output_length": 7},
    )
    first, second, third = traced(BYTES, file, None, 0)
    assert [(prompt.at_s, len(prompt.token_ids), prompt.output_tokens) for prompt in (first, second, third)] == [
        (0.0, 600, 5),
        (0.5005, 40, 7),
        (3.0, 1030, 3),
    ]
    assert first.token_ids[:512] == third.token_ids[:512]
    assert first.token_ids[512:] != third.token_ids[512:600]
    assert len(traced(BYTES, file, 2, 0)) == 2


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "is not JSON"),
        ("[]", r"legal is an object with"),
        ('{"input_length": 4, "output_length": 1}', "timestamp is None"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "input_length is 0"),
        ('{"timestamp": 0, "input_length": 4, "output_length": true}', "output_length is True"),
        ('{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": ["a"]}', "hash_ids is"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, named: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 4, "output_length": 1}\n' + line + "\n")
    with pytest.raises(SpecError, match=f"trace.jsonl:2.*{named}"):
        traced(BYTES, file, None, 0)


def test_a_file_of_prompts_is_repeated_to_the_number_wanted(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    assert [prompt.text for prompt in read(BYTES, file, None, 4)] == ["one", "two"]
    three = read(BYTES, file, 3, 4)
    assert [prompt.text for prompt in three] == ["one", "two", "one"]
    assert (three[0].token_ids, three[0].output_tokens) == (BYTES.encode("one"), 4)


def test_empty_files_and_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty"
    file.write_text("\n")
    with pytest.raises(SpecError, match="has no prompt"):
        read(BYTES, file, None, 4)
    file.write_text("")
    with pytest.raises(SpecError, match="has no request"):
        traced(BYTES, file, None, 0)
    with pytest.raises(ModelError, match=r"is not a tokenizer\.json"):
        Vocabulary.load(file)
