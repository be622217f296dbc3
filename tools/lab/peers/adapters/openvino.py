"""OpenVINO GenAI's pipeline with continuous batching, over an exported model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

CACHE_GB = 2


class OpenVino:
    """One pipeline, stepped here."""

    def __init__(self) -> None:
        import numpy
        import openvino
        import openvino_genai

        self._numpy: Any = numpy
        self._openvino: Any = openvino
        self._genai: Any = openvino_genai
        self.version: str = openvino_genai.__version__
        self._requests = 0

    def load(self, model: str, dtype: str, threads: int, max_model_len: int, max_num_seqs: int) -> str:
        """Compiles the model for the CPU."""
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_seqs = max_num_seqs
        scheduler.max_num_batched_tokens = max(2048, max_model_len)
        scheduler.enable_prefix_caching = False
        self._pipeline = self._genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})
        return "continuous batching"

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, emit: Callable[[int, Sequence[int]], None]) -> None:
        """All prompts at once, as requests of the pipeline."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        handles = []
        for prompt in prompts:
            ids = self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64))
            handles.append(self._pipeline.add_request(self._requests, ids, config))
            self._requests += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for i, handle in enumerate(handles):
                if handle.can_read():
                    for output in handle.read().values():
                        emit(i, output.generated_ids)


def open_engine() -> OpenVino:
    """The engine, imported."""
    return OpenVino()
