"""The commands of `npucompile`, one file each."""
