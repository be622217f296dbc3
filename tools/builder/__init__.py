"""From the options of a build to its artifact."""
