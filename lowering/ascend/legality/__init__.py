"""What CANN takes: a table of facts on operators, each with its public source, and the check of a graph against it."""
