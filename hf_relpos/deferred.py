"""Registration when it can first matter: not before Transformers' Auto classes, or a module of ours, are imported.

Torch and Transformers take seconds to import, and `hf-relpos --help` needs neither. So `import hf_relpos` imports them
only where the program has done so; else it watches their import.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


AUTO_CLASSES = "transformers.models.auto.configuration_auto"  # which all of them import
# Modules of these packages import each other, and the Auto classes, in the course of their own import.
WATCHED = ("transformers", *(f"{__package__}.{room}" for room in ("attention", "schemes", "models")))


def when_auto_classes_are_imported(action: Callable[[], None]) -> None:
    """Call `action` now if the Auto classes are there; else once they are, after the import that brings them.

    Exceptions of the action end that import.
    """
    if AUTO_CLASSES in sys.modules and not _under_way():
        action()
    else:
        sys.meta_path.insert(0, _Watcher(action))


def _under_way() -> bool:
    """Whether a module of Transformers is being imported."""
    return any(
        getattr(getattr(module, "__spec__", None), "_initializing", False)
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.")
    )


class _Watcher(MetaPathFinder):
    """Finds what the other finders find, and counts the watched modules that are being executed."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action
        self.executing = 0
        self.lock = threading.RLock()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As the other finders; the loader of a watched module is wrapped."""
        if self.action is None or not fullname.startswith(WATCHED):
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Executing(spec.loader, self)
                return spec
        return None

    def count(self, change: int) -> None:
        """One module more, or one less, is being executed; after the last one the action is due."""
        with self.lock:
            self.executing += change
            if self.executing or AUTO_CLASSES not in sys.modules or self.action is None:
                return
            action, self.action = self.action, None
            if self in sys.meta_path:
                sys.meta_path.remove(self)
        action()


class _Executing(Loader):
    """A loader that tells a watcher when it begins and ends; from then on the module has its own loader."""

    def __init__(self, loader: Any, watcher: _Watcher) -> None:
        self.loader = loader
        self.watcher = watcher

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the wrapped loader."""
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """As the wrapped loader, counted."""
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.watcher.count(1)
        try:
            self.loader.exec_module(module)
        finally:
            self.watcher.count(-1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)
