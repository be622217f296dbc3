"""Turns NPU operators into GE graphs, with or without CANN on the machine."""
