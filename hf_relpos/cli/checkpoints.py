"""Commands that write or upload checkpoints: `convert`, `export`, `push`, `demo`."""

from pathlib import Path
from typing import Annotated

import typer

from ..console import plain_errors, plain_warnings, spinner, timed_step
from ..data.text import check_texts
from ..families.paths import check_free, check_source
from .options import TEXT, Fields, JsonFile, Overwrite, SkipUnreadable, advanced, parse_options
from .output import LOADING, check_json, console_for, hide_loading_bars, write_json


# Exit code of a conversion that is poor by its own check.
POOR = 3
# What arguments of `conversion.convert` are called here; others have their own names.
OPTIONS = {
    "position_embedding_type": "--scheme",
    "position_options": "--option",
    "method_options": "--method-option",
    "texts": "--text",
    **{name: f"--{name}" for name in ("text", "method", "seed", "architecture", "revision", "device")},
}


def convert(
    source: Annotated[
        str, typer.Argument(help="Folder or Hub repository of a BERT or a model like it, such as RoBERTa.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    scheme: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Position scheme of the result; `hf-relpos schemes` lists them. By default the source's; for "
            "absolute ones relative_key, harmonic with --text, and tables with --faithful.",
        ),
    ] = None,
    option: Annotated[
        list[str] | None, advanced("Option of the scheme; may be repeated.", metavar="KEY=VALUE")
    ] = None,
    method: Annotated[
        str | None,
        advanced(
            "keep (default without --text): absolute positions stay, same outputs. drop: only their mean stays, "
            "needs training. distil: relative terms start at zero; weights are trained on --text to compute the "
            "source's outputs. exact (default of a relative source): the same or equivalent tables, same outputs.",
            metavar="NAME",
        ),
    ] = None,
    method_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Option of the method, such as length=2048 or steps=1000; may be repeated."
        ),
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="With --text: the fastest conversion; a little less close to the source.")
    ] = False,
    faithful: Annotated[
        bool,
        typer.Option("--faithful", help="With --text: as close to the source as possible; slower to convert and run."),
    ] = False,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help=f"{TEXT} Without a method, the default preset learns positions from it; also for "
            "distil. Needs no labels. May be repeated.",
        ),
    ] = None,
    field: Fields = None,
    skip_unreadable: SkipUnreadable = False,
    seed: Annotated[int, advanced("Random seed.")] = 0,
    architecture: Annotated[
        str | None,
        advanced("Class with the head to keep, if not the class in config.json: BertModel, ….", metavar="CLASS"),
    ] = None,
    revision: Annotated[str | None, advanced("Branch, tag or commit of a Hub repository.", metavar="NAME")] = None,
    allow_pickle: Annotated[
        bool, advanced("If there are no safetensors, read pytorch_model.bin; only if you trust it.", "--allow-pickle")
    ] = False,
    overwrite: Overwrite = False,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Device of distil: cpu, cuda, cuda:1, …; by default an accelerator, if any."
        ),
    ] = None,
    force: Annotated[bool, advanced("Exit with 0 although the check of the result is poor.", "--force")] = False,
    json_file: JsonFile = None,
) -> None:
    """Convert a BERT with absolute or relative positions to this package.

    Exit codes: 2 for errors that you can correct, with nothing written; 3 for a written result that is poor by its own
    check, unless --force.
    """
    with plain_errors(OPTIONS), plain_warnings():
        options = parse_options(option or [])
        method_options = parse_options(method_option or [], "--method-option")
        if text and not all(each.strip() for each in text):  # such as an unset variable; Path("") is "."
            raise ValueError("--text '': is empty; give a file, a folder or a Hub dataset")
        if fast and faithful:
            raise ValueError("--fast and --faithful are two ends of one choice; give one of them")
        preset = "--fast" if fast else "--faithful" if faithful else ""
        if preset and method not in (None, "distil"):
            raise ValueError(f"{preset} and --method {method}: it learns by distil; leave one of them out")
        if preset and not text:
            raise ValueError(f"{preset} learns from text, some hundred sentences; give --text FILE")
        check_source(source)
        check_free(out, overwrite)
        check_texts(text or (), field or "text")
        check_json(json_file)
        with spinner(LOADING):
            from ..conversion import convert
            from ..conversion.terminal import print_report

        hide_loading_bars(downloads=False)
        report = convert(
            source,
            out,
            position_embedding_type=scheme,
            position_options=options,
            method=method,
            method_options=method_options,
            quality=preset[2:] or None,
            texts=[Path(each) for each in text] if text else None,
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
        print_report(report, console_for(json_file))
        write_json(json_file, report.to_dict())
    if report.failed_thresholds and not force:
        raise typer.Exit(POOR)


def export(
    source: Annotated[Path, typer.Argument(help="Folder of a model that was read from another architecture.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    overwrite: Overwrite = False,
    json_file: JsonFile = None,
) -> None:
    """Write a converted model as a checkpoint of the architecture it came from, for Transformers alone."""
    with plain_errors(), plain_warnings():
        check_free(out, overwrite)
        check_json(json_file)
        with spinner(LOADING):
            from ..conversion import export_checkpoint

        hide_loading_bars()
        with spinner("exporting"):
            name = export_checkpoint(source, out, overwrite=overwrite)
        console_for(json_file).print(
            f"written to {out}, for Transformers alone: {name}.from_pretrained({str(out)!r})",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        write_json(json_file, {"out": str(out), "architecture": name})


def push(
    folder: Annotated[Path, typer.Argument(help="Folder of a converted or trained model.")],
    repository: Annotated[str, typer.Argument(help="user/name on the Hub; made where there is none.")],
    yes: Annotated[bool, typer.Option("--yes", help="Upload; without it nothing leaves this machine.")] = False,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Show the files that an upload to the Hub would contain, and their problems; with --yes, upload them.

    Files that do not belong to a checkpoint are not uploaded. Exit code 2 for problems, such as local paths or an
    access token in a file.
    """
    with plain_errors():
        check_json(json_file)
        with spinner(LOADING):
            from ..conversion.push import plan_upload, push as push_upload
            from ..conversion.terminal import print_upload

        console = console_for(json_file)
        with spinner("checking the files"):
            upload = plan_upload(folder, repository)
        print_upload(upload, console)
        address = push_upload(upload, private) if yes else None
        last = f"uploaded: {address}" if address else "nothing was uploaded; --yes does it"
        console.print(last, markup=False, highlight=False, soft_wrap=True)
        found = {"folder": str(upload.folder), "repository": repository, "uploaded": address}
        write_json(json_file, {**found, **{name: getattr(upload, name) for name in ("files", "left_out", "problems")}})
    if upload.problems:
        raise typer.Exit(2)


def demo(
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="Masked language model with absolute positions, folder or Hub repository, instead of our own."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the result.")] = Path("demo-out"),
    steps: Annotated[int, typer.Option(help="Steps to convert by; each third adds one on long rows.", min=1)] = 120,
    overwrite: Overwrite = False,
    json_file: JsonFile = None,
) -> None:
    """Convert a BERT for texts of 4 times its length; find in them what it could not read."""
    console = console_for(json_file)
    with plain_errors({"out": "--out"}), plain_warnings():
        check_free(out, overwrite)
        check_json(json_file)
        with timed_step(console, "0. PyTorch and Transformers imported"):
            from ..demo import run_demo

        rows = run_demo(checkpoint, out=out, steps=steps, overwrite=overwrite, console=console)
        write_json(json_file, rows)
