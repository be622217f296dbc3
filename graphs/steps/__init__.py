"""Kinds of steps: one record each, which says what whoever sizes, traces, packs, schedules or checks steps must know."""
