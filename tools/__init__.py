"""The commands; the only place where the other folders are joined."""
