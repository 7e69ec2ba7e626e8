"""Modules of the installed package that the code of a saved model goes without.

A model on the Hub computes with its own two files. Where hf_relpos is installed, the package registers here what it
adds to them, by the full names of modules, which are imported when they are first needed.
"""

import importlib
from typing import Any


_modules: dict[str, str] = {}


def register_module(role: str, module: str) -> None:
    """Let a module of the package play a role in the models. Idempotent.

    Args:
        role: `"checks"` of a configuration; `"inputs"`, for checks of these; `"capabilities"`, for what follows from
            the terms of a configuration; `"loading"`, for checks of a checkpoint; `"families"`, for checkpoints of
            other architectures; `"bundle"`, for the code of a model that is saved.
        module: its full name.
    """
    _modules[role] = module


def installed(role: str) -> Any:
    """The module that plays a role, imported; None where the package is not installed."""
    return importlib.import_module(_modules[role]) if role in _modules else None
