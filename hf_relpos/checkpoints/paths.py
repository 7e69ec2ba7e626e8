"""What paths name, and what is wrong with them. It needs no PyTorch, so that the command line checks them at once."""

import os
from pathlib import Path

from .errors import ConversionError


def local_folder(source: str | Path, revision: str | None = None) -> Path | None:
    """The local folder of that name; None for a possible Hub repository.

    Raises:
        ConversionError: for a file, and for a local folder with a revision.
    """
    folder = Path(os.path.expanduser(source))  # unlike Path's, leaves the home of no user as it is
    if os.path.isdir(folder):  # unlike Path's, false for a name that is too long
        if revision is not None:
            raise ConversionError(f"revision = {revision!r}: {source} is a local folder, without any; leave it out")
        return folder.resolve()
    if os.path.exists(folder):
        raise ConversionError(f"source = '{source}' is a file; give the folder that holds config.json")
    return None


def check_source(source: str | Path) -> None:
    """
    Raises:
        ConversionError: for what is neither a folder nor the form of a Hub repository's name.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if local_folder(source) is None:
        try:
            validate_repo_id(str(source))
        except HFValidationError as error:
            reason = "there is no such folder, and it cannot be a Hub repository, whose form is 'user/name'"
            raise ConversionError(f"source = {str(source)!r}: {reason}; check the path") from error


def check_free(out: str | Path, overwrite: bool) -> None:
    """
    Raises:
        ConversionError: for a folder to write that is a file, or exists and may not be overwritten.
    """
    path = os.path.expanduser(out)
    if os.path.exists(path) and not os.path.isdir(path):
        raise ConversionError(f"out = '{out}' is a file; choose a folder")
    if os.path.exists(path) and not overwrite:
        raise ConversionError(f"out = '{out}' exists; choose another folder, or overwrite=True (--overwrite)")
