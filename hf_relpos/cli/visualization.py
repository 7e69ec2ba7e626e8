"""Commands that show the effect of positions in a model: `plot` draws a picture, `app` serves a page."""

from pathlib import Path
from typing import Annotated

import typer

from ..console import plain_errors, plain_warnings, spinner
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


def page(
    left: Annotated[
        str | None, typer.Option(help="Model on the left, folder or Hub repository; by default a packaged BERT.")
    ] = None,
    right: Annotated[
        str | None, typer.Option(help="Model on the right; by default the packaged BERT made relative.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; by default this machine's own.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 for the first that is free.", min=0, max=65535)] = 7860,
    attention_window: Annotated[
        int, typer.Option(help="attention_window of the right model, in Masked and Cosine; 0: its own.", min=0)
    ] = 0,
) -> None:
    """Serve a page that shows two models side by side: positions, attention, masked tokens, cosines by length."""
    with plain_errors(), plain_warnings():
        with spinner(LOADING):
            from ..app.models import CONVERTED, PACKAGED
            from ..app.page import serve

        hide_loading_bars()
        serve(left or PACKAGED, right or CONVERTED, host, port, window=attention_window)
