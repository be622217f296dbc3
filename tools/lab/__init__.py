"""The laboratory: comparisons with other engines, training of the bundled model, calibration of the planner. Not in the wheel."""
