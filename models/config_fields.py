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
    "add_cross_attention", "cross_attention_hidden_size", "keys_to_ignore_at_inference", "pruned_heads", "tf_legacy_loss", "use_bfloat16",
    # Which kernels compute the same, how devices share it, and how long a text some tool takes.
    "attn_implementation", "base_model_pp_plan", "base_model_tp_plan", "cache_implementation", "experts_implementation", "flash_attn",
    "fuse_cross_entropy", "fuse_norm", "fuse_swiglu", "fused_linear_cross_entropy", "max_seq_len", "max_sequence_length",
    "model_max_length", "num_logits_to_keep", "seq_length", "use_flash_attention", "use_flash_attention_2", "use_flash_attn",
    "use_liger_kernel", "use_sdpa",
    # Where a model is from.
    "base_model", "base_model_name_or_path", "custom_pipelines", "language", "license", "model_name", "model_name_or_path", "name_or_path",
    "pipeline_tag", "tags", "transformers.js_config", "trust_remote_code",
    # Defaults of its generation; ends of text are read by registry.py.
    "begin_suppress_tokens", "bos_token_id", "decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping", "eos_token_id",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens",
    "min_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_scores", "pad_token_id", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "sep_token_id",
    "bad_words_ids", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p", "unk_token_id",
    # What only training reads.
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "aux_loss_alpha", "aux_loss_coeff", "classifier_dropout",
    "embd_pdrop", "ep_size", "gradient_checkpointing", "hidden_dropout", "hidden_dropout_prob", "init_std", "initializer_factor",
    "initializer_range", "loss_function", "loss_type", "mtp_loss_scaling_factor", "output_router_logits", "pretraining_tp", "resid_pdrop",
    "router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef", "seq_aux", "unsloth_fixed", "unsloth_version",
    "use_gradient_checkpointing", "z_loss_coefficient",
    *STORAGE,
}  # fmt: skip
"""Of any family."""

CONFIRMED: dict[str, tuple[bool | str, ...]] = {
    "is_causal": (True,),
    "position_embedding_type": ("rope", "rotary"),
    "scale_attn_weights": (True,),
    "use_rope": (True,),
}
"""Fields that say what every family computes; another value, off too, would be another model."""

_WRAPPER = {
    *WITHOUT_EFFECT,
    "audio_config", "audio_token_id", "image_token_id", "language_model_only", "text_config", "tie_word_embeddings", "video_token_id",
    "vision_config", "vision_end_token_id", "vision_start_token_id",
    "ignore_index", "media_placeholder_token_id", "projection_hidden_size", "projection_layer_norm_eps", "use_unified_vision_chunk",
    "video_placeholder",
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
    for fields in (outer, text):
        fields.only_legal(CONFIRMED)
    text.refuse_others(WITHOUT_EFFECT | known)
    if outer is not text:
        again = {name for name, value in outer.values.items() if name in text.values and text.values[name] == value}
        outer.refuse_others(_WRAPPER | again)
