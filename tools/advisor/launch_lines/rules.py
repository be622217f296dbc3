"""All rules of the tables, by name."""

from __future__ import annotations

from . import layout_rules, model_rules, picture_rules, serve_rules
from .verdicts import RULES

__all__ = ["RULES", "layout_rules", "model_rules", "picture_rules", "serve_rules"]
