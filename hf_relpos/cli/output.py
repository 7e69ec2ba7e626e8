"""Output of commands: text for people, JSON for programs, and the spinner while they load."""

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console


# Shown while a command imports its modules.
LOADING = "loading PyTorch and Transformers"
# `--json -`.
STDOUT = Path("-")


def console_for(json_file: Path | None) -> Console:
    """The console for people: standard error where JSON takes standard output."""
    return Console(stderr=json_file == STDOUT)


def check_json(json_file: Path | None) -> None:
    """Refuse a JSON file that cannot be written, before time is spent on its content."""
    if json_file not in (None, STDOUT):
        from ..files import check_output_file

        check_output_file(json_file, "--json")


def write_json(json_file: Path | None, content: Any) -> None:
    """Write the content to the file of `--json`, if there is one."""
    if json_file == STDOUT:
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
    elif json_file is not None:
        from ..files import write_output_json

        write_output_json(json_file, content)


def hide_loading_bars(downloads: bool = True) -> None:
    """Turn off the progress bars of Transformers, which disappear within moments.

    Args:
        downloads: also those of downloads; for commands that show a bar of their own.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    shown = not are_progress_bars_disabled()
    logging.disable_progress_bar()
    if shown and not downloads:
        enable_progress_bars()
