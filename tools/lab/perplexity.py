"""Perplexity of models on a text: `python -m npucompile.tools.lab.perplexity [--text FILE] MODEL...`, printed as Markdown.

The first model is what the others are compared with. Without `--text` it is the held-out text of the bundled model, which the command
`bible` prints (docs/bundled-model.md).
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from ...graphs.errors import SpecError
from ...models import registry
from ...models.family_file import FamilyFile
from ...models.quant.description import formats_in
from ...models.quant.formats import PLAIN
from ..builder.precision import DTYPES, choose_kv_cache
from ..builder.settings.model import KV_CACHE_DTYPES
from ..quantize.forward import loaded, logits, read_text, token_ids, windows
from .corpus import parse_chapters, read_bible, split_chapters

WINDOW_TOKENS = 256


def held_out_texts() -> list[str]:
    """The chapters that the bundled model was not trained on.

    Raises:
        CorpusError: the `bible` command is missing.
    """
    return [chapter.text for chapter in split_chapters(parse_chapters(read_bible()))[1]]


def perplexity(
    name: str,
    texts: Iterable[str],
    dtype: torch.dtype,
    window: int = WINDOW_TOKENS,
    kv_cache: str = "auto",
    family: FamilyFile | None = None,
) -> float:
    """exp of the mean negative log likelihood of a text's tokens but the first, each given those before it in its window.

    Args:
        name: of a model with weights, in whatever formats they are.
        texts: each begins with nothing before it.
        dtype: that the model computes in.
        kv_cache: dtype of cached keys and values, as of `npucompile build --kv-cache-dtype`.
        family: the file of its family, where that is the user's own.

    Raises:
        SpecError: no text has two tokens, or the model has no weights or no tokenizer.
    """
    source = registry.find(name, family)
    stored = formats_in(source.checkpoint_dir) if source.checkpoint_dir else None
    model, params = loaded(source, dtype, choose_kv_cache(kv_cache, stored or PLAIN, dtype))
    total, count = 0.0, 0
    for text in texts:
        for tokens in windows(token_ids(source, text), window, overlap=1):
            if tokens.shape[1] > 1:
                scores = logits(model, params, tokens, dtype)[0, :-1].float()
                total += float(cross_entropy(scores, tokens[0, 1:].long(), reduction="sum"))
                count += tokens.shape[1] - 1
    if not count:
        raise SpecError("the text has no token that others precede; legal is one of at least two tokens")
    return math.exp(total / count)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL", help="preset with weights, or checkpoint directory")
    parser.add_argument("--text", type=Path, help="UTF-8 text (default: the bundled model's held-out text)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, nargs="+", default=["auto"], help="each model with each of them")
    parser.add_argument("--family", type=FamilyFile.read, metavar="FILE", help="Python file of the models' family")
    options = parser.parse_args()
    texts = [read_text(options.text)] if options.text else held_out_texts()
    print("| model | perplexity | change |\n| --- | ---: | ---: |")
    first = None
    for name, kv_cache in itertools.product(options.models, options.kv_cache_dtype):
        value = perplexity(name, texts, DTYPES[options.dtype], kv_cache=kv_cache, family=options.family)
        first = first or value
        cached = "" if kv_cache == "auto" else f", KV cache {kv_cache}"
        print(f"| {Path(name).name}{cached} | {value:.4f} | {value / first - 1:+.2%} |", flush=True)


if __name__ == "__main__":
    main()
