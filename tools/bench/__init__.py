"""The measurements of `npucompile bench`."""
