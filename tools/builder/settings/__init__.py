"""The settings of a build, a record each."""
