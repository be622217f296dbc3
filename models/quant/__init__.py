"""Weights in other formats than the model computes in: which, how they are declared and made, and the products that read them."""

from .product import linear, local_row_parallel, local_swiglu, row_parallel, swiglu

__all__ = ["linear", "local_row_parallel", "local_swiglu", "row_parallel", "swiglu"]
