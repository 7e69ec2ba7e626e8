"""BERT with relative positions for Hugging Face Transformers.

Importing this package registers `RelPosBertConfig` and its models with the Auto classes, and with PEFT where that is
installed: at once where the program has imported the Auto classes, else when it does. No other checkpoint loads
differently, and no file is read; a stock class that leaves out the relative positions of a checkpoint gives a
warning. With the environment variable HF_RELPOS_OPTIMIZE=1 (or a dtype) each model that is loaded from then on is
optimized. Names of this package are imported on first use.
"""

import ast
import importlib
import os
from pathlib import Path

from .deferred import when_auto_classes_are_imported
from .deprecation import old_names
from .version import __version__


_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))  # which type checkers read
_MODULES = {
    alias.name: f".{node.module}" for node in _STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names
}
_OLD_NAMES = {
    "check_loaded": "verify_weights",
    "fill_buffers": "initialize_buffers",
    "restore_attention": "undo_optimize",
    "unfilled_buffers": "uninitialized_buffers",
}
_OLD_NAMES |= {name: f"schemes.{name}" for name in "AttentionContext Option SCHEMES Scheme Table Terms attend".split()}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name], __name__), name)
        globals()[name] = value
        return value
    if name in _OLD_NAMES:
        return old_names(__name__, _OLD_NAMES, 4)(name)
    if not name.startswith("_"):
        try:
            return importlib.import_module(f".{name}", __name__)
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


def _register() -> None:
    from .registration import register

    register()


when_auto_classes_are_imported(_register)

if os.environ.get("HF_RELPOS_OPTIMIZE", "0") not in ("", "0"):
    from .autoload import start

    start()
