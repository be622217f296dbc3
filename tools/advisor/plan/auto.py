"""The buckets of `build --buckets auto`: those that a published deployment's own workload wants, or that a file names."""

from __future__ import annotations

import json
from pathlib import Path

from ....graphs.errors import SpecError
from ...builder.deployments import default_for, deployment
from ...notation import format_buckets, parse_buckets
from .buckets import build_list
from .predict import predict
from .published import case_of

AUTO = "auto"
MOST = 16
"""Buckets at the most; published rows have 1 to 17."""


def chosen(text: str, model: str, row: str | None) -> tuple[int, ...]:
    """The decode batch sizes that `auto`, or `auto:FILE`, stands for.

    Args:
        text: "auto", or "auto:" and a file that `npucompile plan --buckets-out` wrote.
        model, row: of the build; without a file the row's traffic is simulated, or that of the model's default row.

    Raises:
        SpecError: there is neither a file nor a row with lengths and requests in flight, or the file is none.
    """
    file = text.partition(":")[2]
    if file:
        return _of_file(Path(file))
    published = deployment(row) if row else default_for(model)
    if published is None or published.input_len is None or published.concurrency is None or not published.phases:
        what = f"deployment {published.id}, which does not say" if published else "no deployment that says"
        raise SpecError(
            f"--buckets auto with {what} how many requests of what lengths there are; legal are a --deployment that does, "
            "or --buckets auto:FILE with what `npucompile plan --buckets-out FILE` wrote"
        )
    case = case_of(published.id)
    return build_list(predict(case), case, MOST)


def _of_file(path: Path) -> tuple[int, ...]:
    try:
        sizes = json.loads(path.read_text(encoding="utf-8"))["buckets"]
        if not all(type(size) is int for size in sizes):
            raise TypeError
        return parse_buckets(",".join(map(str, sizes)))
    except OSError as error:
        raise SpecError(f"--buckets auto:{path}: {error.strerror}; legal is a file that `npucompile plan --buckets-out` wrote") from None
    except (ValueError, KeyError, TypeError):
        raise SpecError(f"--buckets auto:{path} has no list of buckets; legal is what `npucompile plan --buckets-out` wrote") from None


def said(buckets: tuple[int, ...], text: str) -> str:
    """What a build says of them."""
    return f"--buckets {text}: {format_buckets(buckets)}"
