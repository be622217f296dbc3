"""tools/build/settings/record.py: a record makes the option, and refuses what it cannot read by the option's name."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from npucompile.graphs.errors import SpecError
from npucompile.tools.build.settings import sizes
from npucompile.tools.build.settings.record import Setting


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


def test_help_is_the_record():
    command = click.command()(sizes.PREFILL.as_decorator()(lambda **options: None))
    assert "or the deployment's]" in " ".join(CliRunner().invoke(command, ["--help"]).stdout.split())
