"""The options of `npucompile serve` about how the model presents itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..serve.api_settings import CHECKPOINT, OPENAI, ApiSettings

AUTO = "; auto looks at the chat template."

OPTIONS = (
    click.option(
        "--served-model-name", "names", multiple=True,
        help="Name of the model in requests; repeat it for several.  [default: the artifact's]",
    ),
    click.option(
        "--chat-template", type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Jinja file that takes the place of the checkpoint's chat template.",
    ),
    click.option(
        "--reasoning-parser", default="auto", show_default=True,
        help="What tells reasoning from the answer: qwen3, deepseek_r1, deepseek_v3 or none" + AUTO,
    ),
    click.option(
        "--tool-call-parser", default="auto", show_default=True,
        help="How tool calls are written: hermes, qwen3_coder, deepseek_v3, deepseek_v31, deepseek_v32 or none" + AUTO,
    ),
    click.option(
        "--default-sampling", "sampling", type=click.Choice((CHECKPOINT, OPENAI)), default=CHECKPOINT, show_default=True,
        help="Sampling where an HTTP request sets none: the checkpoint's generation_config.json, then OpenAI's; or OpenAI's alone.",
    ),
)  # fmt: skip


def api_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options, and passes them on as one `api`."""

    @functools.wraps(command)
    def gathered(*arguments: Any, **options: Any) -> Any:
        own = {name: options.pop(name) for name in ("names", "chat_template", "reasoning_parser", "tool_call_parser", "sampling")}
        return command(*arguments, api=ApiSettings(**own), **options)

    for option in reversed(OPTIONS):
        gathered = option(gathered)
    return gathered
