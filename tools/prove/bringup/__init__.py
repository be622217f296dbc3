"""Finding the first thing that is wrong on a device: rungs from one operator to a short serve, and a report of them."""
