"""The laboratory: comparisons with other engines, calibration of the planner. Not in the wheel."""
