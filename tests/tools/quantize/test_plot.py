"""tools/quantize/plot.py: a line for each kind of matrix, in a picture that opens."""

from __future__ import annotations

import builtins

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.tools.quantize.plot import check_plot, plot
from npucompile.tools.quantize.report import MatrixError

ERRORS = [
    MatrixError(f"model.layers.{layer}.{kind}", "w8a8_dynamic", error, error, 2, 1)
    for kind, error in (("mlp.down_proj", 0.02), ("self_attn.q_proj", 0.01))
    for layer in (1, 0)
]


def test_each_kind_of_matrix_is_a_line(tmp_path):
    path = tmp_path / "errors.svg"
    check_plot(path)
    plot(ERRORS, "a model in w8a8", path)
    picture = path.read_text()
    # Text is drawn as outlines, each beside a comment with the text.
    for text in ("a model in w8a8", "mlp.down_proj (w8a8_dynamic)", "self_attn.q_proj (w8a8_dynamic)"):
        assert f"<!-- {text} -->" in picture
    plot(ERRORS, "the same", tmp_path / "errors.png")
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_that_cannot_be_drawn_are_refused_before_the_work(tmp_path, monkeypatch):
    with pytest.raises(SpecError, match=r"legal are \.svg, \.png, \.pdf"):
        check_plot(tmp_path / "errors.txt")
    with pytest.raises(SpecError, match="nowhere is no directory"):
        check_plot(tmp_path / "nowhere" / "errors.svg")
    real = builtins.__import__

    def without(name, *args, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SpecError, match=r"matplotlib, which is not installed; legal is `pip install npucompile\[plots\]`"):
        check_plot(tmp_path / "errors.svg")
