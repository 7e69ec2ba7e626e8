"""Download files of Hub repositories. No code of a repository is run."""

import logging
from collections.abc import Iterable
from pathlib import Path
from textwrap import shorten
from typing import Any

from .errors import ConversionError
from .paths import check_source, local_folder


def download(repository: str, revision: str | None, folder: str, patterns: Iterable[str]) -> Path:
    """Download files of a Hub repository.

    Args:
        folder: folder of the repository; empty for its top, without subfolders.
        patterns: patterns of the files in that folder.

    Returns:
        The folder of the files on this machine. That of the top has the name of the commit.

    Raises:
        ConversionError: for an unknown repository, or a failed download.
    """
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    check_source(repository)
    try:
        downloaded = find_folder(repository, patterns, folder, revision=revision)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        at = "" if revision is None else f" at revision {revision!r}"
        missing = f"there is no such folder, and no such Hub repository{at} that you may read"
        remedy = "check the spelling, or log in with `hf auth login`"
        raise ConversionError(f"source = {repository!r}: {missing}; {remedy}") from error
    except OSError as error:  # no connection, offline mode, errors of the Hub, a full disk
        reason = f"{type(error).__name__}: {shorten(str(error), 160, placeholder=' …')}"
        failed = f"there is no such folder, and the Hub repository could not be downloaded ({reason})"
        elsewhere = f"with `hf download {repository} --local-dir FOLDER`, and give that folder"
        remedy = f"check the connection and HF_HUB_OFFLINE, or download it elsewhere {elsewhere}"
        raise ConversionError(f"source = {repository!r}: {failed}; {remedy}") from error
    return downloaded.resolve()


def find_folder(source: str | Path, patterns: Iterable[str], folder: str = "", **options: Any) -> Path:
    """A local folder, or that of files of a Hub repository in the cache, which are downloaded.

    Args:
        source: local folder or Hub repository.
        patterns: patterns of the files.
        folder: folder in it; empty for its top, without subfolders.
        options: of `huggingface_hub.snapshot_download`, whose errors are raised.

    Raises:
        ConversionError: for a file.
    """
    from huggingface_hub import snapshot_download

    if (local := local_folder(source)) is not None:
        return local / folder
    prefix = f"{folder}/" if folder else ""
    allowed, ignored = [prefix + pattern for pattern in patterns], [f"{prefix}*/*"]
    logger = logging.getLogger(snapshot_download.__module__)
    logger.addFilter(_no_match)
    try:
        found = snapshot_download(str(source), allow_patterns=allowed, ignore_patterns=ignored, **options)
        return Path(found, folder)
    finally:
        logger.removeFilter(_no_match)


def _no_match(record: logging.LogRecord) -> bool:
    # a folder without files of its own is no fault
    return not record.getMessage().startswith("No files matched")
