"""`npucompile plan`: predicts a published deployment, or searches layouts for a model and its traffic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ...graphs.errors import SpecError
from ..advice import adviser
from ..builder.settings.model import SCHEMES
from ..builder.settings.place import TARGETS
from ..hub import checkpoint_of
from ..progress import Progress

NPU_TARGETS = tuple(name for name in TARGETS if name.startswith("ascend"))

LAYOUT = ("cards", "target", "quantization", "drafts")
NOT_READ = {
    "deployment": (("itl_target", *LAYOUT), "has a layout, weights and a server of its own; legal is {} with a MODEL"),
    "artifact": (
        (*LAYOUT, "max_buckets", "metrics", "html", "file", "expert_map"),
        "has its layout, its graphs and their times; legal is {} with a MODEL or --deployment",
    ),
    "model": (("expert_map",), "is searched for a layout that meets a target; legal is {} with --deployment"),
    "trace": (("requests", "rate", "shared_prefix"), "says which requests come when; legal is {} with --input and --output"),
}
"""Options that a subject leaves without a meaning, by parameter, and why: an answer that passed them over would be to another question."""


def _refuse_measured(_: click.Context, __: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise SpecError(
            "--measured is gone: steps of this machine are measured and not predicted; legal is --artifact with one for NPUs, or "
            "`npucompile bench --only decode,prefill,streams`"
        )


@click.command("plan")
@click.argument("model", required=False)
@click.option("--deployment", metavar="ID", help="Predict this published deployment instead; see `npucompile deployments`.")
@click.option(
    "--artifact", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR",
    help="Predict the server of this artifact instead, with the times of its own graphs.",
)  # fmt: skip
@click.option(
    "--measured", hidden=True, expose_value=False, callback=_refuse_measured,
    help="Gone: steps of this machine are measured and not predicted.",
)  # fmt: skip
@click.option("--cards", type=click.IntRange(1), help="Packages of the target: two NPUs each of ascend-a3, one of ascend-a2.")
@click.option("--target", type=click.Choice(NPU_TARGETS), default="ascend-a3", show_default=True, help="Kind of NPU.")
@click.option("--input", "inputs", metavar="TOKENS", help="Tokens of a prompt, or a histogram: 1000:3,4000:1 is three of four with 1000.")
@click.option("--output", "outputs", metavar="TOKENS", help="Tokens of an answer, or a histogram.")
@click.option("--concurrency", type=click.IntRange(1), help="Requests in flight; a client sends the next when one ends.")
@click.option("--requests", type=click.IntRange(1), help="Requests of the run.  [default: four for each in flight]")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Requests a second at most.  [default: unlimited]")
@click.option("--shared-prefix", type=click.IntRange(0), default=0, help="Leading tokens that all prompts share and a prefix cache keeps.")
@click.option(
    "--trace", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE",
    help="Requests in Mooncake's format instead of lengths: a JSON object a line with timestamp, input_length, output_length "
    "and perhaps the priority.",
)  # fmt: skip
@click.option("--tpot", type=click.FloatRange(0, min_open=True), metavar="MS", help="Target of the mean time per output token.")
@click.option("--ttft", type=click.FloatRange(0, min_open=True), metavar="MS", help="Target of the mean time to the first token.")
@click.option("--itl-target", type=click.FloatRange(0, min_open=True), metavar="MS",
              help="Simulate servers with this `serve --itl-target`.  [default: none, or what --ttft needs]")  # fmt: skip
@click.option(
    "--quantization", type=click.Choice(["bf16", *(name for name in SCHEMES if name != "none" and "-all" not in name)]), multiple=True,
    help="Schemes to try; may be repeated.  [default: those of the model's published deployments, else w8a8]",
)  # fmt: skip
@click.option("--speculative-tokens", "drafts", type=click.IntRange(0, 7), multiple=True, help="Drafts to try.  [default: 0 to 3]")
@click.option("--accepted", type=click.FloatRange(1), help="Tokens a step, with drafts.  [default: of published rows like it]")
@click.option(
    "--expert-map",
    metavar="FILE",
    help="With --deployment, also predict experts as planned from this file of counts (SGLang's logical_count).",
)
@click.option("--max-buckets", type=click.IntRange(1, 64), default=16, show_default=True, help="Longest list of decode buckets.")
@click.option(
    "--metrics", metavar="FILE|URL", help="Take batch sizes for the buckets from the text of a server's /metrics, not from the simulation."
)
@click.option(
    "--buckets-out", type=click.Path(path_type=Path, dir_okay=False), help="Write the buckets there, for `build --buckets auto:FILE`."
)
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Also draw the result as one page.")
@click.option(
    "--parameters",
    "file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Parameters that `npucompile calibrate` wrote.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.pass_context
def command(
    context: click.Context,
    /,
    model: str | None,
    deployment: str | None,
    artifact: Path | None,
    as_json: bool,
    html: Path | None,
    buckets_out: Path | None,
    **options: Any,
) -> None:
    """Predict latencies and throughput, and search the layout of MODEL that meets a target.

    Nothing is measured: docs/planning.md says how well published measurements are predicted.

    \b
    Examples: npucompile plan --deployment dsr1-a3x16-pd-2k-2k-50ms
              npucompile plan qwen3-32b --cards 2 --input 3500 --output 1500 --concurrency 78 --tpot 50
              npucompile plan qwen3.5-397b --cards 8 --trace requests.jsonl --tpot 50 --html plan.html
    """
    for name, path in (("--html", html), ("--buckets-out", buckets_out)):
        if path is not None and not path.parent.is_dir():
            raise SpecError(f"{name} {path}: {path.parent} is no directory; legal is a file in one that exists")
    if sum(subject is not None for subject in (model, deployment, artifact)) != 1:
        raise SpecError("legal is one of a MODEL with its traffic, --deployment ID and --artifact DIR")
    subjects = {"deployment": deployment, "artifact": artifact, "model": model, "trace": options["trace"]}
    for subject, (unread, why) in NOT_READ.items():
        if subjects[subject] is None:
            continue
        for parameter in context.command.params:
            if parameter.name in unread and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE:
                name = "a MODEL" if subject == "model" else f"--{subject}"
                raise SpecError(f"{parameter.opts[0]} with {name}, which {why.format(parameter.opts[0])}")
    # Sizes are those of the configuration: weights stay where they are.
    model = model and checkpoint_of(model, context.obj.environment, Progress(), weights=False)
    # Imported late, so that `--help` need not load torch.
    views, asked = adviser("plan.views"), adviser("plan.asked").Asked(**options)
    if artifact is not None:
        view = adviser("plan.artifact").artifact_view(artifact, asked)
    else:
        view = views.deployment_view(deployment, asked) if deployment else views.search_view(model, asked)
    if buckets_out is not None:
        buckets_out.write_text(json.dumps({"buckets": list(view.buckets)}) + "\n", encoding="utf-8")
    if html is not None:
        assert view.draw is not None, "an artifact's view is drawn by nobody, and refused above"
        view.draw(html)
    click.echo(json.dumps(view.data, indent=1) if as_json else "\n".join(view.lines))
    if view.refused:
        raise SpecError(view.refused)
