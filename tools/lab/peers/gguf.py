"""Runs the converter of a llama.cpp checkout on a checkpoint: `python -I gguf.py CHECKOUT CHECKPOINT OUT TYPE`.

The interpreter needs what the checkout's requirements/requirements-convert_hf_to_gguf.txt names, and nothing of npucompile.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

PRE_TOKENIZER = "qwen2"
"""Written in place of the checkpoint's own, which the converter knows only of published tokenizers; benchmarks send token ids."""


def main(arguments: list[str]) -> None:
    """Converts one checkpoint.

    Raises:
        SystemExit: the converter refuses the checkpoint.
    """
    checkout, checkpoint, out, kind = arguments
    # Where torch_npu is installed without CANN its import fails, and transformers imports it where it finds it.
    probes: Any = importlib.import_module("transformers.utils.import_utils")
    find = probes._is_package_available
    probes._is_package_available = lambda name, *rest, **named: (False, "N/A") if name == "torch_npu" else find(name, *rest, **named)
    sys.path[:0] = [checkout, f"{checkout}/gguf-py"]
    converter: Any = importlib.import_module("convert_hf_to_gguf")
    # Newer checkouts keep their classes in a package.
    owner: Any = sys.modules.get("conversion", converter)
    owner.TextModel.get_vocab_base_pre = lambda model, tokenizer: PRE_TOKENIZER
    # Draft layers are left out: a target's file alone, which is what `generate` of any other engine uses.
    owner.ModelBase.no_mtp = True
    sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outfile", out, "--outtype", kind]
    converter.main()


if __name__ == "__main__":
    main(sys.argv[1:])
