"""One program on many devices: layouts, sharding rules, manual regions, partitioning."""
