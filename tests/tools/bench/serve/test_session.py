"""tools/bench/serve/session.py: what does not fit is refused; tests/tools/commands/test_bench_serve.py has a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import tiny

from npucompile.tools.bench.serve import session

REFUSED = [
    (("--tokenizer", "absent"), "--tokenizer is 'absent', and nothing of that name"),
    (("--dataset-path", __file__), "--dataset random takes no --dataset-path"),
    (("--base-url", "ws://h"), "--base-url is 'ws://h'; legal is http://"),
    (("--extra-body", "{"), "--extra-body is not JSON"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[" ".join(options) for options, _ in REFUSED])
def test_what_does_not_fit_is_refused_without_a_server(
    tiny_checkpoint: Path, tmp_path: Path, options: tuple[Any, ...], message: str
) -> None:
    place = ("--model", "m") if "--tokenizer" in options else ("--model", "m", "--tokenizer", tiny_checkpoint)
    assert message in tiny.refused(tmp_path, "bench", "serve", *place, *options)


def test_a_tokenizer_is_a_file_or_a_directory_with_one(tiny_checkpoint: Path) -> None:
    home: Any = None
    for place in (tiny_checkpoint, tiny_checkpoint / session.TOKENIZER):
        assert session.tokenizer_file(home, str(place), "m").samefile(tiny_checkpoint / session.TOKENIZER)


def test_urls_end_before_the_api() -> None:
    fields: dict[str, Any] = dict.fromkeys(session.SessionOptions.__dataclass_fields__) | {"host": "::1", "port": 8}
    assert session.SessionOptions(**fields).url == "http://[::1]:8"
    for url in ("http://h/", "http://h/v1"):
        assert session.SessionOptions(**fields | {"base_url": url}).url == "http://h"
