"""llama.cpp through the C interface of llama-cpp-python, since its high-level class serves one sequence at a time."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

N_BATCH = 2048
"""Most tokens of one call, llama.cpp's default; it splits them into steps of 512."""


class LlamaCpp:
    """One context with a sequence a stream."""

    def __init__(self) -> None:
        import llama_cpp
        import numpy

        self._lib: Any = llama_cpp
        self._numpy: Any = numpy
        self.version: str = llama_cpp.__version__

    def load(self, model: str, dtype: str, threads: int, max_model_len: int, max_num_seqs: int) -> str:
        """Maps a GGUF file, and creates a context with room for every sequence."""
        lib = self._lib
        # Its log has a line for every tensor.
        self._quiet = lib.llama_log_callback(lambda level, text, data: print(text.decode(), end="") if level >= 4 else None)
        lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {model}")
        params = lib.llama_context_default_params()
        params.n_ctx = -(-max_model_len // 256) * 256 * max_num_seqs
        params.n_seq_max = max_num_seqs
        params.n_batch = N_BATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp creates no context of {params.n_ctx} tokens for {model}")
        self._vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(N_BATCH, 0, 1)
        described = ctypes.create_string_buffer(128)
        lib.llama_model_desc(self._model, described, len(described))
        return described.value.decode()

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, emit: Callable[[int, Sequence[int]], None]) -> None:
        """Prompts first, as many in a call as it takes; then all sequences, one token a step."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        latest = [0] * len(prompts)
        rows = [(token, at, i, at + 1 == len(prompt)) for i, prompt in enumerate(prompts) for at, token in enumerate(prompt)]
        for begin in range(0, len(rows), N_BATCH):
            self._step(rows[begin : begin + N_BATCH], latest, emit)
        for step in range(1, tokens):
            self._step([(latest[i], len(prompt) + step - 1, i, True) for i, prompt in enumerate(prompts)], latest, emit)

    def _step(self, rows: Sequence[tuple[int, int, int, bool]], latest: list[int], emit: Callable[[int, Sequence[int]], None]) -> None:
        """Decodes rows of (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for n, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.logits[n] = token, position, 1, wanted
            batch.seq_id[n][0] = sequence
        if status := self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode of {len(rows)} tokens returned {status}")
        for n, (_, _, sequence, _) in itertools.compress(enumerate(rows), [wanted for *_, wanted in rows]):
            logits = self._lib.llama_get_logits_ith(self._context, n)
            latest[sequence] = int(self._numpy.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())
            emit(sequence, [latest[sequence]])


def open_engine() -> LlamaCpp:
    """The engine, imported."""
    return LlamaCpp()
