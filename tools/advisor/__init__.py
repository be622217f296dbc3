"""The adviser: predicts and searches layouts, and reads launch lines of other engines. Nothing of the core imports it."""
