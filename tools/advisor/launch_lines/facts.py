"""What a launch line says of its model, its layout and its sizes, in the terms of a build."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ....graphs.types import Mesh
from .names import named_scheme

ASCEND_NODE = 8
"""NPUs of an A2 node; a line with more of them on a node is for an A3, whose nodes have 16."""


@dataclass(frozen=True)
class LaunchFacts:
    """The values of a line by the names of the rules that read them.

    Attributes:
        engine: "sglang" or "vllm".
        values: the last value of each rule's flags, or all of them merged where they are JSON objects.
        nodes_seen: lines of the same instance, one a machine; 1 where one line stands for all.
        instances: that the script launches with these values; 1 where one line may stand for several.
    """

    engine: str
    values: Mapping[str, Any] = field(hash=False)
    nodes_seen: int = 1
    instances: int = 1

    def number(self, rule: str, default: int | None = None) -> int | None:
        """The value of a rule that is a number."""
        value = self.values.get(rule)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def has(self, rule: str) -> bool:
        """Whether a flag is given and not turned off."""
        return self.values.get(rule) not in (None, False)

    def section(self, rule: str) -> Mapping[str, Any]:
        """The value of a rule that is a JSON object; empty where there is none."""
        value = self.values.get(rule)
        return value if isinstance(value, dict) else {}

    @cached_property
    def role(self) -> str:
        """Which part of serving the instance does: "mixed", "prefill" or "decode"."""
        kv_role = {"kv_producer": "prefill", "kv_consumer": "decode"}.get(str(self.section("kv_transfer").get("kv_role")))
        mode = self.values.get("disaggregation")
        return str(mode) if mode in ("prefill", "decode") else kv_role or "mixed"

    @cached_property
    def mesh(self) -> Mesh:
        """Dp groups of tp ranks.

        SGLang's tp is the world size of an instance where attention is data parallel, and that of a replica where it is not; vLLM's is
        that of a group always.
        """
        if self.engine == "vllm":
            return _mesh(self.number("vllm_dp", 1) or 1, self.number("vllm_tp", 1) or 1)
        tp, dp = self.number("sglang_tp", 1) or 1, self.number("sglang_dp", 1) or 1
        if groups := self.number("attention_dp"):
            return _mesh(groups * dp, max(tp // groups, 1))
        return _mesh(dp, max(tp // dp, 1)) if self.has("dp_attention") else _mesh(dp, tp)

    @property
    def prefill_cp(self) -> int:
        """Ranks that share the tokens of a prompt."""
        return self.number("prefill_cp") or (self.mesh.axis("tp") if self.has("shares_prompts") else 1)

    @property
    def nodes(self) -> int:
        """Machines of the instance."""
        local, groups = self.number("dp_local") or 0, self.mesh.axis("dp")
        return self.number("nodes") or (groups // local if 0 < local < groups else self.nodes_seen)

    @property
    def drafting(self) -> str:
        """What drafts, in the words of the line; "" where nothing does, or the line leaves it to the draft model."""
        said = (self.values.get("speculation"), self.section("speculative_config").get("method"), self.values.get("spec_method"))
        return next((str(name) for name in said if name), "")

    @property
    def drafts_by_heads(self) -> bool:
        """Whether a draft head does, the model's own or an EAGLE-3 head: no other drafting is built."""
        return self.drafting.lower() in ("", "nextn", "eagle", "eagle3", "mtp") or self.drafting.lower().endswith("_mtp")

    @property
    def drafts(self) -> int:
        """k, tokens that a step drafts; 0 where the line wants them drafted by what is not built."""
        return self.asked_drafts if self.drafts_by_heads else 0

    @cached_property
    def asked_drafts(self) -> int:
        """Tokens of a step that are to be drafted, whatever drafts them."""
        if self.engine == "vllm":
            asked = self.section("speculative_config").get("num_speculative_tokens", self.number("spec_tokens", 0))
            return asked if isinstance(asked, int) else 0
        if not self.has("speculation"):
            return 0
        steps, tokens = self.number("speculative_steps"), self.number("draft_tokens")
        return steps if steps is not None else (tokens - 1 if tokens else 3)

    @property
    def draft_path(self) -> str:
        """The second checkpoint that drafts; "" where none is named."""
        return str(self.values.get("draft_model") or self.section("speculative_config").get("model") or "")

    @property
    def eagle(self) -> bool:
        """Whether an EAGLE-3 head drafts, not the model's own."""
        return "eagle3" in (self.drafting or re.sub("[-_]", "", self.draft_path)).lower()

    @cached_property
    def group_requests(self) -> int | None:
        """Most requests in flight of a dp group; None where the line does not say."""
        if self.engine == "vllm":
            return self.number("vllm_requests")
        total = self.number("sglang_requests")
        return None if total is None else -(-total // self.mesh.axis("dp"))

    @cached_property
    def buckets(self) -> tuple[int, ...]:
        """Decode batch sizes of a dp group; empty where the line leaves them to a default that it does not bound."""
        return self._vllm_buckets() if self.engine == "vllm" else self._sglang_buckets()

    def _sglang_buckets(self) -> tuple[int, ...]:
        if sizes := self.values.get("sglang_buckets"):
            return tuple(sorted(set(sizes)))
        most = self.number("sglang_max_bucket") or self.group_requests
        return sglang_series(most, self.has("speculation"), self.has("no_padding")) if most else ()

    def _vllm_buckets(self) -> tuple[int, ...]:
        sizes = self.values.get("vllm_buckets") or self.section("compilation_config").get("cudagraph_capture_sizes")
        if isinstance(sizes, list) and sizes and all(isinstance(size, int) for size in sizes):
            requests = self.group_requests
            batches = {-(-size // (self.asked_drafts + 1)) for size in sizes}
            return tuple(sorted(size for size in batches if requests is None or size <= requests)) or ((requests,) if requests else ())
        most = self.group_requests
        return vllm_series(most) if most else ()

    @property
    def pictures(self) -> bool | None:
        """Whether the line says that pictures are taken; None where it does not, for both engines take them of a model with a tower."""
        most = self.section("picture_limits").get("image")
        if self.has("text_alone") or most == 0:
            return False
        return True if self.has("multimodal") or most or self.has("media_hosts") else None

    @property
    def pool_tokens(self) -> int | None:
        """Most cached tokens of a dp group; None where the line does not say."""
        blocks, size = self.number("pool_blocks"), self.number("page")
        return self.number("pool") if blocks is None or size is None else blocks * size

    @property
    def chunk(self) -> int | None:
        """Most tokens of a prefill step as its engine counts them; None where prompts are not cut."""
        value = self.number("sglang_chunk") if self.engine == "sglang" else self.number("vllm_chunk")
        return value if value is not None and value > 0 and self.role != "decode" else None

    @property
    def context(self) -> int | None:
        """Most tokens of a request; None where the model's own context is meant."""
        value = self.number("context")
        return value if value is not None and value > 0 else None

    @property
    def scheme(self) -> str | None:
        """Scheme of the weights: what the name of the checkpoint says where the line says that it is quantised, "none" where it is not."""
        asked = self.values.get("quantization")
        if asked in (None, "none", "None", "unquant"):
            return named_scheme(str(self.values.get("model", "")))[0] if asked is None and self.engine == "vllm" else "none"
        if asked == "w8a8_int8":
            return "w8a8"
        return named_scheme(str(self.values.get("model", "")))[0]

    @property
    def c8(self) -> tuple[bool | None, bool | None]:
        """Whether vllm-ascend rounds latents to int8, and keys of indexers, where the line says so.

        Until 0.22 one switch was of indexers alone, as its runner read it; it became two. Models without an indexer ignore them.
        """
        said = self.section("additional_config")
        return said.get("enable_sparse_sfa_c8"), said.get("enable_sparse_li_c8", said.get("enable_sparse_c8"))

    def npus_per_node(self) -> int:
        """Ranks of a machine."""
        return -(-self.mesh.size // self.nodes)


def sglang_series(most: int, speculates: bool, exact: bool = False) -> tuple[int, ...]:
    """Batch sizes that SGLang captures up to a size (server_args.py, `_generate_cuda_graph_batch_sizes`, release 0.5.12)."""
    if exact:
        sizes = list(range(1, most + 1))
    elif speculates:
        sizes = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, most + 1, 16)]
    else:
        sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, most + 1, 32)]
    return tuple(sorted({size for size in sizes if size <= most} | {most}))


def vllm_series(most: int) -> tuple[int, ...]:
    """Batch sizes that vLLM captures for so many requests (vllm/config/vllm.py, `_set_cudagraph_sizes`, release 0.13.0)."""
    largest = min(most, 512)
    return tuple(sorted({size for size in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if size <= largest} | {largest}))


def _mesh(dp: int, tp: int) -> Mesh:
    return Mesh.parse(f"dp={dp},tp={tp}")
