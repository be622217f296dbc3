"""models/: every layout over a mesh gives, group by group, the outputs and the state of one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support import fleets

from npucompile.graphs.ir.flatten import bodies
from npucompile.graphs.ops.packed_latents import unpacked
from npucompile.graphs.spmd.partition import PartitionedProgram
from npucompile.graphs.types import Mesh
from npucompile.models import variant as variants
from npucompile.models.quant.formats import Formats
from npucompile.models.variant import PLAIN, Variant

TOLERANCE = 5e-4
"""Of quantised models: sums of other orders round an activation to another integer now and then. It depends on the CPU where."""

FLIPPED = 0.01
"""Of the largest logit of a row: how far off the row may be after that. In a run of a quantised model one row may, of the others none."""


@dataclass(frozen=True)
class Case:
    """A layout and a load.

    Attributes:
        drafts: k.
        live: number of rows with a request, by group; the others are padding.
        against: variant of the parameters on one device.
        model: name of one of the models of `fleets`; the small Qwen3.5 by default.
        collectives: those that experts of the decode step must use, in any order, and no others.
        chunk: tokens of a prefill step; prompts have up to 7.
    """

    mesh: str
    variant: Variant = PLAIN
    against: Variant = PLAIN
    experts: bool = True
    expert_parallel: bool = True
    batch: int = 2
    drafts: int = 0
    live: tuple[int, ...] = ()
    steps: int = 4
    model: str = "small"
    collectives: tuple[str, ...] = ()
    chunk: int = 5


GROUPED = Variant(grouped=True)
IN_PARTS = replace(GROUPED, most_dispatched=1, dispatches_in_parts=True)
TWO_IN_FLIGHT = replace(IN_PARTS, in_flight=2)
W8, W4 = fleets.quantised("w8a8"), fleets.quantised("w4a8")
INT8_CACHE = Variant(formats=Formats(kv_cache=(("?*", "int8"),)))
INT8_LATENTS = replace(GROUPED, formats=INT8_CACHE.formats)
INT8_BACK = replace(W8, formats=replace(W8.formats, sent_back="int8"))
SPLIT_W8 = fleets.everywhere("w8a8_dynamic", q_heads=2, delta_heads=2, ffn=2)
FEW = Variant(draft_vocab=40)
DISPATCH = ("moe_dispatch world", "moe_combine world")
FUSED = ("fused_experts_w4a8 world", *DISPATCH)
"""The draft head's experts are not quantised, and dispatched."""
GATHER = ("all_gather_into_tensor world", "reduce_scatter_tensor world")


def repeated(variant: Variant, **changes: object) -> Variant:
    return Variant(**{**vars(variant), "kv_repeat": 2, **changes})


def padded(ranks: int, variant: Variant = PLAIN) -> Variant:
    return replace(variant, padded=(("vocab", ranks), ("ffn", ranks)))


def gathering(variant: Variant, most_dispatched: int = 0) -> Variant:
    return Variant(**{**vars(variant), "most_dispatched": most_dispatched})


