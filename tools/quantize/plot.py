"""A picture of the errors of quantised matrices over the layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from ...graphs.errors import SpecError
from .report import MatrixError

SUFFIXES = (".svg", ".png", ".pdf")


def check_plot(path: Path) -> None:
    """Refuses a picture that cannot be drawn, before long work.

    Raises:
        SpecError: the file's ending names no format of pictures, its directory does not exist, or matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise SpecError(f"--plot {path}: the file's ending says what is drawn; legal are {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise SpecError(f"--plot {path}: {path.parent} is no directory; legal is a file in one that exists")
    _pyplot()


def plot(errors: Sequence[MatrixError], title: str, path: Path) -> None:
    """Draws the relative error over the layers, a line for each kind of matrix, the worst kind first.

    Args:
        errors: the worst first.
        path: of the picture, which is replaced.
    """
    pyplot = _pyplot()
    kinds: dict[tuple[str, str], list[MatrixError]] = {}
    for error in errors:
        kinds.setdefault((error.kind, error.form), []).append(error)
    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    for (kind, form), own in kinds.items():
        ordered = sorted(own, key=lambda error: error.layer or 0)
        axes.plot([error.layer or 0 for error in ordered], [100 * error.relative_rms for error in ordered], "o-", label=f"{kind} ({form})")
    axes.set(title=title, xlabel="layer", ylabel="relative rms error of the weights, %")
    # int4 and int8 differ by a factor of sixteen.
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if kinds:
        figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _pyplot() -> ModuleType:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise SpecError("--plot draws with matplotlib, which is not installed; legal is `pip install npucompile[plots]`") from None
    return pyplot
