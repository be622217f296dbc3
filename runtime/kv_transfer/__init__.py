"""Hands what a prefill server has computed of a prompt to a decode server: who owns what when, and what moves over a transfer engine."""