CASES: dict[str, Case] = {
    "dense tp=2": Case("tp=2", experts=False, drafts=3),
    "dense tp=4": Case("tp=4", repeated(PLAIN), experts=False, drafts=1),
    "dense dp=2,tp=2": Case("dp=2,tp=2", experts=False, steps=2),
    "experts tp=2": Case("tp=2", GROUPED, collectives=DISPATCH),
    "experts tp=4": Case("tp=4", repeated(GROUPED), batch=3, collectives=DISPATCH, drafts=1),
    "experts dp=2": Case("dp=2", GROUPED, collectives=DISPATCH, drafts=1),
    "experts dp=2,tp=2": Case("dp=2,tp=2", GROUPED, drafts=3, collectives=DISPATCH),
    "experts dp=4": Case("dp=4", GROUPED, live=(2, 1, 0, 2), collectives=DISPATCH),
    "gathered dp=2,tp=2": Case("dp=2,tp=2", gathering(GROUPED), drafts=1, collectives=GATHER),
    "gathered, the head's dispatched": Case("dp=2,tp=2", gathering(GROUPED, 1), drafts=3, collectives=DISPATCH + GATHER),
    "in parts": Case("dp=2,tp=2", IN_PARTS, drafts=1, collectives=DISPATCH),
    "gathered tp=4": Case("tp=4", gathering(repeated(GROUPED)), batch=3, collectives=GATHER),
    "experts split tp=2": Case("tp=2", expert_parallel=False, drafts=1),
    "experts split as products read them tp=2": Case("tp=2", GROUPED, expert_parallel=False, drafts=1),
    "experts split tp=4": Case("tp=4", repeated(PLAIN), expert_parallel=False),
    "experts split dp=2,tp=2": Case("dp=2,tp=2", expert_parallel=False),
    "odd batch": Case("dp=2,tp=2", GROUPED, batch=3, collectives=DISPATCH, drafts=1),
    "fewer tokens than devices": Case("tp=4", repeated(GROUPED), batch=1, collectives=DISPATCH),
    "fewer rows than devices": Case("tp=4", repeated(GROUPED), batch=1, collectives=DISPATCH, drafts=3),
    "idle group": Case("dp=2,tp=2", GROUPED, live=(2, 0), drafts=1, collectives=DISPATCH),
    "idle group, gathered": Case("dp=2,tp=2", gathering(GROUPED), live=(0, 1), drafts=1, collectives=GATHER),
    "w8a8 dp=2,tp=2": Case("dp=2,tp=2", W8, W8, collectives=DISPATCH),
    "w8a8 back as int8": Case("dp=2,tp=2", INT8_BACK, INT8_BACK, drafts=1, collectives=DISPATCH),
    "w8a8 gathered": Case("dp=2,tp=2", gathering(W8), W8, drafts=1, collectives=GATHER),
    "w8a8 tp=4": Case("tp=4", repeated(W8), W8, collectives=DISPATCH),
    **{
        f"{form} everywhere, {layout}": Case(
            mesh,
            fleets.everywhere(form, **shards),
            fleets.everywhere(form, **shards),
            experts,
            spread,
            drafts=1,
            collectives=DISPATCH if experts and spread else (),
        )
        for form in ("w8a8", "w8a8_dynamic", "w4a8_dynamic", "w4a16")
        for layout, mesh, experts, spread, shards in (
            ("dense tp=2", "tp=2", False, True, {"q_heads": 2, "delta_heads": 2, "ffn": 2}),
            ("spread tp=2", "tp=2", True, True, {"q_heads": 2, "delta_heads": 2}),
            ("spread dp=2", "dp=2", True, True, {}),
            ("spread dp=2,tp=2", "dp=2,tp=2", True, True, {"q_heads": 2, "delta_heads": 2}),
            ("split tp=2", "tp=2", True, False, {"q_heads": 2, "delta_heads": 2, "expert_ffn": 2, "shared_ffn": 2}),
        )
    },
    "w4a8 dp=2,tp=2": Case("dp=2,tp=2", W4, W4, collectives=DISPATCH),
    "int8 cache tp=2": Case("tp=2", INT8_CACHE, INT8_CACHE, experts=False, drafts=3),
    "int8 cache tp=4": Case("tp=4", repeated(INT8_CACHE), INT8_CACHE, experts=False, model="plain", steps=2),
    "no gate tp=2": Case("tp=2", experts=False, model="plain"),
    "no gate tp=4": Case("tp=4", repeated(PLAIN), experts=False, model="plain"),
    "no gate dp=2": Case("dp=2", experts=False, model="plain", live=(2, 1)),
    "no gate dp=2,tp=2": Case("dp=2,tp=2", experts=False, model="plain"),
    "no shared expert tp=2": Case("tp=2", GROUPED, model="plain-moe", collectives=DISPATCH),
    "no shared expert dp=2": Case("dp=2", GROUPED, model="plain-moe", collectives=DISPATCH),
    "no shared expert dp=2,tp=2": Case("dp=2,tp=2", GROUPED, batch=3, model="plain-moe", collectives=DISPATCH),
    "no shared expert in parts": Case("dp=2,tp=2", TWO_IN_FLIGHT, model="plain-moe", collectives=DISPATCH),
    "no shared expert gathered": Case("dp=2,tp=2", gathering(GROUPED), model="plain-moe", collectives=GATHER),
    "no shared expert split tp=2": Case("tp=2", expert_parallel=False, model="plain-moe"),
    "no shared expert split tp=4": Case("dp=2,tp=2", expert_parallel=False, model="plain-moe"),
    "biases tp=2": Case("tp=2", experts=False, model="plain-biased"),
    "norms of all heads tp=2": Case("tp=2", GROUPED, model="plain-across", collectives=DISPATCH),
    "norms of all heads tp=4": Case("tp=4", repeated(GROUPED), batch=3, model="plain-across", collectives=DISPATCH),
    "norms of all heads dp=2,tp=2": Case("dp=2,tp=2", expert_parallel=False, model="plain-across"),
    "fused projections tp=2": Case("tp=2", GROUPED, model="next", drafts=2, collectives=DISPATCH),
    "fused projections dp=2": Case("dp=2", GROUPED, model="next", drafts=1, collectives=DISPATCH),
    "fused projections dp=2,tp=2": Case("dp=2,tp=2", GROUPED, model="next", drafts=3, collectives=DISPATCH),
    "latent tp=2": Case("tp=2", GROUPED, model="latent", collectives=DISPATCH, drafts=1),
    "latent dp=2": Case("dp=2", GROUPED, model="latent", collectives=DISPATCH),
    "latent dp=2,tp=2": Case("dp=2,tp=2", GROUPED, batch=3, model="latent", drafts=3, collectives=DISPATCH),
    "latent gathered": Case("dp=2,tp=2", gathering(GROUPED), model="latent", drafts=1, collectives=GATHER),
    "sparse tp=2": Case("tp=2", GROUPED, model="sparse", collectives=DISPATCH, drafts=1),
    "sparse dp=2,tp=2": Case("dp=2,tp=2", GROUPED, batch=3, model="sparse", drafts=2, collectives=DISPATCH),
    "sparse split dp=2": Case("dp=2", expert_parallel=False, model="sparse"),
    "sparse int8 cache tp=2": Case("tp=2", INT8_LATENTS, INT8_CACHE, model="sparse", drafts=1, collectives=DISPATCH),
    "shared index int8 cache dp=2,tp=2": Case(
        "dp=2,tp=2", INT8_LATENTS, INT8_CACHE, batch=3, model="shared-index", drafts=2, collectives=DISPATCH
    ),
    "shared index tp=2": Case("tp=2", GROUPED, model="shared-index", collectives=DISPATCH, drafts=1),
    "shared index dp=2": Case("dp=2", GROUPED, model="shared-index", collectives=DISPATCH),
    "shared index dp=2,tp=2": Case("dp=2,tp=2", GROUPED, batch=3, model="shared-index", drafts=2, collectives=DISPATCH),
    "biased tp=2": Case("tp=2", GROUPED, model="biased", collectives=DISPATCH, drafts=1),
    "biased tp=4": Case("tp=4", repeated(GROUPED), batch=3, model="biased", collectives=DISPATCH, drafts=2),
    "biased dp=2": Case("dp=2", GROUPED, model="biased", collectives=DISPATCH),
    "biased dp=2,tp=2": Case("dp=2,tp=2", GROUPED, batch=3, model="biased", drafts=3, collectives=DISPATCH),
    "latent split dp=2,tp=2": Case("dp=2,tp=2", expert_parallel=False, model="latent", drafts=1),
    "fused projections split dp=2,tp=2": Case("dp=2,tp=2", expert_parallel=False, model="next", drafts=1),
    "drafts of few tokens tp=2": Case("tp=2", FEW, FEW, experts=False, drafts=3),
    "drafts of few tokens dp=2,tp=2": Case(
        "dp=2,tp=2", replace(GROUPED, draft_vocab=40), FEW, drafts=2, model="latent", collectives=DISPATCH
    ),
    "drafts of few tokens, odd sizes tp=4": Case("tp=4", repeated(padded(4), draft_vocab=40), FEW, experts=False, drafts=2, model="odd"),
    "drafts of few tokens, int8 tp=2": Case(
        "tp=2", replace(SPLIT_W8, draft_vocab=40), replace(SPLIT_W8, draft_vocab=40), experts=False, drafts=1
    ),
    "draft model tp=2": Case("tp=2", Variant(draft_kv_repeat=2), experts=False, model="plain-eagle3", drafts=3),
    "draft model tp=4": Case("tp=4", repeated(PLAIN, draft_kv_repeat=4), experts=False, model="plain-eagle3", drafts=1),
    "draft model dp=2": Case("dp=2", experts=False, model="plain-eagle3", drafts=2, live=(2, 1)),
    "draft model dp=2,tp=2": Case("dp=2,tp=2", Variant(draft_kv_repeat=2), experts=False, model="plain-eagle3", drafts=2, batch=3),
    "draft model, experts tp=2": Case(
        "tp=2", replace(GROUPED, draft_kv_repeat=2), model="plain-moe-eagle3", drafts=3, collectives=DISPATCH
    ),
    "draft model, experts dp=2,tp=2": Case(
        "dp=2,tp=2", replace(GROUPED, draft_kv_repeat=2), model="plain-moe-eagle3", drafts=2, batch=3, collectives=DISPATCH
    ),
    "draft model, experts split tp=2": Case("tp=2", Variant(draft_kv_repeat=2), expert_parallel=False, model="plain-moe-eagle3", drafts=1),
    "draft model, w8a8 tp=2": Case(
        "tp=2",
        replace(fleets.everywhere("w8a8_dynamic", q_heads=2, ffn=2), draft_kv_repeat=2),
        fleets.everywhere("w8a8_dynamic", q_heads=2, ffn=2),
        experts=False,
        model="plain-eagle3",
        drafts=1,
    ),
    **{
        f"formats of parts differ, {layout}": case
        for layout, case in {
            "tp=2": Case("tp=2", fleets.mixed(q_heads=2), fleets.mixed(q_heads=2), experts=False, drafts=1),
            "tp=4": Case("tp=4", repeated(fleets.mixed(q_heads=4)), fleets.mixed(q_heads=4), experts=False, model="plain"),
            "spread": Case("dp=2,tp=2", fleets.mixed(q_heads=2), fleets.mixed(q_heads=2), drafts=1, collectives=DISPATCH),
            "split": Case("tp=2", *[fleets.mixed(q_heads=2, expert_ffn=2)] * 2, expert_parallel=False),
            **{
                kind: Case("tp=2", *[fleets.mixed(q_heads=2)] * 2, model=kind, drafts=1, collectives=DISPATCH)
                for kind in ("latent", "biased")
            },
        }.items()
    },
    "odd sizes tp=2": Case("tp=2", padded(2), experts=False, drafts=3, model="odd"),
    "odd sizes tp=4": Case("tp=4", repeated(padded(4)), experts=False, drafts=1, model="odd", batch=3),
    "odd sizes dp=2,tp=2": Case("dp=2,tp=2", padded(2), experts=False, drafts=2, model="odd"),
    "odd sizes, tied tp=2": Case("tp=2", padded(2), experts=False, model="plain-odd"),
    "odd sizes, draft model tp=4": Case("tp=4", repeated(padded(4), draft_kv_repeat=4), experts=False, model="plain-odd-eagle3", drafts=3),
    **{
        f"odd sizes in {form} tp={tp}": Case(
            f"tp={tp}",
            replace(padded(tp, fleets.everywhere(form, q_heads=tp, delta_heads=tp, ffn=tp)), kv_repeat=max(1, tp // 2)),
            # One device that stands for all rounds the same parts of an activation, which padding makes even.
            padded(tp, fleets.everywhere(form, q_heads=tp, delta_heads=tp, ffn=tp)),
            experts=False,
            batch=4,
            model="odd",
        )
        for form, tp in (("w8a8", 4), ("w8a8_dynamic", 2), ("w8a8_dynamic", 4))
    },
    "w4a8 fused": Case("dp=2,tp=2", replace(W4, fused_experts=True), W4, drafts=1, collectives=FUSED),
    **{
        f"prompts shared: {kind}, {mesh}, {chunk}": Case(
            mesh,
            replace(GROUPED if spread else PLAIN, sliced=True),
            experts="plain" not in kind or "moe" in kind or "across" in kind,
            model=kind,
            chunk=chunk,
            drafts=0 if kind in ("plain", "plain-across", "plain-biased") else 1,
            batch=batch,
            collectives=DISPATCH if spread else (),
            expert_parallel=spread,
        )
        for kind, mesh, chunk, batch, spread in (
            *((kind, "tp=2", 4, 2, True) for kind in ("latent", "sparse", "shared-index", "biased", "small", "next", "plain-across")),
            *((kind, "tp=4", 8, 2, True) for kind in ("latent", "sparse", "small")),
            *((kind, "dp=2,tp=2", 8, 3, True) for kind in ("latent", "shared-index", "biased", "plain-moe-eagle3")),
            *((kind, "tp=2", 8, 1, False) for kind in ("plain", "plain-biased", "plain-eagle3", "latent")),
        )
    },
    **{
        f"prompts shared: {name}": Case(
            "tp=2",
            replace(variant, sliced=True),
            variant,
            experts=experts,
            model=model,
            chunk=8,
            collectives=DISPATCH if experts else (),
        )
        for name, model, experts, variant in (
            ("w8a8_dynamic everywhere", "biased", True, fleets.everywhere("w8a8_dynamic", ffn=2)),
            ("w4a16 everywhere", "biased", True, fleets.everywhere("w4a16")),
            ("w8a8 everywhere", "next", True, fleets.everywhere("w8a8", delta_heads=2)),
            ("formats differ, latent", "latent", True, fleets.mixed()),
            ("int8 cache", "plain", False, replace(INT8_CACHE, kv_repeat=1)),
            ("formats differ", "small", True, fleets.mixed()),
            ("int8 latents", "sparse", True, INT8_LATENTS),
            ("int8 latents, shared index", "shared-index", True, INT8_LATENTS),
        )
    },
}


def collectives_of(partitioned: PartitionedProgram) -> set[str]:
    return {f"{kind} {group}" for kind, group, _ in partitioned.collectives}


def close(actual: torch.Tensor, want: torch.Tensor, what: str) -> None:
    difference = float((actual - want).abs().max()) if actual.numel() else 0.0
    assert difference < TOLERANCE, f"{what} differ by {difference}"


# Of each kind of layer, quantisation and collective one.
SHORT = (
    *("dense tp=2", "in parts", "idle group", "odd sizes tp=2", "w8a8 everywhere, spread dp=2,tp=2", "w4a8_dynamic everywhere, dense tp=2"),
    *("w4a8 fused", "int8 cache tp=2", "fused projections tp=2", "formats of parts differ, spread", "draft model, experts tp=2"),
    *("shared index dp=2,tp=2", "biased dp=2,tp=2", "prompts shared: small, tp=2, 4", "prompts shared: int8 latents"),
    "prompts shared: plain-moe-eagle3, dp=2,tp=2, 8",
)


@pytest.mark.short_cases(*SHORT)
@pytest.mark.parametrize("name", CASES)
def test_every_group_gives_what_one_device_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are the head's own in some steps; in others all, some or none of them are right."""
    case = CASES[name]
    # A step has fewer tokens here than a device has matrix cores.
    monkeypatch.setattr(variants, "FEWEST_TOKENS", 1)
    mesh = Mesh.parse(case.mesh)
    live = case.live or (case.batch,) * mesh.axis("dp")
    fleet = fleets.Fleet(fleets.model(case.variant, experts=case.experts, name=case.model), mesh, case.expert_parallel, drafts=case.drafts)
    one_device = fleets.model(case.against, experts=case.experts, name=case.model)
    devices = [fleets.OneDevice(one_device, case.drafts) for _ in live]
    answers = fleets.answers(one_device, case.batch, live, 1 + case.steps * (case.drafts + 1))
    serving = fleets.Serving(case.batch, case.drafts, live, case.chunk)
    flipped = 0
    for n, (bucket, inputs) in enumerate(serving.steps(case.steps)):
        planted = enumerate(devices) if case.drafts and n > 1 else ()
        forced = [force(serving, group, fleet, device, answers[group]) for group, device in planted]
        outputs = fleet.step(bucket, inputs)
        want = [device.step(bucket, own) for device, own in zip(devices, inputs, strict=True)]
        for group, (a, b) in enumerate(zip(outputs, want, strict=True)):
            valid, live_rows = fleets.valid_positions(bucket, inputs[group]), inputs[group]["request_slots"] > 0
            difference = (a["logits"][valid] - b["logits"][valid]).abs().amax(-1)
            # A group may be idle. What is no number is not close either.
            bounds = FLIPPED * b["logits"][valid].abs().amax(-1)
            assert (difference < bounds).all(), f"step {n}, group {group}: logits differ by {difference.max()}"
            flipped += int((difference >= TOLERANCE).sum())
            assert torch.equal(a["tokens"][valid], b["tokens"][valid])
            for output in set(a) - {"logits", "tokens"}:
                assert torch.equal(a[output][live_rows], b[output][live_rows]), f"step {n}, group {group}: {output}"
            for row, right in enumerate(forced[group] if forced else []):
                assert right is None or a["counts"][row] == min(right, int(inputs[group]["drafts"][row])) + 1
        serving.commit(bucket, inputs, outputs)
    assert flipped <= (case.variant.formats != PLAIN.formats), f"{flipped} rows of logits differ by {TOLERANCE} or more"
    for group, device in enumerate(devices):
        assert serving.output[group] == [answer[: len(row)] for row, answer in zip(serving.output[group], answers[group], strict=True)]
        for leaf, mine, theirs in zip(fleet.names, fleet.pool(group), device.pool(), strict=True):
            # Padding writes to page, slot and request slot 0, in no particular way; repeated heads are repeated in the pools too.
            heads = 1 if leaf.endswith(("k_scale", "v_scale")) else 2
            if leaf.endswith("packed"):
                width = one_device.config.kv_lora_rank
                mine, theirs = (torch.cat(unpacked(pool, width, torch.float32), -1) for pool in (mine, theirs))
            copies = mine.shape[heads] // theirs.shape[heads] if mine.dim() == 4 or heads == 1 else 1
            close(mine[1:], theirs[1:].repeat_interleave(copies, heads) if copies > 1 else theirs[1:], f"group {group}: {leaf}")
    check_collectives(case, fleet.partitioned(serving.decode))


def force(serving: Any, group: int, fleet: Any, device: Any, answers: Sequence[Sequence[int]]) -> list[int | None]:
    """Plants the same drafts in the request slots of all ranks of a group and of the one device."""
    (right, *others) = [serving.force(group, pool, answers) for pool in (*fleet.request_slots(group), device.state["request_slots"])]
    assert others == [right] * len(others)
    return right


def check_collectives(case: Case, partitioned: PartitionedProgram) -> None:
    used = collectives_of(partitioned)
    assert set(case.collectives) <= used
    assert not ({*DISPATCH, GATHER[1]} - set(case.collectives)) & used
    if partitioned.mesh.axis("dp") > 1:
        assert not {text for text in used if not text.endswith("tp")} - set(case.collectives), "nothing else crosses groups"
    drafting = ("extend_draft_cache", "draft", "extend_draft_cache_own")[: case.drafts + (case.drafts > 0)]
    config = fleets.model(experts=case.experts, name=case.model).config
    kinds = set(config.layer_kinds)
    if case.drafts > 1 and getattr(config, "index_share_for_mtp_iteration", False):
        drafting = (*drafting, "draft_own")
    assert set(bodies(partitioned.graph)) == {*kinds, *drafting}, "each kind of layer is traced once"


def test_requests_of_groups_differ() -> None:
    """Otherwise a group that served another's requests would pass."""
    fleet = fleets.Fleet(fleets.model(GROUPED), Mesh.parse("dp=2,tp=2"))
    bucket, inputs = next(fleets.Serving(2, 0, [2, 2]).steps(0))
    first, second = fleet.step(bucket, inputs)
    assert (first["logits"] - second["logits"]).abs().max() > 0.1


@pytest.mark.parametrize("variant", [W8, W4], ids=["w8a8", "w4a8"])
def test_quantised_models_are_other_models(variant: Variant) -> None:
    """Their logits are close to those of the floats and not equal, so the test above compares quantised products."""
    bucket, (inputs,) = next(fleets.Serving(2, 0, [2]).steps(0))
    exact, rounded = (fleets.OneDevice(fleets.model(v)).step(bucket, inputs)["logits"] for v in (PLAIN, variant))
    error = float((exact - rounded).square().mean().sqrt() / exact.std())
    assert 1e-3 < error < (0.8 if variant is W4 else 0.25)


@pytest.mark.parametrize(("mesh", "batch", "drafts"), [("tp=2", 2, 1), ("tp=4", 4, 0), ("dp=2,tp=2", 3, 0), ("dp=2,tp=2", 2, 0)])
def test_tokens_without_logits_are_the_same_tokens(mesh: str, batch: int, drafts: int) -> None:
    """Each device samples its share of the rows with their log probabilities; a batch that does not divide is sampled whole."""
    where = Mesh.parse(mesh)
    variant = repeated(GROUPED) if where.axis("tp") == 4 else GROUPED
    options = {"drafts": drafts, "max_logprobs": 3}
    loud, quiet = (fleets.Fleet(fleets.model(variant), where, emit_logits=emit, **options) for emit in (True, False))
    serving, shares = fleets.Serving(batch, drafts, [batch] * where.axis("dp")), batch % where.axis("tp") == 0
    for bucket, greedy in serving.steps(1):
        inputs = sampled(greedy, batch)
        want, outputs = loud.step(bucket, inputs), quiet.step(bucket, inputs)
        assert any("all_to_all_single" in text for text in collectives_of(quiet.partitioned(bucket))) == shares
        for a, b in zip(outputs, want, strict=True):
            assert set(b) - set(a) == {"logits"}
            for name, value in a.items():
                torch.testing.assert_close(value, b[name], rtol=0, atol=1e-5)
            assert not a["top_ids"][0].any()
            assert not a["chosen_logprobs"][0].any()
            top = a["top_logprobs"][1:]
            assert (top.exp().sum(-1) < 1 + 1e-5).all()
            assert (top[..., 0] >= a["chosen_logprobs"][1:]).all()
        serving.commit(bucket, inputs, outputs)
    assert len({str(row) for group in serving.output for row in group}) > 1


def sampled(groups: Sequence[dict[str, torch.Tensor]], batch: int) -> list[dict[str, torch.Tensor]]:
    """The inputs with a temperature and other random numbers in each row, so that mixed-up rows are noticed."""
    spread, wanted = torch.linspace(0.05, 0.95, batch), (torch.arange(batch) > 0).int()
    changed = []
    for group, inputs in enumerate(groups):
        column = torch.arange(inputs["uniform"].shape[1]) * 0.37
        numbers = (spread[:, None] * 7 + group * 0.3 + column) % 1
        changed.append({**inputs, "temperature": 0.5 + spread, "uniform": numbers, "logprobs": wanted})
    return changed
