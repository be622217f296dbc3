"""The backend of AOTInductor packages for this machine's CPU."""

from .backend import BACKEND as BACKEND
