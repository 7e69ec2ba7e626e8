"""Output of commands: text for users, JSON for programs, and the spinner while modules load."""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from .. import files
from ..console import plain_errors, plain_warnings, spinner
from ..files import check_writable


# Value of `--json -`.
STDOUT = Path("-")


@contextmanager
def command_output(json_file: Path | None, options: Mapping[str, str] | None = None) -> Iterator[Console]:
    """Context of a command, in which errors and warnings are lines of text; the file of `--json` is checked first.

    Args:
        options: option of the command line for each argument of a function that an error may begin with.

    Yields:
        The console for text: standard error if JSON is written to standard output.
    """
    with plain_errors(options), plain_warnings():
        check_json(json_file)
        yield Console(stderr=json_file == STDOUT)


def check_json(json_file: Path | None) -> None:
    """Check the file of `--json`, if there is one, before time is spent on its content.

    Raises:
        ValueError: for a folder, a path in a folder that does not exist, or one that cannot be written.
    """
    if json_file is None or json_file == STDOUT:
        return
    if json_file.is_dir() or not json_file.absolute().parent.is_dir():
        raise ValueError(f"--json {json_file}: is a folder, or its folder does not exist; give a file to write")
    with _writing(json_file):
        check_writable(json_file)


def write_json(json_file: Path | None, content: Any) -> None:
    """Write the content to the file of `--json`, if there is one.

    Raises:
        ValueError: where it cannot be written.
    """
    content = _without_nan(content)
    if json_file == STDOUT:
        is_unicode = "utf" in (sys.stdout.encoding or "").lower()
        typer.echo(json.dumps(content, indent=2, ensure_ascii=not is_unicode))
    elif json_file is not None:
        with _writing(json_file):
            files.write_json(json_file, content)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Context in which an error of the file system names the option and the remedy."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"--json {path}: could not be written ({error.strerror}); give a file elsewhere") from error


def _without_nan(content: Any) -> Any:
    """The content with null for numbers that JSON does not have."""
    if isinstance(content, dict):
        return {name: _without_nan(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_without_nan(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


@contextmanager
def loading() -> Iterator[None]:
    """Context in which a command imports its modules, with a spinner.

    After it Transformers shows no progress bars, which are visible for moments only; those of downloads stay.
    """
    with spinner("loading PyTorch and Transformers"):
        yield
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    shown = not are_progress_bars_disabled()
    logging.disable_progress_bar()
    if shown:
        enable_progress_bars()
