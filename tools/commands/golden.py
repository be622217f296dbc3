"""`npucompile golden`: records what transformers answers, for a bring-up to compare with."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch

from ...graphs.errors import ModelError, SpecError
from ...server.text.tokenizer import TextTokenizer
from ..cli import Home
from ..hub import checkpoint_of
from ..progress import Progress
from ..prove import golden

Encode = Callable[[str], tuple[int, ...]]


@click.command("golden")
@click.argument("model")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="File to write.")
@click.option("--prompt", "texts", multiple=True, help="Text in place of the eight that are there; may be repeated.")
@click.option("--tokens", type=click.IntRange(1), default=32, show_default=True, help="Tokens of each answer.")
@click.option("--top", type=click.IntRange(1, 20), default=5, show_default=True, help="Most likely tokens kept at each place.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True, help="In which it is computed.")
@click.pass_obj
def command(home: Home, model: str, out: Path, texts: tuple[str, ...], tokens: int, top: int, dtype: str) -> None:
    """Record the greedy tokens and log probabilities of MODEL, a checkpoint directory or a hub's ORG/NAME, by transformers on this CPU.

    `npucompile bringup ARTIFACT --golden FILE` serves the same prompts on a device and says where it goes another way. Make FILE of the
    float checkpoint, also for an artifact that was quantised.

    Example: npucompile golden Qwen/Qwen3.5-0.8B --out qwen.golden
    """
    if find_spec("transformers") is None:
        raise SpecError("npucompile golden runs transformers, which is not installed: pip install transformers")
    directory = checkpoint_of(model, home.environment, Progress())
    library = _transformers()
    theirs = library.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    vocab = int(theirs.config.get_text_config().vocab_size)
    encode = _encode(Path(directory))
    if texts and encode is None:
        raise SpecError(f"--prompt: {directory} has no tokenizer; legal is none, for prompts of random ids")
    prompts = [tuple(encode(text)) for text in texts] if encode and texts else [*golden.prompts_of(encode, vocab)]
    made_by = {"model": Path(directory).name, "dtype": dtype, "transformers": library.__version__, "torch": torch.__version__}
    golden.write(golden.Golden(vocab, made_by, golden.recorded(theirs, prompts, tokens, top)), out)
    click.echo(f"{out}: {len(prompts)} prompts of {tokens} tokens; next: npucompile bringup ARTIFACT --golden {out}")


def _transformers() -> Any:
    library = importlib.import_module("transformers")
    # Where torch_npu is installed without CANN its import fails, and transformers imports it where it finds it.
    probes: Any = importlib.import_module("transformers.utils.import_utils")
    find = probes._is_package_available
    probes._is_package_available = lambda name, *rest, **named: (False, "N/A") if name == "torch_npu" else find(name, *rest, **named)
    return library


def _encode(directory: Path) -> Encode | None:
    """What makes ids of a text, as a server does; None where the checkpoint has no tokenizer."""
    try:
        return TextTokenizer.load(directory).encode
    except ModelError:
        return None
