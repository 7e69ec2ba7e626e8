"""Scripts in processes that cannot import hf_relpos, as on a machine where it is not installed."""

import os
from pathlib import Path

from launching import run_code


ABSENT = """
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_relpos":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())
try:
    import hf_relpos
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("hf_relpos can be imported")
"""


def run_without_package(script: str, folder: Path, *arguments: str) -> str:
    """Run a script where hf_relpos cannot be imported, with a cache of its own and no network.

    Args:
        folder: the working folder; holds the cache.

    Returns:
        What it printed.

    Raises:
        AssertionError: for an exit code other than 0, with all that it printed.
    """
    code = f'{ABSENT}\n{script}\nassert "hf_relpos" not in sys.modules\n'
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "HF_MODULES_CACHE")}
    environment |= {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return run_code(code, *arguments, env=environment, cwd=folder).stdout
