"""Other inference engines, measured beside ours: each in a process and a Python environment of its own."""
