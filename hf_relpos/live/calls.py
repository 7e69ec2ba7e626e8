"""Which threads are inside a call of an optimized model, so that `undo` lets calls in flight end right."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Calls:
    """Counts calls by thread. Calls that begin while `undo` waits begin after it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.depths: dict[int, int] = {}
        self.changing: int | None = None  # the thread that changes models

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A call of this thread."""
        thread = threading.get_ident()
        with self.changed:
            if thread not in self.depths:
                self.changed.wait_for(lambda: self.changing in (None, thread))
            self.depths[thread] = self.depths.get(thread, 0) + 1
        try:
            yield
        finally:
            with self.changed:
                self.depths[thread] -= 1
                if not self.depths[thread]:
                    del self.depths[thread]
                    self.changed.notify_all()

    @contextmanager
    def none(self) -> Iterator[None]:
        """No other thread is inside a call; those that were have ended theirs."""
        thread = threading.get_ident()
        with self.changed:
            self.changed.wait_for(lambda: self.changing in (None, thread))
            before, self.changing = self.changing, thread
            self.changed.wait_for(lambda: not self.depths.keys() - {thread})
        try:
            yield
        finally:
            with self.changed:
                self.changing = before
                self.changed.notify_all()


CALLS = _Calls()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=CALLS.__init__)  # type: ignore[misc]  # locks of threads that are not there
