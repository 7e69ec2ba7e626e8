"""Output of commands: text for users, JSON for programs, and the spinner while modules load."""

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console


# Shown while a command imports its modules.
LOADING = "loading PyTorch and Transformers"
# Value of `--json -`.
STDOUT = Path("-")


def console_for(json_file: Path | None) -> Console:
    """The console for text: standard error if JSON is written to standard output."""
    return Console(stderr=json_file == STDOUT)


def check_json(json_file: Path | None) -> None:
    """Reject a JSON file that cannot be written, before its content is computed."""
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
    """Turn off the progress bars of Transformers, which are visible for moments only.

    Args:
        downloads: also turn off those of downloads, for commands with their own progress bar.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    shown = not are_progress_bars_disabled()
    logging.disable_progress_bar()
    if shown and not downloads:
        enable_progress_bars()
