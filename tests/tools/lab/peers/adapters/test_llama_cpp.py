from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from npucompile.tools.lab.peers.adapters import llama_cpp as adapter
from npucompile.tools.lab.peers.loop import ArrivalTimes

VOCAB = 50


class Library(ModuleType):
    """The part of llama_cpp that is used, for a model whose next token is a hash of all tokens before it; it checks what it is given."""

    __version__ = "0.0"
    llama_log_callback = staticmethod(lambda callback: callback)
    llama_model_default_params = llama_context_default_params = staticmethod(SimpleNamespace)
    llama_model_get_vocab = llama_get_memory = staticmethod(lambda of: of)
    llama_vocab_n_tokens = staticmethod(lambda vocab: VOCAB)
    llama_log_set = llama_backend_init = llama_model_desc = staticmethod(lambda *_: None)

    def __init__(self) -> None:
        super().__init__("llama_cpp")
        self.sequences: dict[int, list[int]] = {}
        self.sizes: list[int] = []

    def llama_model_load_from_file(self, path: bytes, params: Any) -> str:
        return "" if path == b"bad.gguf" else "model"

    def llama_init_from_model(self, model: str, params: Any) -> Any:
        self.params = params
        return "context"

    def llama_memory_clear(self, memory: Any, data: bool) -> None:
        self.sequences = {}

    def llama_batch_init(self, size: int, embeddings: int, sequences: int) -> Any:
        rows = [[0] for _ in range(size)]
        return SimpleNamespace(n_tokens=0, token=[0] * size, pos=[0] * size, n_seq_id=[0] * size, logits=[0] * size, seq_id=rows)

    def llama_decode(self, context: Any, batch: Any) -> int:
        self.sizes.append(batch.n_tokens)
        self.logits: dict[int, Any] = {}
        for n in range(batch.n_tokens):
            tokens = self.sequences.setdefault(batch.seq_id[n][0], [])
            assert (batch.pos[n], batch.n_seq_id[n]) == (len(tokens), 1)
            tokens.append(batch.token[n])
            if batch.logits[n]:
                values = (ctypes.c_float * VOCAB)()
                values[following(tokens)] = 1.0
                self.logits[n] = ctypes.cast(values, ctypes.POINTER(ctypes.c_float))
        return 0

    def llama_get_logits_ith(self, context: Any, n: int) -> Any:
        return self.logits[n]


def following(tokens: list[int]) -> int:
    return sum((i + 1) * token for i, token in enumerate(tokens)) % VOCAB


def test_sequences_are_decoded_together_whatever_a_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    monkeypatch.setattr(adapter, "N_BATCH", 7)
    engine = adapter.open_engine()
    with pytest.raises(RuntimeError, match=r"does not load bad.gguf"):
        engine.load("bad.gguf", "bf16", 2, 300, 3)
    engine.load("model.gguf", "bf16", 2, 300, 3)
    assert (library.params.n_ctx, library.params.n_seq_max, library.params.n_threads) == (3 * 512, 3, 2)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 9]]
    for _ in range(2):
        expected = [list(prompt) for prompt in prompts]
        for tokens in expected:
            for _ in range(4):
                tokens.append(following(tokens))
        library.sizes.clear()
        watch = ArrivalTimes(3)
        engine.generate(prompts, 4, watch)
        assert watch.report(4)["token_ids"] == [tokens[5:] for tokens in expected]
        assert library.sizes == [7, 7, 1, 3, 3, 3]
