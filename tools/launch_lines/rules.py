"""All rules of the tables, by name."""

from __future__ import annotations

from . import draft_rules, layout_rules, model_rules, serve_rules, size_rules
from .verdicts import RULES

__all__ = ["RULES", "draft_rules", "layout_rules", "model_rules", "serve_rules", "size_rules"]
