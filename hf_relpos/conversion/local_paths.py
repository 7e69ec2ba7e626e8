"""Paths of a machine, which files that travel to a Hub must not hold."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


# An absolute path, or one from a home or the working folder; of POSIX or Windows.
LOCAL = re.compile(r"(/|~|\.{1,2}[/\\]|[A-Za-z]:[/\\]|\\\\|file:)")
# Of tokenizers and models of older releases, such as `special_tokens_map_file`, `name_or_path` and `cache_dir`.
FIELD = re.compile(r".*(_file|_path|_dir)")


def without_local_paths(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration but for those that name a file or folder of a machine; Hub ids stay."""
    return {
        key: value
        for key, value in fields.items()
        if not (FIELD.fullmatch(key) and isinstance(value, str) and LOCAL.match(value))
    }


def last_name(folder: str | Path) -> str:
    """The name of a folder without what it lies in."""
    return Path(folder).expanduser().resolve().name or "source"
