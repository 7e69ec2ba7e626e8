"""Names of before 0.1.0. They work until 0.2.0, with a `FutureWarning` that says the new one."""

import functools
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar


P = ParamSpec("P")
T = TypeVar("T")

# Values of `optimize(padding=)`, now `unpad`, and of HF_RELPOS_FAST_PRODUCTS, now HF_RELPOS_ONEDNN.
UNPAD = {"zeros": "pad_token", "mask": "attention_mask", "stock": "never"}
ONEDNN = {"0": "off", "unpacked": "no-prepack", "1": "on"}
# Environment variables by their new names.
VARIABLES = {"HF_RELPOS_UNPAD": ("HF_RELPOS_PADDING", UNPAD), "HF_RELPOS_ONEDNN": ("HF_RELPOS_FAST_PRODUCTS", ONEDNN)}
# Options of the command line by their new names.
OPTIONS = {
    "--position-embedding-type": "--scheme",
    "--position-options": "--option",
    "--method-options": "--method-option",
    "--texts": "--text",
    "--dtype": "--precision",
    "--unpad": "--padding",
}


def warn(old: str, new: str, level: int = 3) -> None:
    """Warn that `old` is now called `new`, by default at the caller of the caller."""
    warnings.warn(f"{old} is now {new}; the old name works until hf_relpos 0.2.0", FutureWarning, stacklevel=level)


def rename_arguments(**names: tuple[str, dict[Any, Any]]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a function take keyword arguments by their old names.

    Args:
        names: the new name of each, and the new values by those that are other than before.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            renamed = {}
            for old in names.keys() & kwargs.keys():
                new, values = names[old]
                renamed[new] = values.get(kwargs[old], kwargs.pop(old))
                warn(f"{function.__name__}({old}=)", f"{new}={renamed[new]!r}")
            return function(*args, **kwargs, **renamed)  # one that is given twice is a TypeError

        return call

    return decorate


def old_names(module: str, names: dict[str, str], level: int = 3) -> Callable[[str], Any]:
    """The function `__getattr__` of a module that has old names.

    Args:
        names: where each is now, from the module.
        level: of the caller above `warn`.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn(f"{module}.{name}", f"{module}.{names[name]}", level)
        return functools.reduce(getattr, names[name].split("."), sys.modules[module])

    return find


def variable(name: str, default: str = "") -> str:
    """The value of an environment variable, by its new or its old name."""
    old, values = VARIABLES[name]
    if name in os.environ or old not in os.environ:
        return os.environ.get(name, default)
    value = values.get(os.environ[old], os.environ[old])
    warn(f"{old}={os.environ[old]}", f"{name}={value}")
    return value
