"""What a step of a GE graph costs: from operators to bytes, operations and messages, and from those to a time."""
