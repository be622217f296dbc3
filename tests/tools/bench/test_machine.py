from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from npucompile.tools.bench import machine
from npucompile.tools.bench.machine import MeasuredMachine, cache_bytes, cpu_model, describe, lines, reader

CPUINFO = "processor\t: 0\nmodel name\t: Some CPU @ 2.50GHz\nflags\t: fpu\n\nprocessor\t: 1\nmodel name\t: Some CPU @ 2.50GHz\n"


def caches(root: Path, *sizes: str) -> Path:
    for i, size in enumerate(sizes):
        (root / f"index{i}").mkdir(parents=True)
        (root / f"index{i}" / "size").write_text(size + "\n")
    return root


def test_the_model_is_read_or_the_architecture_stands_for_it() -> None:
    assert cpu_model(CPUINFO) == "Some CPU @ 2.50GHz"
    assert cpu_model("processor : 0\n") == machine.platform.machine()


@pytest.mark.parametrize(
    ("sizes", "largest"), [(("32K", "1024K", "33792K"), 33792 * 2**10), (("8M",), 8 * 2**20), (("512",), 512), ((), 0), (("odd",), 0)]
)
def test_the_largest_cache_counts(tmp_path: Path, sizes: tuple[str, ...], largest: int) -> None:
    assert cache_bytes(caches(tmp_path, *sizes)) == largest


def test_a_machine_without_either_file_is_described(tmp_path: Path) -> None:
    here = describe(tmp_path / "none", tmp_path / "none")
    assert here.cpu
    assert (here.cache_bytes, here.threads, here.torch) == (0, torch.get_num_threads(), str(torch.__version__))
    assert "unknown cache" in lines(here)[0]


def test_a_description_names_what_figures_depend_on() -> None:
    text = "\n".join(lines(MeasuredMachine("Some CPU", 2, "avx2", 1, 33 * 2**20, "2.13.0", "0.1.0", "3.11.7", "2026-11-21", 0.25)))
    for word in ("Some CPU", "2 cores", "avx2", "33 MiB", "1 threads", "torch 2.13.0", "2026-11-21", "load average 0.2"):
        assert word in text


@pytest.mark.parametrize(
    ("working_set", "cache", "place", "nbytes"),
    [
        (2**20, 2**21, "cache", 2**20),
        (2**20 + 5, 2**21, "cache", 2**20),
        (100, 2**21, "cache", 2**16),
        (2**21, 2**21, "cache", 2**21),
        (2**21 + 1, 2**21, "memory", 2**23),
        (2**20, 0, "memory", 2**23),
    ],
)
def test_a_step_is_compared_with_what_it_reads_from(working_set: int, cache: int, place: str, nbytes: int) -> None:
    buffer = reader(working_set, cache, lambda: 0.0, memory_buffer_bytes=2**23)
    assert (buffer.place, buffer.nbytes) == (place, nbytes)


def test_every_way_to_read_reads_all_and_the_fastest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[Callable[[], torch.Tensor]] = []
    times = iter((3.0, 1.0, 2.0))

    def timed(way: Callable[[], torch.Tensor], clock: object, *, calls: int) -> float:
        ways.append(way)
        return next(times)

    monkeypatch.setattr(machine, "seconds_per_call", timed)
    buffer = reader(2**17, 2**20, lambda: 0.0)
    assert [float(way().sum()) for way in ways] == [2**17 / 4] * 3
    assert buffer.read is ways[1]
