"""tools/builder/settings/record.py: a record makes the option, and refuses what it cannot read by the option's name."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner

from npucompile.graphs.errors import SpecError
from npucompile.tools.builder import plan as planning
from npucompile.tools.builder.settings import model, sizes
from npucompile.tools.builder.settings.record import Setting


def parsed(setting: Setting, *words: str) -> object:
    return (
        click.Command("c", params=setting.as_decorator()(click.command()(lambda: None)).params)
        .make_context("c", list(words))
        .params[setting.name]
    )


def test_an_option_reads_what_its_setting_takes():
    small = Setting("small-number", "Help.", lambda plan: "", legal=(1, 3), read=int)
    assert parsed(small, "--small-number", "2") == 2
    assert parsed(small) is None
    with pytest.raises(click.BadParameter, match="1<=x<=3"):
        parsed(small, "--small-number", "4")
    named = Setting("kind", "Help.", lambda plan: "", field="which", legal=("a", "b"))
    assert (named.name, parsed(named, "--kind", "b")) == ("which", "b")
    assert parsed(sizes.KV_CACHE_MEMORY, "--kv-cache-memory", "2GiB") == 2**31
    assert parsed(sizes.BUCKETS, "--buckets", "auto:file") == "auto:file"
    with pytest.raises(SpecError, match="--buckets: buckets 'x'"):
        parsed(sizes.BUCKETS, "--buckets", "x")


@pytest.mark.parametrize(
    ("setting", "value", "legal"),
    [
        (model.DTYPE, "float64", "dtype is 'float64'; legal are auto, float32, bfloat16"),
        (model.SPECULATIVE_TOKENS, 8, "num_speculative_tokens is 8; legal are 0 to 7"),
        (model.LOGPROBS, -1, "max_logprobs is -1; legal are 0 to 20"),
        (sizes.MAX_MODEL_LEN, 0, "max_model_len is 0; legal are whole numbers from 1"),
    ],
)
def test_what_is_not_legal_is_refused_whoever_gives_it(setting, value, legal):
    with pytest.raises(SpecError, match=re.escape(legal)):
        planning.plan(planning.Options("qwen3.5-tiny", **{setting.name: value}))


def test_help_is_the_record():
    command = click.command()(sizes.PREFILL.as_decorator()(lambda **options: None))
    assert "or the deployment's]" in " ".join(CliRunner().invoke(command, ["--help"]).stdout.split())
