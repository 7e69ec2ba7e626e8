"""Paths of this machine and access tokens: taken out of configurations, and found in files to upload."""

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
# Private words in a file; a path in a URL is none.
TOKEN_IN_TEXT = re.compile(rf"\b{TOKEN}".encode())
HOME_IN_TEXT = re.compile(rf"(?<![\w.-]){HOME}[A-Za-z0-9._-]+[/\\]?".encode())
# An absolute path, or a path relative to a home or working folder, of POSIX or Windows.
LOCAL = re.compile(r"(/|~|\.{1,2}[/\\]|[A-Za-z]:[/\\]|\\\\|file:)")
# Fields of paths from older releases of Transformers, such as `special_tokens_map_file` and `cache_dir`.
FIELD = re.compile(r".*(_file|_path|_dir)")
# Files whose words may be any path.
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt")
# Length in bytes of the field with a safetensors header's length; only the header of such a file is checked.
HEADER_LENGTH_BYTES = 8


def without_local_paths(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Remove local paths and access tokens from the fields of a configuration, nested ones included; Hub ids stay."""
    return {
        key: without_local_paths(value) if isinstance(value, Mapping) else value
        for key, value in fields.items()
        if not (isinstance(value, str) and _is_private(key, value))
    }


def _is_private(key: str, value: str) -> bool:
    return PRIVATE.fullmatch(value) is not None or bool(FIELD.fullmatch(str(key)) and LOCAL.match(value))


def private_words(path: Path, folder: Path) -> list[str]:
    """Local paths in a file, and a mention of access tokens, which are not repeated.

    Args:
        folder: folder whose own path is searched for, too.
    """
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
            content = file.read(min(length, path.stat().st_size))
        else:
            content = file.read()
    found = {"an access token"} if TOKEN_IN_TEXT.search(content) else set()
    if path.name not in VOCABULARIES:
        found |= {match.decode("utf-8", "replace") for match in HOME_IN_TEXT.findall(content)}
        found |= {str(each) for each in (Path.home(), folder) if len(each.parts) > 2 and str(each).encode() in content}
    return sorted(found)


def last_name(folder: str | Path) -> str:
    """The name of a folder without its parents."""
    return Path(folder).expanduser().resolve().name or "source"
