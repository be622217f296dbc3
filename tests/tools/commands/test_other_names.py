"""tools/commands/other_names.py: names that mean the same are taken, others are refused with ours."""

from __future__ import annotations

import click
import pytest

from npucompile.graphs.errors import SpecError
from npucompile.tools.advisor.launch_lines.tables import engine
from npucompile.tools.builder.settings.table import SETTINGS
from npucompile.tools.commands import build, serve
from npucompile.tools.commands.other_names import MODEL, OTHERWISE, SAME
from npucompile.tools.serve.options import OPTIONS

COMMANDS = {"build": build.command, "serve": serve.command}


def parsed(command: str, *words: str) -> dict[str, object]:
    return COMMANDS[command].make_context(command, list(words)).params


def test_names_are_those_of_the_engines_and_options_are_ours():
    theirs = {*engine("sglang").flags, *engine("vllm").flags, "--num-speculative-tokens"}
    for command, names in SAME.items():
        ours = {name for option in COMMANDS[command].params for name in option.opts}
        assert set(names) <= theirs
        assert set(names.values()) - {MODEL} <= ours
        assert not {*names, *OTHERWISE[command]} & ours - {"--expert-map", "--language-model-only", "--max-num-seqs", "--prefill"}
        gone = {"--stream-interval-ms"}
        assert set(OTHERWISE[command]) <= gone | theirs | {f"--{record.option}" for record in (*SETTINGS, *OPTIONS)}


def test_the_same_is_built_by_either_name():
    ours = parsed("build", "m", "--max-model-len", "128", "--buckets", "1,2,4", "--speculative-tokens", "2", "--mesh", "dp=1,tp=2")
    words = "--model-path m --context-length=128 --cuda-graph-bs 1 2 4 --speculative-num-steps 2 --tp-size 2"
    theirs = parsed("build", *words.split())
    assert theirs == ours
    assert parsed("build", "m", "--data-parallel-size", "4")["mesh"] == "dp=4,tp=1"
    assert parsed("serve", "m", "--max-queued-requests", "3", "--watchdog-timeout", "9") == parsed(
        "serve", "m", "--max-queue", "3", "--step-timeout", "9"
    )


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("build", ["m", "--tp-size", "16", "--dp-size", "4"], r"dp=4,tp=16 where vLLM means it, --mesh dp=4,tp=4 where SGLang does"),
        ("build", ["m", "--tp-size", "4", "--mesh", "tp=4"], r"--mesh is given beside tp 4 and dp 1 by other names"),
        ("build", ["m", "--tp-size", "x"], r"tp is 'x' and dp is '1'; legal are whole numbers"),
        ("build", ["m", "--mem-fraction-static", "0.8"], r"--mem-fraction-static: memory is planned in bytes.*--max-total-tokens"),
        ("build", ["m", "--max-running-requests", "8"], r"it counts all dp groups; legal is --max-num-seqs"),
        ("build", ["m", "--enable-lora"], r"--enable-lora is a flag of SGLang or vLLM: adapters are not served.*npucompile import"),
        ("build", ["m", "--async-scheduling"], r"--async-scheduling is a flag of SGLang or vLLM"),
        ("serve", ["m", "--buckets", "8"], r"the build decides it; legal is an option of `npucompile build`: --buckets"),
        ("serve", ["m", "--max-running-requests", "8"], r"the build decides it; it counts all dp groups; legal is --max-num-seqs"),
        ("serve", ["m", "--stream-interval-ms", "8"], r"--stream-interval-ms: it is gone, tokens of each step are sent at once"),
        ("serve", ["m", "--max-model-len", "8"], r"the build decides it; legal is an option of `npucompile build`: --max-model-len"),
    ],
)
def test_what_means_something_else_is_refused_with_what_is_legal(command, words, message):
    with pytest.raises(SpecError, match=message):
        parsed(command, *words)


def test_a_name_that_nobody_has_is_a_mistake_as_ever():
    with pytest.raises(click.NoSuchOption):
        parsed("build", "m", "--no-such-thing")
