"""Training of the bundled model."""
