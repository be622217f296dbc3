"""tools/commands/device_options.py: every command that runs an artifact takes the same options, and they reach what loads it."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from support import tiny

from npucompile.lowering.device import KINDS
from npucompile.tools.commands import generate, serve
from npucompile.tools.commands.device_options import device_options
from npucompile.tools.ranks.executors import AUTO
from npucompile.tools.serve.options import DEVICES


@click.command()
@device_options
def command(device, checkpoint, off):
    click.echo(f"{device} {checkpoint!r} {' '.join(off)}")


def outcome(*arguments):
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_an_artifact_runs_where_it_was_built_for_unless_told_otherwise(tmp_path):
    assert set(DEVICES) == {AUTO, *KINDS}
    assert outcome() == (0, "auto None \n")
    arguments = ("--device", "emulated", "--checkpoint", tmp_path, "--off", "nz", "--off", "aiv")
    assert outcome(*arguments) == (0, f"emulated {Path(tmp_path)!r} nz aiv\n")


@pytest.mark.parametrize("arguments", [("--device", "tpu"), ("--checkpoint", "nowhere"), ("--checkpoint", __file__), ("--off", "na")])
def test_another_device_or_no_directory_is_refused(arguments):
    status, output = outcome(*arguments)
    assert status == 2
    assert f"Invalid value for '{arguments[0]}'" in output


@pytest.mark.parametrize(("module", "arguments"), [(serve, ["--port", 0]), (generate, ["--token-ids", "1"])])
def test_commands_pass_them_on(module, arguments, tmp_path, tiny_artifact, monkeypatch):
    received = []

    def settled(artifact, settings):
        received.append((artifact.path, settings.device, settings.checkpoint, settings.cache, settings.off))
        raise click.ClickException("enough")

    monkeypatch.setattr(module, "settled", settled)
    name = module.command.name
    options = ("--device", "emulated", "--checkpoint", tmp_path, "--off", "nz")
    assert tiny.cli(tmp_path, name, tiny_artifact, *arguments, *options).exit_code == 1
    assert received == [(tiny_artifact, "emulated", tmp_path, tmp_path / "cache", {"nz"})]
