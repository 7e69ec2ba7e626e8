"""What the installed package adds to its models. Registration hands it in; the code of a saved model lacks it.

Modules of the package, each None where there are none:

- `bundle` writes the code of a saved model.
- `capabilities` derives what backends can do with a configuration.
- `checks` checks configurations and arguments.
- `families()` is the module which reads checkpoints of other architectures.
- `loading` loads models with checks.
"""

from types import SimpleNamespace
from typing import Any


INSTALLED: Any = SimpleNamespace(bundle=None, capabilities=None, checks=None, families=None, loading=None)
