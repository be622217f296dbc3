"""What `import npucompile` offers: stages of pure functions, and a model to generate with."""
