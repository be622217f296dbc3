"""Text and tokens: the tokenizer, and what single tokens look like."""
