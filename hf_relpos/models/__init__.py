"""The configuration and the models."""

from .installed import register_module


# Modules that saved code does not contain; each is imported when it is first needed.
register_module("checks", f"{__name__}.configuration_checks")
register_module("inputs", f"{__name__}.inputs")
register_module("capabilities", f"{__name__}.capabilities")
register_module("loading", f"{__name__}.loading")
register_module("bundle", f"{__name__}.bundle")
register_module("families", f"{__package__.rpartition('.')[0]}.families.loading")
