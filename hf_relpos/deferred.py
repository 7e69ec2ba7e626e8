"""Act when a module is first imported: registration waits for Transformers' Auto classes, or a module of ours.

Torch and Transformers take seconds to import, and `hf-relpos --help` needs neither. So `import hf_relpos` imports them
only where the program has done so; else it watches their import.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


AUTO_CLASSES = "transformers.models.auto.configuration_auto"  # which all of them import
# Modules of these packages import each other, and the Auto classes, in the course of their own import.
WATCHED = (
    "transformers",
    *(f"{__package__}.{room}" for room in ("host", "products", "attention", "schemes", "models", "registration")),
)


def when_auto_classes_are_imported(action: Callable[[], object]) -> None:
    """Call `action` now if the Auto classes are there; else once they are, after the import that brings them.

    Exceptions of the action end that import.
    """
    when_imported(AUTO_CLASSES, action, WATCHED)


def when_imported(name: str, action: Callable[[], object], watched: Sequence[str] = ()) -> None:
    """Call `action` now if a module is there; else once it is, after the import that brings it.

    Exceptions of the action end that import.

    Args:
        name: of the module.
        action: is called once.
        watched: beginnings of the names of modules whose import has to end first; by default the name of its package.
    """
    package = name.partition(".")[0]
    if name in sys.modules and not _under_way(package):
        action()
    else:
        sys.meta_path.insert(0, _Watcher(name, action, tuple(watched) or (package,)))


def _under_way(package: str) -> bool:
    """Whether a module of a package is being imported."""
    return any(
        getattr(getattr(module, "__spec__", None), "_initializing", False)
        for name, module in list(sys.modules.items())
        if f"{name}.".startswith(f"{package}.")
    )


class _Watcher(MetaPathFinder):
    """Finds what the other finders find, and counts the watched modules that are being executed."""

    def __init__(self, name: str, action: Callable[[], object], watched: tuple[str, ...]) -> None:
        self.name, self.watched = name, watched
        self.action: Callable[[], object] | None = action
        self.executing = 0
        self.lock = threading.RLock()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As the finders after this one; the loader of a watched module is wrapped."""
        if self.action is None or not fullname.startswith(self.watched):
            return None
        finders = list(sys.meta_path)
        after = finders[finders.index(self) + 1 if self in finders else 0 :]  # another watcher among them
        specs = (finder.find_spec(fullname, path, target) for finder in after if hasattr(finder, "find_spec"))
        spec: Any = next(filter(None, specs), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Executing(spec.loader, self)
        return spec

    def count(self, change: int) -> None:
        """One module more, or one less, is being executed; after the last one the action is due."""
        with self.lock:
            self.executing += change
            if self.executing or self.name not in sys.modules or self.action is None:
                return
            action, self.action = self.action, None
            if self in sys.meta_path:
                sys.meta_path.remove(self)
        action()


class _Executing:
    """A loader that tells a watcher when it begins and ends; from then on the module has its own loader."""

    def __init__(self, loader: Any, watcher: _Watcher) -> None:
        self.loader = loader
        self.watcher = watcher

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
