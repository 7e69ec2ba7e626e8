"""The error of a calibration."""


class CalibrationError(ValueError):
    """Text that nothing can be fitted to, or a folder that cannot be written; says what to do about it."""
