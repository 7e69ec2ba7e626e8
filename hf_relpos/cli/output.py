"""Output of commands: text for users, JSON for programs, and the spinner while modules load."""

import json
import math
import sys
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
    content = _without_nan(content)
    if json_file == STDOUT:
        is_unicode = "utf" in (sys.stdout.encoding or "").lower()
        typer.echo(json.dumps(content, indent=2, ensure_ascii=not is_unicode))
    elif json_file is not None:
        from ..files import write_output_json

        write_output_json(json_file, content)


def _without_nan(content: Any) -> Any:
    """The content with null for numbers that JSON does not have."""
    if isinstance(content, dict):
        return {name: _without_nan(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_without_nan(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


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
