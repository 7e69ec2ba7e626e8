"""What the installed package adds to its models. Registration hands it in; the code of a saved model lacks it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Installed:
    """Modules of the package, each None where there are none.

    Attributes:
        bundle: writes the code of a saved model.
        capabilities: derives what backends can do with a configuration.
        checks: checks configurations and arguments.
        families: function that returns the module which reads checkpoints of other architectures.
        loading: loads models with checks.
    """

    bundle: Any = None
    capabilities: Any = None
    checks: Any = None
    families: Callable[[], Any] = lambda: None
    loading: Any = None


INSTALLED = Installed()
