"""What a build leaves on disk: content-addressed files, one manifest, shards of weights."""
