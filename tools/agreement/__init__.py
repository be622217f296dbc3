"""Whether two runs of a step agree: test cases in which nothing may leak, measures and tolerances."""
