"""How many processors this process may use: those that it sees, and the time that its container gives it."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))  # of version 2 of Linux's control groups, and of 1


def quota(cgroups: Path = CGROUPS, own: Path = OWN) -> float | None:
    """How many processors' time the control groups of this process give it, the least of them; None for no limit.

    Args:
        cgroups: where they are mounted.
        own: lines of hierarchy:controllers:path, the groups of this process.
    """
    found: list[float] = []
    with suppress(OSError):
        for line in own.read_text("utf-8").splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and "cpu" not in kinds.split(","):
                continue
            root = cgroups / "cpu" if kinds else cgroups
            group = root / path.strip("/")  # which is not there where the container sees its own group as the root
            for folder in (group, *group.parents[: len(group.parts) - len(root.parts)]):
                found += _limits(folder)
    return min(found, default=None)


def _limits(folder: Path) -> Iterator[float]:
    for names in FILES:
        with suppress(OSError, ValueError):  # of version 2: "max"
            time, period = map(int, " ".join((folder / name).read_text("utf-8") for name in names).split())
            if time > 0:
                yield time / period


def seen() -> int:
    """How many processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores() -> int:
    """How many threads can compute at once."""
    limit = quota()
    return seen() if limit is None else max(1, min(seen(), int(limit)))


def threads_of(value: str) -> int | None:
    """PyTorch's threads that `--threads` asks for; None to leave them as they are.

    Args:
        value: a number; "auto" for `cores` where the container has a quota below what the process sees; or "".

    Raises:
        ValueError: for anything else.
    """
    if value in ("", "auto"):
        return cores() if value and cores() < seen() else None
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"threads = {value!r} is neither 'auto' nor a number")
    return int(value)
