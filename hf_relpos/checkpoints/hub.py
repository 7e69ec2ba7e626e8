"""Download files of Hub repositories. No code of a repository is run."""

import logging
from collections.abc import Iterable
from pathlib import Path
from textwrap import shorten
from typing import Any

from .errors import ConversionError
from .paths import check_source


def download(repository: str, revision: str | None, folder: str, patterns: Iterable[str]) -> tuple[Path, str]:
    """Download files of a Hub repository; returns their folder and the commit.

    Args:
        folder: folder of the repository; empty for its top, without subfolders.
        patterns: patterns of the files in that folder.

    Raises:
        ConversionError: for an unknown repository, or a failed download.
    """
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    check_source(repository)
    try:
        downloaded = snapshot(repository, patterns, folder, revision=revision)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        at = "" if revision is None else f" at revision {revision!r}"
        raise ConversionError(
            f"source = {repository!r}: there is no such folder, and no such Hub repository{at} that you may read; "
            "check the spelling, or log in with `hf auth login`"
        ) from error
    except OSError as error:  # no connection, offline mode, errors of the Hub, a full disk
        reason = shorten(str(error), 160, placeholder=" …")
        raise ConversionError(
            f"source = {repository!r}: there is no such folder, and the Hub repository could not be downloaded "
            f"({type(error).__name__}: {reason}). Check the connection and HF_HUB_OFFLINE, or download it elsewhere "
            f"with `hf download {repository} --local-dir FOLDER` and give that folder"
        ) from error
    return downloaded.resolve(), downloaded.name


def snapshot(repository: str, patterns: Iterable[str], folder: str = "", **options: Any) -> Path:
    """Download files in a folder of a Hub repository; returns the repository's own folder in the cache.

    Args:
        patterns: patterns of the files.
        folder: folder of the repository; empty for its top, without subfolders.
        options: of `huggingface_hub.snapshot_download`, whose errors are raised.
    """
    from huggingface_hub import snapshot_download

    prefix = f"{folder}/" if folder else ""
    allowed, ignored = [prefix + pattern for pattern in patterns], [f"{prefix}*/*"]
    logger = logging.getLogger(snapshot_download.__module__)
    logger.addFilter(_no_match)
    try:
        return Path(snapshot_download(repository, allow_patterns=allowed, ignore_patterns=ignored, **options))
    finally:
        logger.removeFilter(_no_match)


def _no_match(record: logging.LogRecord) -> bool:
    # a folder without files of its own is no fault
    return not record.getMessage().startswith("No files matched")
