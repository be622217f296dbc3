"""Constants of the command line, readable without loading torch; tests hold them to what they name."""

from __future__ import annotations

DEFAULT_BUCKETS = (1, 2, 4, 8, 16)
DEFAULT_PREFILL = (32, 128)
DTYPES = ("float32", "bfloat16")
TARGETS = ("cpu", "ascend-a3", "ascend-a2")
SCHEMES = ("none", "w8a8", "w4a8")
MAX_LOGPROBS = 20
"""As many as OpenAI's API knows."""
MAX_DRAFTS = 7
"""The NPU's recurrent kernel verifies at most 8 tokens of a request at once."""
