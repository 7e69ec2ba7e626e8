"""The command `compare`: a conversion and its source."""

from typing import Annotated

import typer
from rich.console import Console

from ..checkpoints.paths import check_source
from ..console import progress_bar
from ..data.text import check_texts
from .options import OPTIONS, TEXT, Fields, JsonFile, advanced
from .output import command_output, loading, write_json


def compare(
    teacher: Annotated[str, typer.Argument(metavar="SOURCE", help="Folder or Hub repository of the source.")],
    student: Annotated[str, typer.Argument(metavar="RESULT", help="Folder or Hub repository of the converted model.")],
    texts: Annotated[
        list[str], typer.Option(metavar="TEXT", help=f"{TEXT} Neither model may have been trained on it. Repeatable.")
    ],
    field: Fields = None,
    lengths: Annotated[str | None, typer.Option(metavar="LENGTHS", help="Lengths, such as 64,256,1024.")] = None,
    pooling: Annotated[str | None, advanced("Pooling: mean or cls; default: the source's.", metavar="NAME")] = None,
    tokenizer: Annotated[
        str | None, advanced("Folder or repository of the tokenizer; default: the source's.", metavar="NAME")
    ] = None,
    tokens: Annotated[int, advanced("Approximate number of tokens of text for each length.", min=1)] = 4096,
    json_file: JsonFile = None,
) -> None:
    """Measure how close a converted model is to its source.

    Examples:

    hf-relpos compare google-bert/bert-base-uncased OUT --texts held-out.txt

    hf-relpos compare SOURCE OUT --texts held-out.txt --lengths 128,512,2048

    hf-relpos compare SOURCE OUT --texts abstracts.jsonl --field abstract
    """
    with command_output(json_file, OPTIONS) as console:
        for name in (teacher, student):
            check_source(name)
        check_texts(texts, field or "text")
        with loading():
            from ..evaluation.compare import compare_models
            from ..evaluation.printing import print_comparison

        with progress_bar(Console(stderr=True), first="reading text and models") as progress:
            results = compare_models(
                teacher, student, texts, field or "text", parse_lengths(lengths), pooling, tokenizer, tokens, progress
            )
        print_comparison(results, console)
        write_json(json_file, results)


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
