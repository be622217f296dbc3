"""Reads maps of experts, in the files that SGLang and vllm-ascend take, and fits them to a model and its ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...graphs.errors import SpecError
from ...models.expert_placement import ExpertPlacement, Layer, with_experts
from ...models.step import Model
from .expert_planner import planned

MAP, COUNT, LAYERS = "physical_to_logical_map", "logical_count", "layer_list"
"""Keys of files, of which each has one: SGLang's (srt/eplb/expert_location.py), and vllm-ascend's (eplb/core/eplb_utils.py)."""
_LEGAL = f"a JSON or .pt file, or JSON text, with {MAP} or {COUNT} of SGLang or {LAYERS} of vllm-ascend"


@dataclass(frozen=True)
class ExpertMap:
    """What a file says of experts.

    Attributes:
        name: of the file, for errors.
        rows: by layer the logical expert of each physical one, or how often each logical expert was chosen.
        counts: whether it is the latter.
        ranks: that it is for; 0 where it is for any.
    """

    name: str
    rows: tuple[tuple[int, ...], ...]
    counts: bool = False
    ranks: int = 0


def read(text: str) -> ExpertMap:
    """The map of a file, or of JSON text, which begins with a brace.

    Raises:
        SpecError: it cannot be read, or has none of the keys.
    """
    name, fields = (text, _file(Path(text))) if not text.lstrip().startswith("{") else ("the JSON text", _json("the JSON text", text))
    if isinstance(fields, Mapping):
        try:
            if MAP in fields:
                return ExpertMap(name, _rows(fields[MAP]))
            if COUNT in fields:
                counts = torch.as_tensor(fields[COUNT])
                # A recorder has a row a step in front.
                return ExpertMap(name, _rows(counts.sum(0) if counts.dim() == 3 else counts), counts=True)
            if LAYERS in fields:
                return _of_devices(name, fields)
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise SpecError(f"{name}: no map of experts: {type(error).__name__}: {error}; legal is {_LEGAL}") from None
    there = ", ".join(map(str, fields)) if isinstance(fields, Mapping) else type(fields).__name__
    raise SpecError(f"{name}: has {there or 'nothing'}; legal is {_LEGAL}")


def _file(path: Path) -> Any:
    try:
        if path.suffix == ".pt":
            return torch.load(path, map_location="cpu", weights_only=True)
        return _json(str(path), path.read_text(encoding="utf-8"))
    except SpecError:
        raise
    except Exception as error:  # Whatever an unpickler meets.
        raise SpecError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}; legal is {_LEGAL}") from None


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SpecError(f"{name} is no JSON: {error}; legal is {_LEGAL}") from None


def _rows(values: Any) -> tuple[tuple[int, ...], ...]:
    table = torch.as_tensor(values)
    if table.dim() != 2 or table.is_floating_point() or table.dtype == torch.bool:
        raise ValueError(f"{list(table.shape)} {str(table.dtype)[6:]}, not a row of whole numbers a layer")
    return tuple(map(tuple, table.tolist()))


def _of_devices(name: str, fields: Mapping[str, Any]) -> ExpertMap:
    """Lists count by position, as vllm-ascend reads them; the ids beside them are not read."""
    layers: Sequence[Mapping[str, Any]] = fields[LAYERS]
    devices = [[device["device_expert"] for device in layer["device_list"]] for layer in layers]
    counts = {(len(each), len(experts)) for each in devices for experts in each}
    if len(layers) != fields["moe_layer_count"] or len(counts) != 1:
        raise ValueError(
            f"{len(layers)} layers of {fields['moe_layer_count']}, with devices of {sorted(counts)}; legal is one number of each"
        )
    ((ranks, _),) = counts
    return ExpertMap(name, _rows([[expert for experts in each for expert in experts] for each in devices]), ranks=ranks)


def fitted(expert_map: ExpertMap, model: Model, ranks: int, nodes: int = 1, physical: int = 0) -> ExpertPlacement:
    """The placement of a model's experts on so many ranks; counts are planned, with as few copies as the ranks need to share evenly.

    Args:
        nodes: that the ranks are on.
        physical: how many experts there must be; 0 where the file says.

    Raises:
        SpecError: the file is for another model, or other ranks.
    """
    name, logical = expert_map.name, model.config.num_experts
    if not logical:
        raise SpecError(f"{name}: places experts, and {model.name} has none; legal is no map")
    rows = rows_of(expert_map, model)
    if expert_map.counts:
        groups = model.config.routing.groups
        return ExpertPlacement(planned(rows, physical or -(-logical // ranks) * ranks, ranks, groups=groups, nodes=nodes))
    for layer, row in enumerate(rows):
        _check(f"{name}: layer {layer}", row, logical, model.name)
    share = len(rows[0])
    if share % ranks or expert_map.ranks not in (0, ranks) or physical not in (0, share):
        on = f" on {expert_map.ranks} devices" if expert_map.ranks else ""
        legal = f"{physical}, as it was built for" if physical else f"a multiple of {ranks}"
        raise SpecError(f"{name}: has {share} physical experts{on}, and {ranks} ranks share them; legal is {legal}")
    return ExpertPlacement(rows)


def rows_of(expert_map: ExpertMap, model: Model) -> tuple[Layer, ...]:
    """The rows of layers with experts, and of the draft head's if there is one.

    Raises:
        SpecError: the file has another number of rows.
    """
    rows, (layers, drafts), logical = expert_map.rows, with_experts(model), model.config.num_experts
    if expert_map.counts and (odd := next((row for row in rows if len(row) != logical or min(row) < 0), None)):
        raise SpecError(f"{expert_map.name}: counts {len(odd)} experts, {model.name} has {logical}; legal is a count from 0 of each")
    moe, more = sum(layers), len(rows) - len(layers)
    if not expert_map.ranks and len(layers) > moe and 0 <= more <= drafts:
        # SGLang counts layers without experts, too.
        return tuple(row for row, has in zip(rows, [*layers, True][: len(rows)], strict=True) if has)
    if not moe <= len(rows) <= moe + drafts:
        legal = f"{moe}" + (f", or {len(layers)} with those without experts" if len(layers) > moe and not expert_map.ranks else "")
        raise SpecError(
            f"{expert_map.name}: has {len(rows)} layers, {model.name} has {moe} with experts; legal are {legal}"
            + (", and one more for the draft head" if drafts else "")
        )
    return rows


def _check(where: str, row: Layer, logical: int, name: str) -> None:
    if outside := [expert for expert in row if not 0 <= expert < logical]:
        raise SpecError(f"{where} has expert {outside[0]}; {name} has 0 to {logical - 1}")
    if missing := sorted(set(range(logical)) - set(row)):
        raise SpecError(f"{where} has {len(set(row))} of {logical} experts, and not {missing[0]}; legal is each at least once")
