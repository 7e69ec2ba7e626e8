"""The error of a calibration."""


class CalibrationError(ValueError):
    """Text that is too short to fit to, or a folder that cannot be written; says what to do about it."""
