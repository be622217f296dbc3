"""The artifact of a build on disk: content-addressed files, a manifest and weights."""
