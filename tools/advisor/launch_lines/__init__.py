"""Reads launch lines of SGLang and vLLM, and says what of each is built and served here."""
