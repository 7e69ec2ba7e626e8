"""Commands that measure models: `compare` a conversion with its source, `evaluate` a model on tasks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..console import plain_errors, plain_warnings, progress_bar, spinner
from .options import TEXT, Fields, JsonFile, advanced
from .output import LOADING, check_json, console_for, hide_loading_bars, write_json


Pairs = Annotated[
    list[Path] | None,
    typer.Option(
        exists=True, dir_okay=False, metavar="FILE", help="Scored sentence pairs, .tsv or .jsonl; may be repeated."
    ),
]
Columns = Annotated[
    str,
    advanced(
        "Columns of the --sts files: score, first sentence, second sentence, separated by commas.", metavar="NAMES"
    ),
]
UpdateCard = Annotated[
    bool,
    advanced(
        "Put the correlations of --sts into the card of the model, a folder, as the Hub's evaluation results; by "
        "compare also a table of them beside those of its source.",
        "--update-card",
    ),
]
LENGTHS = "Lengths in tokens, separated by commas, such as 64,256,1024."


def compare(
    teacher: Annotated[str, typer.Argument(help="Folder or Hub repository of the model that was converted.")],
    student: Annotated[str, typer.Argument(help="Folder or Hub repository of the result.")],
    text: Annotated[
        list[str], typer.Option(metavar="TEXT", help=f"{TEXT} Neither model may be fitted on it. May be repeated.")
    ],
    field: Fields = None,
    lengths: Annotated[str | None, typer.Option(metavar="LENGTHS", help=LENGTHS)] = None,
    sts: Pairs = None,
    columns: Columns = "score,sentence1,sentence2",
    pooling: Annotated[
        str | None, advanced("mean or cls; by default that of the teacher's repository.", metavar="NAME")
    ] = None,
    tokenizer: Annotated[
        str | None, advanced("Folder or repository of the tokenizer, if not the teacher's.", metavar="NAME")
    ] = None,
    tokens: Annotated[int, advanced("Tokens of text for each length, about.", min=1)] = 4096,
    attention_window: Annotated[
        int | None,
        advanced(
            "attention_window of the student, 0 for none. Lengths past the teacher's are also measured as it is.",
            metavar="TOKENS",
            min=0,
        ),
    ] = None,
    update_card: UpdateCard = False,
    json_file: JsonFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Picture of the fidelity by length to write.")
    ] = None,
) -> None:
    """Measure the agreement of a converted model with its source."""
    with plain_errors(), plain_warnings():
        with spinner(LOADING):
            from ..evaluation import card
            from ..evaluation.compare import CompareSettings, compare_models
            from ..evaluation.plot import check_picture, plot_fidelity
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
        if update_card:
            _check_card(student, settings.sts)
        console = console_for(json_file)
        with progress_bar(Console(stderr=True), first="reading text and models") as progress:
            results = compare_models(settings, progress)
        print_comparison(results, console)
        write_json(json_file, results)
        if plot_file is not None:
            plot_fidelity(results, plot_file)
        if update_card:
            found = results["similarity"]
            path = card.update_card(student, card.similarity_results(found), card.similarity_section(found))
            console.print(f"written to {path}", markup=False, highlight=False, soft_wrap=True)


def evaluate(
    model: Annotated[str, typer.Argument(help="Folder or Hub repository of a stock or relative model.")],
    sts: Pairs = None,
    columns: Columns = "score,sentence1,sentence2",
    retrieval: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="DOCS QUERIES", help="Documents (id, text) and queries (query, doc), .tsv or .jsonl."),
    ] = None,
    mlm: Annotated[
        str | None, typer.Option(metavar="TEXT", help=f"{TEXT} Its masked tokens are to be predicted.")
    ] = None,
    passkey: Annotated[str | None, typer.Option(metavar="TEXT", help=f"{TEXT} Keys are hidden in it.")] = None,
    field: Fields = None,
    lengths: Annotated[str | None, typer.Option(metavar="LENGTHS", help=LENGTHS + " For --mlm and --passkey.")] = None,
    max_length: Annotated[int, advanced("Tokens read of a document in retrieval.", metavar="TOKENS", min=3)] = 2048,
    pooling: Annotated[
        str | None, advanced("mean or cls; by default that of the model's repository.", metavar="NAME")
    ] = None,
    tokenizer: Annotated[
        str | None, advanced("Folder or repository of the tokenizer, if not the model's.", metavar="NAME")
    ] = None,
    attention_window: Annotated[
        int | None,
        advanced(
            "attention_window of the model, 0 for none. Texts past its trained length are also measured as it is.",
            metavar="TOKENS",
            min=0,
        ),
    ] = None,
    update_card: UpdateCard = False,
    json_file: JsonFile = None,
) -> None:
    """Measure a model: similarity, long-document retrieval, masked tokens, passkeys."""
    with plain_errors(), plain_warnings():
        with spinner(LOADING):
            from ..evaluation import card
            from ..evaluation.evaluate import EvaluateSettings, evaluate_model
            from ..evaluation.printing import print_evaluation

        hide_loading_bars()
        settings = EvaluateSettings(
            model=model,
            sts=sts or [],
            columns=columns.split(","),
            retrieval=retrieval,
            mlm=mlm,
            passkey=passkey,
            field=field or "text",
            lengths=parse_lengths(lengths),
            max_length=max_length,
            pooling=pooling,
            tokenizer=tokenizer,
            attention_window=attention_window,
        )
        check_json(json_file)
        if update_card:
            _check_card(model, settings.sts)
        console = console_for(json_file)
        with progress_bar(Console(stderr=True), first="reading text and models") as progress:
            results = evaluate_model(settings, progress)
        print_evaluation(results, console)
        write_json(json_file, results)
        if update_card:
            path = card.update_card(model, card.similarity_results(results["similarity"]))
            console.print(f"written to {path}", markup=False, highlight=False, soft_wrap=True)


def _check_card(folder: str, sts: Sequence[Path]) -> None:
    """Check, before anything is measured, that a card can be updated.

    Raises:
        ValueError: without scored pairs, and for a card that cannot be read.
    """
    from ..evaluation import card

    if not sts:
        raise ValueError("--update-card writes the correlations of scored sentence pairs; give --sts FILE")
    card.check_names(sts)
    card.read_card(folder)


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
