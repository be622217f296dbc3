"""npucompile: pure-function LLM programs, compiled per batch bucket ahead of time and served from a verified artifact."""

import os

# torch_npu registers itself as an autoloaded torch backend; without CANN that makes a bare `import torch` fail.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# The C library gives buffers as large as logits back after every step: in small pages, making them anew takes 4 to 11 % of one of 64 rows.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# Mooncake reads them when it is imported. With its own bounds a peer that was sent many segments at a time is never reached again.
os.environ.setdefault("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535")
os.environ.setdefault("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "65535")
# It says on standard error what it opens and closes.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

ISA = os.environ.get("NPUCOMPILE_ISA", "")
"""The most of the instruction sets of lowering/isa.py that this process and those that it starts may use; "" for what there is."""

__version__ = "0.1.0"
