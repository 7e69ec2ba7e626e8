"""Packages that only some commands need, and the extra of this package that brings each."""

import importlib
from typing import Any


# What each extra installs, for commands that work wherever this package came from.
PACKAGES = {
    "plot": "'matplotlib>=3.8'",
    "sts": "'scipy>=1.11'",
}


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """A module of an optional package, imported on first use.

    Args:
        module: its full name.
        extra: that installs it.
        purpose: words before the name of the package, such as "plots need".

    Raises:
        ModuleNotFoundError: without it; names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise ModuleNotFoundError(f"{purpose} {package}: pip install {PACKAGES[extra]}", name=error.name) from error
