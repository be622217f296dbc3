"""Programs: pure functions over trees of tensors, one file a model family."""
