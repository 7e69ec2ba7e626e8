"""Remove local paths and access tokens from files that are uploaded."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


# An absolute path, or a path relative to a home or working folder, of POSIX or Windows.
LOCAL = re.compile(r"(/|~|\.{1,2}[/\\]|[A-Za-z]:[/\\]|\\\\|file:)")
# Fields of paths from older releases, such as `special_tokens_map_file`, `name_or_path` and `cache_dir`.
FIELD = re.compile(r".*(_file|_path|_dir)")
# Private values of any field: a path in the home of a user, and an access token.
PRIVATE = re.compile(r"(file://)?(/home/|/Users/|/root/|~[/\\]|[A-Za-z]:[/\\]Users[/\\]).+|hf_[A-Za-z0-9]{20,}")


def without_local_paths(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Remove local paths and access tokens from the fields of a configuration, nested ones included; Hub ids stay."""
    return {
        key: without_local_paths(value) if isinstance(value, Mapping) else value
        for key, value in fields.items()
        if not (isinstance(value, str) and _is_private(key, value))
    }


def _is_private(key: str, value: str) -> bool:
    return PRIVATE.fullmatch(value) is not None or bool(FIELD.fullmatch(str(key)) and LOCAL.match(value))


def last_name(folder: str | Path) -> str:
    """The name of a folder without its parents."""
    return Path(folder).expanduser().resolve().name or "source"
