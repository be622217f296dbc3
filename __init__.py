"""npucompile: pure-function LLM programs, compiled per batch bucket ahead of time and served from a verified artifact."""

import os

# torch_npu registers itself as an autoloaded torch backend; without CANN that makes a bare `import torch` fail.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

__version__ = "0.1.0"
