"""Calibration of relative terms on unlabelled text, in closed form."""
