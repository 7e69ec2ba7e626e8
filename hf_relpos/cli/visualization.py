"""The command `plot`: the effect of positions in a model."""

from pathlib import Path
from typing import Annotated

import typer

from ..console import plain_errors, spinner
from .options import JsonFile
from .output import LOADING, check_json, console_for, hide_loading_bars, write_json


def plot(
    checkpoint: Annotated[str, typer.Argument(help="Folder or Hub repository of a model with relative positions.")],
    out: Annotated[Path | None, typer.Option(help="Picture to write; its suffix sets the format.")] = None,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text for the mean query and key.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Draw what positions add to the attention scores, in every head of every layer."""
    with plain_errors():
        with spinner(LOADING):
            from ..evaluation.plot import plot_checkpoint

        check_json(json_file)
        hide_loading_bars()
        with spinner("drawing"):
            written = plot_checkpoint(checkpoint, out, text)
        console_for(json_file).print(f"written to {written}", markup=False)
        write_json(json_file, {"written": str(written)})
