"""Paths of this machine and access tokens: taken out of configurations."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


# Access tokens of the Hub.
TOKEN = r"(?:hf_jwt_[A-Za-z0-9._-]{30,}|(?:hf_(?:oauth_)?|api_org_)[A-Za-z0-9]{30,})"
# The beginning of a path in the home folder of a user, of POSIX or Windows, also with backslashes escaped as in JSON.
HOME = r"(?:/home/|/Users/|/root/|[A-Za-z]:(?:/|\\{1,2})Users(?:/|\\{1,2}))"
# Private values of any field of a configuration.
PRIVATE = re.compile(rf"(file://)?({HOME}|~[/\\]).+|{TOKEN}")
# An absolute path, or a path relative to a home or working folder, of POSIX or Windows.
LOCAL = re.compile(r"(/|~|\.{1,2}[/\\]|[A-Za-z]:[/\\]|\\\\|file:)")
# Fields of paths from older releases of Transformers, such as `special_tokens_map_file` and `cache_dir`.
FIELD = re.compile(r".*(_file|_path|_dir)")


def without_local_paths(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Remove local paths and access tokens from the fields of a configuration, nested ones included; Hub ids stay."""
    return {
        key: without_local_paths(value) if isinstance(value, Mapping) else value
        for key, value in fields.items()
        if not (
            isinstance(value, str) and (PRIVATE.fullmatch(value) or (FIELD.fullmatch(str(key)) and LOCAL.match(value)))
        )
    }


def last_name(folder: str | Path) -> str:
    """The name of a folder without its parents."""
    return Path(folder).expanduser().resolve().name or "source"
