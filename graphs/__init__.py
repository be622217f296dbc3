"""What a program is: primitives, tracing, sharding, passes."""
