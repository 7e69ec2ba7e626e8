"""Commands that write checkpoints: `convert`, `export`, `demo`."""

from pathlib import Path
from typing import Annotated

import typer

from ..checkpoints.paths import check_free, check_source
from ..console import spinner, timed_step
from ..data.text import check_texts
from .options import OPTIONS, TEXT, Fields, JsonFile, Overwrite, advanced, parse_options
from .output import command_output, loading, write_json


# Exit code of a conversion that is poor by its own check.
POOR = 3


def convert(
    source: Annotated[
        str, typer.Argument(help="Folder or Hub repository of a BERT-like model; `hf-relpos families` lists them.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    position_embedding_type: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Position scheme of the result; `hf-relpos schemes` lists them. Default: that of a relative source; "
            "for absolute sources relative_key, with --texts harmonic. tables is closer to the source and slower.",
        ),
    ] = None,
    position_options: Annotated[
        list[str] | None, advanced("Option of the scheme, such as clip=32; repeatable.", metavar="KEY=VALUE")
    ] = None,
    method: Annotated[
        str | None,
        advanced(
            "keep (default without --texts): keep absolute positions, same outputs. drop: keep only their mean, needs "
            "training. distil (default with --texts): train on --texts to reproduce the source's outputs. exact "
            "(default for a relative source): keep the tables, same outputs.",
            metavar="NAME",
        ),
    ] = None,
    method_options: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Option of the method, such as length=2048, or steps=150 (faster) or 1000 (closer); repeatable.",
        ),
    ] = None,
    texts: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help=f"{TEXT} The conversion learns from it, without labels. Repeatable."),
    ] = None,
    field: Fields = None,
    skip_unreadable: Annotated[
        bool, advanced("Leave out text files without the field, or that are not text.", "--skip-unreadable")
    ] = False,
    seed: Annotated[int, advanced("Random seed.")] = 0,
    architecture: Annotated[
        str | None,
        advanced(
            "Class with the head to keep, such as BertModel; default: the class in config.json.", metavar="CLASS"
        ),
    ] = None,
    revision: Annotated[str | None, advanced("Branch, tag or commit of a Hub repository.", metavar="NAME")] = None,
    allow_pickle: Annotated[
        bool,
        advanced("Read pytorch_model.bin if there are no safetensors. Only for files you trust.", "--allow-pickle"),
    ] = False,
    overwrite: Overwrite = False,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Device to learn on: cpu, cuda, cuda:1, …; default: an accelerator if there is one."
        ),
    ] = None,
    force: Annotated[
        bool, advanced("Exit with code 0 even if the result is poor by its own check.", "--force")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Convert a BERT-like model to one with relative positions, and check the result.

    Exit codes: 2 for an error that you can correct (nothing is written); 3 if the result is poor by its own check (it
    is written), unless --force is given.

    Examples:

    hf-relpos convert google-bert/bert-base-uncased OUT --texts novels.txt

    hf-relpos convert ROBERTA OUT --texts a.txt --method-options length=2048

    hf-relpos convert ROBERTA OUT --position-embedding-type t5
    """
    with command_output(json_file, OPTIONS) as console:
        options = parse_options(position_options or [])
        methods = parse_options(method_options or [], "--method-options")
        check_source(source)
        check_free(out, overwrite)
        check_texts(texts or (), field or "text")
        with loading():
            from ..conversion import convert
            from ..conversion.terminal import print_report

        report = convert(
            source,
            out,
            position_embedding_type=position_embedding_type,
            position_options=options,
            method=method,
            method_options=methods,
            texts=[Path(each) for each in texts] if texts else None,
            field=field or "text",
            skip_unreadable=skip_unreadable,
            seed=seed,
            architecture=architecture,
            revision=revision,
            allow_pickle=allow_pickle,
            overwrite=overwrite,
            device=device,
            progress=True,
        )
        print_report(report, console)
        write_json(json_file, report.to_dict())
    if report.failed_thresholds and not force:
        raise typer.Exit(POOR)


def export(
    source: Annotated[
        Path, typer.Argument(help="Folder of a model that was converted or loaded from another architecture.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    overwrite: Overwrite = False,
    json_file: JsonFile = None,
) -> None:
    """Write a model in the layout of its original architecture, so that Transformers alone can load it.

    Examples:

    hf-relpos export OUT STOCK

    hf-relpos export OUT STOCK --overwrite

    hf-relpos export OUT STOCK --json -
    """
    with command_output(json_file) as console:
        check_free(out, overwrite)
        with loading():
            from ..conversion import export_checkpoint

        with spinner("exporting"):
            name = export_checkpoint(source, out, overwrite=overwrite)
        written = f"written to {out}, for Transformers alone: {name}.from_pretrained({str(out)!r})"
        console.print(written, markup=False, highlight=False, soft_wrap=True)
        write_json(json_file, {"out": str(out), "architecture": name})


def demo(
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub repository of a masked language model with absolute positions; default: a small one."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the result.")] = Path("demo-out"),
    steps: Annotated[
        int, typer.Option(help="Training steps; every third one adds a step on long sequences.", min=1)
    ] = 120,
    overwrite: Overwrite = False,
    json_file: JsonFile = None,
) -> None:
    """Convert a small BERT for texts of four times its length, and find in them what it could not read (2 minutes)."""
    with command_output(json_file, {"out": "--out"}) as console:
        check_free(out, overwrite)
        with timed_step(console, "0. PyTorch and Transformers imported"):
            from ..demo import run_demo

        rows = run_demo(checkpoint, out=out, steps=steps, overwrite=overwrite, console=console)
        write_json(json_file, rows)
