"""What two artifacts hand over as prefill and decode servers, before either is served."""

from __future__ import annotations

from collections import Counter

from ...graphs.errors import SpecError
from ...lowering.artifact.artifact import Artifact
from ...runtime.kv_transfer.layout import PAGES, SLOTS, LayoutError, check, instance_of
from .views import InspectView


def pair(prefill: Artifact, decode: Artifact, tokens: int | None = None) -> tuple[InspectView, str]:
    """What a prompt carries from one to the other, and why they are no pair; "" where they are.

    Args:
        tokens: of the prompt; by default half of the longest that both serve.

    Raises:
        SpecError: no prompt has so many.
    """
    sides = [instance_of(artifact.manifest) for artifact in (prefill, decode)]
    longest = min(side.max_model_len for side in sides)
    if tokens is not None and not 1 <= tokens <= longest:
        raise SpecError(f"a prompt of {tokens} tokens; legal are 1 to {longest}")
    prompt, source = longest // 2 if tokens is None else tokens, sides[0]
    try:
        check(*sides)
        refused = ""
    except LayoutError as error:
        refused = str(error)
    kinds = Counter((region.name.rpartition(".")[2], region.kind, region.split) for region in source.pools)
    pools = [
        {"pool": name, "layers": count, "items": axis, "dtype": dtype, "shape": list(shape), "split": split}
        for (name, (axis, dtype, shape), split), count in kinds.items()
    ]
    data = {
        "pair": not refused, "refused": refused, "model": source.model, "page_size": source.page_size, "longest": longest, "prompt": prompt,
        "token_bytes": source.item_bytes(PAGES) // source.page_size, "state_bytes": source.item_bytes(SLOTS),
        "request_bytes": source.request_bytes(prompt), "pools": pools,
        "prefill": {"artifact": str(prefill.path), "mesh": prefill.manifest.mesh, "drafts": sides[0].drafts},
        "decode": {"artifact": str(decode.path), "mesh": decode.manifest.mesh, "drafts": sides[1].drafts},
    }  # fmt: skip
    lines = [
        f"{role:7}  {artifact.path}: mesh {artifact.manifest.mesh}, {side.drafts} drafts, at most {side.max_model_len} tokens"
        for role, artifact, side in zip(("prefill", "decode"), (prefill, decode), sides, strict=True)
    ]
    lines += [
        f"model    {source.model}",
        f"travels  {data['token_bytes']:,} bytes a token in pages of {source.page_size}, {data['state_bytes']:,} a request of states",
        f"prompt   {data['request_bytes']:,} bytes for {prompt} tokens",
    ]
    for each in pools:
        held = "a part on each rank of a group" if each["split"] else "whole on each rank of a group"
        lines.append(f"  {each['pool']} x {each['layers']}: {each['dtype']}{each['shape']} by {each['items']}, {held}")
    return InspectView(data, tuple(lines)), refused
