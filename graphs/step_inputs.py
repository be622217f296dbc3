"""Names of graphs/steps/ that backends import from here."""

from .steps.inputs import NON_FINITE as NON_FINITE
from .steps.inputs import OPTIONAL_ROWS as OPTIONAL_ROWS
from .steps.prefill import PREFILL
from .steps.table import kind_of as kind_of

LEAST_CHUNK = PREFILL.least
"""Tokens a row, with padding, of a prefill step whose sizes are values."""
