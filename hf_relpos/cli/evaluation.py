"""The command `compare`: a conversion and its source."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..console import plain_errors, plain_warnings, progress_bar, spinner
from .options import TEXT, Fields, JsonFile, advanced
from .output import LOADING, check_json, console_for, hide_loading_bars, write_json


def compare(
    teacher: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Folder or Hub repository of the model that was converted.")
    ],
    student: Annotated[str, typer.Argument(metavar="RESULT", help="Folder or Hub repository of the result.")],
    text: Annotated[
        list[str], typer.Option(metavar="TEXT", help=f"{TEXT} Neither model may be fitted on it. May be repeated.")
    ],
    field: Fields = None,
    lengths: Annotated[str | None, typer.Option(metavar="LENGTHS", help="In tokens, such as 64,256,1024.")] = None,
    sts: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True, dir_okay=False, metavar="FILE", help="Scored sentence pairs, .tsv or .jsonl; may be repeated."
        ),
    ] = None,
    columns: Annotated[
        str, advanced("Columns of the --sts files: score, first sentence, second sentence.", metavar="NAMES")
    ] = "score,sentence1,sentence2",
    pooling: Annotated[
        str | None, advanced("mean or cls; by default that of the source's repository.", metavar="NAME")
    ] = None,
    tokenizer: Annotated[
        str | None, advanced("Folder or repository of the tokenizer, if not the source's.", metavar="NAME")
    ] = None,
    tokens: Annotated[int, advanced("Tokens of text for each length, about.", min=1)] = 4096,
    attention_window: Annotated[
        int | None,
        advanced(
            "attention_window of the result, 0 for none. Lengths past the source's are also measured as it is.",
            metavar="TOKENS",
            min=0,
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also how far apart the attention weights of each layer are.")
    ] = False,
    json_file: JsonFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Picture of the fidelity by length to write.")
    ] = None,
) -> None:
    """Measure the agreement of a converted model with its source."""
    with plain_errors(), plain_warnings():
        with spinner(LOADING):
            from ..evaluation.compare import CompareSettings, compare_models
            from ..evaluation.plot import check_picture, fidelity_figure, save_figure
            from ..evaluation.printing import print_comparison

        hide_loading_bars()
        settings = CompareSettings(
            teacher=teacher,
            student=student,
            text=text,
            field=field or "text",
            lengths=parse_lengths(lengths),
            sts=sts or [],
            columns=columns.split(","),
            pooling=pooling,
            tokenizer=tokenizer,
            tokens=tokens,
            attention_window=attention_window,
        )
        check_json(json_file)
        if plot_file is not None:
            check_picture(plot_file, "--plot")
        console = console_for(json_file)
        with progress_bar(Console(stderr=True), first="reading text and models") as progress:
            results = compare_models(settings, progress)
        print_comparison(results, console, verbose)
        write_json(json_file, results)
        if plot_file is not None:
            save_figure(fidelity_figure(results), plot_file)


def parse_lengths(text: str | None) -> list[int] | None:
    """Parse "64,256" as [64, 256].

    Raises:
        ValueError: for text that is not a list of positive numbers.
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"--lengths {text!r} is not a list of positive numbers, such as 64,256,1024")
    return [int(part) for part in parts]
