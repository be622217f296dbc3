"""Constants of the command line, apart from the modules they describe so that `--help` need not load torch; a test compares both."""

from __future__ import annotations

from ..notation import PrefillSize

DEFAULT_BUCKETS = (1, 2, 4, 8, 16)
DEFAULT_PREFILL = (PrefillSize(32), PrefillSize(128))
DTYPES = ("float32", "bfloat16")
TARGETS = ("cpu", "ascend-a3", "ascend-a2")
NPU_BACKENDS = ("ge", "aclgraph")
BACKENDS = ("inductor", "eager", "null", *NPU_BACKENDS)
SCHEMES = ("none", "w8a8", "w8a8-all", "w4a8", "w4a16")
KV_CACHE_DTYPES = ("auto", "bfloat16", "int8")
CANN_RELEASES = ("8.3", "8.5", "9.0", "9.1")
OPERATOR_PACKAGES = ("sgl-kernel-npu", "vllm-ascend")
WEIGHTS = ("auto", "stored", "bound")
MAX_LOGPROBS = 20
"""The most that OpenAI's API allows."""
MAX_DRAFTS = 7
"""The NPU's recurrent kernel verifies at most 8 tokens of a request at once."""
