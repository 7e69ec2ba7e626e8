"""Where commands write: text for people, JSON for programs, and what moves while they load."""

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console


# What is shown while a command imports what it needs.
LOADING = "loading PyTorch and Transformers"
# `--json -`.
STDOUT = Path("-")


def console_for(json_file: Path | None) -> Console:
    """Where people read; standard error where JSON takes standard output."""
    return Console(stderr=json_file == STDOUT)


def check_json(json_file: Path | None) -> None:
    """Refuse a JSON file that cannot be written, before time is spent on what it is to hold."""
    if json_file not in (None, STDOUT):
        from ..files import check_output_file

        check_output_file(json_file, "--json")


def write_json(json_file: Path | None, content: Any) -> None:
    """Write what `--json` asks for, if anything."""
    if json_file == STDOUT:
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
    elif json_file is not None:
        from ..files import write_output_json

        write_output_json(json_file, content)


def hide_loading_bars(downloads: bool = True) -> None:
    """Turn off the bars of Transformers, which last moments.

    Args:
        downloads: those of downloads, too, which take long: where a bar of ours is shown in their place.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    shown = not are_progress_bars_disabled()
    logging.disable_progress_bar()
    if shown and not downloads:
        enable_progress_bars()
