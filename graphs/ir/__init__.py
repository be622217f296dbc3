"""The graph itself: recorded from a program, made of bodies, flattened, outlined."""
