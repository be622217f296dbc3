"""Fields of a config.json that change nothing of what a model computes; families refuse what they neither read nor find here."""

from __future__ import annotations

from collections.abc import Set

from .config import Fields

STORAGE = {"quantization_config", "mla_quantize", "moe_quantize", "quantize"}
"""How matrices are stored, which is read with the tensors (models/quant)."""

WITHOUT_EFFECT = {
    # What transformers writes into every file.
    "architectures", "auto_map", "chunk_size_feed_forward", "dtype", "finetuning_task", "id2label", "is_decoder", "is_encoder_decoder",
    "label2id", "model_type", "num_labels", "output_attentions", "output_hidden_states", "prefix", "problem_type", "return_dict",
    "task_specific_params", "tie_encoder_decoder", "tokenizer_class", "torch_dtype", "torchscript", "transformers_version", "use_cache",
    # Defaults of its generation; ends of text are read by registry.py.
    "begin_suppress_tokens", "bos_token_id", "decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping", "eos_token_id",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens",
    "min_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_scores", "pad_token_id", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "sep_token_id",
    "suppress_tokens", "temperature", "top_k", "top_p", "typical_p", "unk_token_id",
    # What only training reads.
    "attention_dropout", "aux_loss_alpha", "ep_size", "hidden_dropout", "initializer_range", "mtp_loss_scaling_factor",
    "output_router_logits", "pretraining_tp", "router_aux_loss_coef", "router_jitter_noise", "seq_aux", "unsloth_fixed",
    "unsloth_version",
    *STORAGE,
}  # fmt: skip
"""Of any family."""

_WRAPPER = {
    *WITHOUT_EFFECT,
    "audio_config", "audio_token_id", "image_token_id", "language_model_only", "text_config", "tie_word_embeddings", "video_token_id",
    "vision_config", "vision_end_token_id", "vision_start_token_id",
}  # fmt: skip
"""Of a file that wraps the text model: other parts, and what is read in both."""


def refuse_unknown(outer: Fields, text: Fields, known: Set[str]) -> None:
    """Refuses fields of a file that are neither read nor without effect.

    Args:
        outer: the whole file, which may wrap the text model and say again what it says.
        text: fields of the text model, all of which were asked for that are read.
        known: fields of the family that need not be asked for.

    Raises:
        ConfigError: naming the field.
    """
    text.refuse_others(WITHOUT_EFFECT | known)
    if outer is not text:
        again = {name for name, value in outer.values.items() if name in text.values and text.values[name] == value}
        outer.refuse_others(_WRAPPER | again)
