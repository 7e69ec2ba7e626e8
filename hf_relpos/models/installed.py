"""Modules of the installed package that the code of a saved model lacks.

A model on the Hub runs its own two files. The installed package registers additional modules here by their full names;
they are imported when they are first needed.
"""

import importlib
from typing import Any


_modules: dict[str, str] = {}


def register_module(role: str, module: str) -> None:
    """Register a module of the package for a role in the models. Idempotent.

    Args:
        role: `"checks"` (of a configuration), `"inputs"` (checks of inputs), `"capabilities"` (of a configuration),
            `"loading"` (checks of a checkpoint), `"families"` (checkpoints of other architectures), or `"bundle"`
            (the code of a saved model).
        module: full name of the module.
    """
    _modules[role] = module


def installed(role: str) -> Any:
    """Import the module for a role; None if the package is not installed."""
    return importlib.import_module(_modules[role]) if role in _modules else None
