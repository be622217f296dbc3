"""`npucompile build`: plans and builds a model, unless its artifact is up to date."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ...models.directories import name_of
from ..advice import adviser
from ..builder import stamp
from ..builder.settings import model as model_settings
from ..builder.settings import place, sizes
from ..builder.settings.table import SETTINGS
from ..cli import Home
from ..hub import checkpoint_of
from ..notation import BUCKETS_HELP, PREFILL_HELP
from ..progress import Progress
from .config_file import config_file
from .option_groups import grouped
from .other_names import KnowsOtherNames

SHIPPED = "cache"
"""Folder of an artifact's compiled graphs, named apart from the module that it describes, which loads torch; a test compares both."""

ROOT = Path(__file__).resolve().parents[2]


GROUPS = {
    title: tuple(f"--{setting.option}" for setting in SETTINGS if any(setting is known for known in vars(file).values()))
    for title, file in (("Sizes", sizes), ("Where it runs", place), ("The model", model_settings))
}
"""Sections of `--help`, each the settings of one file."""


def setting_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of all settings."""
    for setting in reversed(SETTINGS):
        command = setting.as_decorator()(command)
    return command


@click.command("build", cls=grouped(GROUPS, KnowsOtherNames), epilog=f"{BUCKETS_HELP}\n\n{PREFILL_HELP}")
@click.argument("model")
@setting_options
@config_file(GROUPS)
@click.option("--out", type=click.Path(path_type=Path), help="Artifact directory.  [default: ~/.npucompile/artifacts/MODEL]")
@click.option(
    "--precompile", type=click.Choice(["auto", "none", "npu", "emulated"]), default="auto", show_default=True,
    help="Also compile the graphs on devices of this machine, so that no start does; auto where it has NPUs.",
)  # fmt: skip
@click.option("--decided-by", hidden=True, help="Who decided the settings, where a build is repeated by the arguments of its manifest.")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Graphs compiled at a time.")
@click.option("--nice", "--patience", "nice", type=click.IntRange(0, 19), default=0, hidden=True, help="Niceness of the compilers.")
@click.pass_obj
def command(home: Home, /, model: str, out: Path | None, precompile: str, jobs: int, nice: int, **options: Any) -> None:
    """Build MODEL, a preset (see `npucompile models`), a Hugging Face checkpoint directory or a hub's ORG/NAME, into an artifact.

    For this machine, the artifact can serve as soon as its graphs are traced; executables are added as they are compiled and
    verified against the eager reference. For NPUs, every bucket becomes one GE graph for all ranks, which is checked without a
    device. A repeated build compiles only what changed. `--print-config` prints every option, also those that
    few need, as a file that --config reads.

    \b
    Examples: npucompile build qwen3.5-tiny --buckets 2,4,...,16
              npucompile build qwen3.5-397b --buckets 2,4,...,64
              npucompile build qwen3.5-397b --target ascend-a3 --mesh dp=4,tp=4 --quantization w8a8
    """
    model = checkpoint_of(model, home.environment, Progress())
    if options["draft_model"]:
        options["draft_model"] = checkpoint_of(options["draft_model"], home.environment, Progress())
    if isinstance(options["buckets"], str):
        # Imported late: choosing buckets simulates, which loads torch.
        auto = adviser("plan.auto")
        text = options["buckets"]
        options["buckets"] = auto.chosen(text, model, options["deployment"])
        Progress().say(auto.said(options["buckets"], text))
    path = out or home.artifacts / "-".join(filter(None, (name_of(Path(model)), options["phase"])))
    named = [Path(name) for name in (model, options["draft_model"]) if name]
    own = [Path(options[name]) for name in ("family", "expert_map") if options[name]]
    fingerprint = stamp.fingerprint({**options, "model": model, "out": str(path), "precompile": precompile}, ROOT, named, own)
    if stamp.matches(path, fingerprint):
        Progress().say(f"{path} is up to date: the same options, sources, checkpoint and toolchain, and its files as they were left")
        click.echo(path)
        return
    # Imported late, so that a build that is up to date does not load torch.
    build_all = importlib.import_module("..builder.build_all", __package__).build_all
    paths = build_all(model, options, out, home.artifacts, home.cache, jobs, nice, temporary=home.temporary)
    for path in paths:
        importlib.import_module("..ranks.precompile", __package__).precompile(home, path, precompile, Progress())
        # The device's compiler may touch the files it keeps whenever it reads them.
        files = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
        stamp.write(path, fingerprint, [file.as_posix() for file in files if file.parts[0] != SHIPPED])
        click.echo(path)
    if options["deployment"]:
        lines = importlib.import_module("..serve.lines", __package__)
        for line in lines.of_built(options["deployment"], options["phase"], paths):
            Progress().say(line)
