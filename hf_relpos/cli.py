"""The command line, `hf-relpos`.

Commands import what they need when they run: help needs neither torch nor Transformers. Errors that the user can
correct are printed without a traceback, with exit code 2.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from .console import new_table, plain_errors, plain_warnings, print_table, progress_bar, spinner, timed_step
from .version import __version__


# Exit code of a conversion whose own check is poor.
POOR = 3
EXIT_CODES = (
    "Exit codes: 0 done; 2 for what can be corrected, such as a wrong value, and nothing was written; 3 for a "
    "conversion that was written, but is poor by its own check; 1 for any other error."
)

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, epilog=EXIT_CODES)

# Help texts that several options share.
FIELD = (
    "Key or column of the text in .jsonl, .tsv and datasets; 'text' by default. May be repeated: one for each text, "
    "in their order."
)
JSON = typer.Option(
    "--json",
    metavar="FILE",
    help="JSON file to write; with - it is printed, and all else goes to standard error.",
)
TEXT = "Text: .txt, .jsonl, .tsv, compressed or not, a folder of these, or a Hub dataset."

LOADING = "loading PyTorch and Transformers"
STDOUT = Path("-")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """BERT with relative positions."""


def _console(json_file: Path | None = None) -> Console:
    """Where people read; standard error where JSON takes standard output."""
    return Console(stderr=json_file == STDOUT)


def _check_json(json_file: Path | None) -> None:
    """Refuse a JSON file that cannot be written, before time is spent on what it is to hold."""
    if json_file not in (None, STDOUT):
        from .files import check_output_file

        check_output_file(json_file, "--json")


def _write_json(json_file: Path | None, content: Any) -> None:
    """Write what `--json` asks for, if anything."""
    if json_file == STDOUT:
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
    elif json_file is not None:
        from .files import write_output_json

        write_output_json(json_file, content)


def _hide_loading_bars(downloads: bool = True) -> None:
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


def parse_options(pairs: list[str], flag: str = "--option") -> dict[str, Any]:
    """["clip=32", "mode=log"] to {"clip": 32, "mode": "log"}: values are parsed as JSON where they are JSON.

    Args:
        flag: option of the command line, for errors.

    Raises:
        ValueError: for one without a key.
    """
    options = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not key or not separator:
            raise ValueError(f"{flag} {pair!r} is not of the form KEY=VALUE, such as clip=32")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(help="Folder or Hub repository of a BERT or a model like it, such as RoBERTa.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    scheme: Annotated[
        str | None,
        typer.Option(
            help="Position scheme of the result; `hf-relpos schemes` lists them. By default the source's; for "
            "absolute ones relative_key, harmonic with --text alone or --fast, and tables with --faithful, calibrate "
            "and calibrate+distil."
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of the scheme; may be repeated.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="keep (default without --text): absolute positions stay, same outputs. drop: only their mean stays, "
            "needs training. "
            "calibrate: relative terms fitted to the source's attention on --text, close to its outputs. "
            "calibrate+distil: then distilled for some steps, closer. "
            "interpolate, hierarchical: a longer absolute table, no relative terms. "
            "For a source that is relative already: exact (default): the same tables or equivalent ones, "
            "same outputs. refit: the closest tables of another scheme. calibrate, too."
        ),
    ] = None,
    method_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Option of the method, such as tokens=20000 or steps=400; may be repeated."
        ),
    ] = None,
    fast: Annotated[
        bool,
        typer.Option("--fast", help="With --text: made quickest; a little further from the source."),
    ] = False,
    faithful: Annotated[
        bool,
        typer.Option("--faithful", help="With --text: as close to the source as it gets; slower to make and to run."),
    ] = False,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{TEXT} With it alone positions are learnt from it, close to the source at little more than its "
            "time; also for calibrate and calibrate+distil. Needs no labels. May be repeated."
        ),
    ] = None,
    field: Annotated[list[str] | None, typer.Option(help=FIELD)] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    architecture: Annotated[
        str | None, typer.Option(help="Class whose head to keep, if not the one in config.json: BertModel, ….")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub repository.")] = None,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle",
            help="Where there are no safetensors, read pytorch_model.bin, if you trust it.",
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace OUT if it exists and holds nothing but a checkpoint, after success."
        ),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(help="Where calibrate computes: cpu, cuda, cuda:1, …; by default an accelerator, if any."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Exit with 0 although the check of the result is poor.")
    ] = False,
    plots: Annotated[
        bool,
        typer.Option("--plots", help="Draw fidelity and tables into OUT, for calibrate and calibrate+distil."),
    ] = False,
    json_file: Annotated[Path | None, JSON] = None,
) -> None:
    """Convert a BERT with absolute or relative positions to this package.

    Exit codes: 2 for what can be corrected, and nothing was written; 3 for a result that was written, but is poor by
    its own check, unless --force.
    """
    with plain_errors(), plain_warnings():
        options = parse_options(option or [])
        method_options = parse_options(method_option or [], "--method-option")
        if text and not all(each.strip() for each in text):  # such as an unset variable; Path("") is this folder
            raise ValueError("--text '': is empty; give a file, a folder or a Hub dataset")
        if fast and faithful:
            raise ValueError("--fast and --faithful are two ends of one choice; give one of them")
        with spinner(LOADING):
            from .conversion import convert
            from .conversion.printing import print_report

        _check_json(json_file)
        _hide_loading_bars(downloads=False)
        report = convert(
            source,
            out,
            position_embedding_type=scheme,
            position_options=options,
            method=method,
            method_options=method_options,
            quality="fast" if fast else "faithful" if faithful else None,
            texts=[Path(each) for each in text] if text else None,
            field=field or "text",
            seed=seed,
            architecture=architecture,
            revision=revision,
            allow_pickle=allow_pickle,
            overwrite=overwrite,
            device=device,
            progress=True,
            plots=plots,
        )
        print_report(report, _console(json_file))
        _write_json(json_file, report.to_dict())
    if report.shortfalls and not force:
        raise typer.Exit(POOR)


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="Folder of a model that was read from another architecture.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it exists and holds nothing but a checkpoint.")
    ] = False,
    json_file: Annotated[Path | None, JSON] = None,
) -> None:
    """Write a converted model as a checkpoint of the architecture it came from, for Transformers alone."""
    with plain_errors():
        with spinner(LOADING):
            from .conversion import export_checkpoint

        _check_json(json_file)
        _hide_loading_bars()
        with spinner("exporting"):
            name = export_checkpoint(source, out, overwrite=overwrite)
        _console(json_file).print(f"{out}: {name}", markup=False, highlight=False)
        _write_json(json_file, {"out": str(out), "architecture": name})


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="Folder of a converted or trained model.")],
    repository: Annotated[str, typer.Argument(help="user/name on the Hub; made where there is none.")],
    yes: Annotated[
        bool, typer.Option("--yes", "--no-dry-run", help="Upload; without it nothing leaves this machine.")
    ] = False,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    message: Annotated[str, typer.Option(help="Title of the commit.")] = "Upload model with hf_relpos",
    revision: Annotated[str | None, typer.Option(help="An existing branch to write to, if not main.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    json_file: Annotated[Path | None, JSON] = None,
) -> None:
    """Show what a push to the Hub would upload, and what is wrong with it; with --yes, upload it.

    Files that do not belong to a checkpoint stay, and so do pickles. Exit code 2 where something would give away this
    machine, such as its paths, or an access token.
    """
    with plain_errors():
        with spinner(LOADING):
            from .conversion.printing import print_upload
            from .conversion.push import plan_upload
            from .conversion.push import push as push_upload

        _check_json(json_file)
        console = _console(json_file)
        with spinner("checking the files"):
            upload = plan_upload(folder, repository)
        print_upload(upload, console)
        address = push_upload(upload, private, message, revision, create_pr) if yes else None
        console.print(
            f"uploaded: {address}" if address else "nothing was uploaded; --yes does it",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        _write_json(json_file, {**upload.to_dict(), "uploaded": address})
    if upload.problems:
        raise typer.Exit(2)


@app.command()
def inspect(
    source: Annotated[str, typer.Argument(help="Folder or Hub repository of a checkpoint.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the Hub repository.")] = None,
    json_file: Annotated[Path | None, JSON] = None,
) -> None:
    """Say what a checkpoint is, what Transformers alone makes of it, and which command reads it here."""
    with plain_errors():
        from dataclasses import asdict

        with spinner(LOADING):
            from .conversion.inspection import inspect_checkpoint

        _check_json(json_file)
        found = asdict(inspect_checkpoint(source, revision))
        _write_json(json_file, found)
    tables = found["tables"]
    found["tables"] = (tables[0] + (f" and {len(tables) - 1} more" if len(tables) > 1 else "")) if tables else "none"
    titles = {"trained_length": "trained length", "elsewhere": "Transformers v5", "command": "run"}
    for name, value in found.items():
        if value:
            typer.echo(f"{titles.get(name, name):16}{value}", err=json_file == STDOUT)


@app.command()
def schemes(
    name: Annotated[str | None, typer.Argument(help="A scheme: print its options and backends.")] = None,
    json_file: Annotated[Path | None, JSON] = None,
) -> None:
    """List the position schemes; with NAME, the options of one and the backends that compute it."""
    with plain_errors():
        with spinner(LOADING):
            from .model.schemes import SCHEMES, find_scheme

        _check_json(json_file)
        console = _console(json_file)
        if name is None:
            table = new_table("scheme", "source")
            table.columns[0].no_wrap = True
            for each, scheme in SCHEMES.items():
                table.add_row(each, Text(scheme.source))
            console.print(table)
            _write_json(json_file, {each: {"source": scheme.source} for each, scheme in SCHEMES.items()})
        else:
            find_scheme(name)
            _write_json(json_file, _print_scheme(name, console))


def _print_scheme(name: str, console: Console) -> dict[str, Any]:
    """Print a scheme; what was printed."""
    from .model.capabilities import supported_implementations
    from .model.configuration_relpos_bert import RelPosBertConfig
    from .model.schemes import SCHEMES

    scheme = SCHEMES[name]
    backends = supported_implementations(RelPosBertConfig(position_embedding_type=name))
    console.print(f"{name}: {scheme.source}\nbackends: {', '.join(backends)}", markup=False, highlight=False)
    table = new_table("option", "default", "meaning")
    table.columns[0].no_wrap = True
    for key, option in scheme.options.items():
        table.add_row(key, Text(str(option.default)), Text(option.help))
    if scheme.options:
        console.print(table)
    options = {key: {"default": option.default, "help": option.help} for key, option in scheme.options.items()}
    return {"name": name, "source": scheme.source, "backends": list(backends), "options": options}


@app.command()
def families(
    json_file: Annotated[Path | None, JSON] = None,
) -> None:
    """List the checkpoints that `convert` reads: what tells them, and their positions; --json has their heads, too."""
    with plain_errors():
        with spinner(LOADING):
            from .conversion.families import FAMILIES
            from .conversion.family_rows import COLUMNS, row

        _check_json(json_file)
        rows = [
            dict(zip(COLUMNS, (cell.replace("`", "") for cell in row(name, family)), strict=True))
            for name, family in FAMILIES.items()
        ]
        shown = ("checkpoints", "told by", "positions")
        table = new_table(*shown, "direct", caption="direct: from_pretrained reads it, too")
        table.columns[-1].justify = "center"
        for each in rows:
            table.add_row(*(Text(each[column]) for column in shown), "✓" if "from_pretrained" in each["by"] else "")
        _console(json_file).print(table)
        _write_json(json_file, dict(zip(FAMILIES, rows, strict=True)))


@app.command()
def doctor(
    batch: Annotated[int | None, typer.Option(help="Rows of a batch; 4, with --model 1.", min=1)] = None,
    length: Annotated[int, typer.Option(help="Tokens of a row.", min=1)] = 512,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub repository of a checkpoint, ours or one that can be converted: print what its "
            "attention and all of it cost with each backend, predicted and measured, next to absolute positions."
        ),
    ] = None,
    scheme: Annotated[
        list[str] | None, typer.Option(help="With --model: another scheme at the same sizes; may be repeated.")
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="With --model: measure this value of attn_implementation alone; may be repeated."),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Under this attention_window instead of the model's own; 0 for none.", min=0),
    ] = None,
    json_file: Annotated[Path | None, JSON] = None,
) -> None:
    """Print versions and devices, and which backend attention takes with each scheme; check the GPU kernels."""
    with spinner(LOADING):
        import torch
        import transformers  # noqa: F401  its version is printed

    devices = ["cpu"]
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        devices.append(accelerator.type)
    console = _console(json_file)
    with plain_errors():
        _check_json(json_file)
        if scheme and model is None:
            raise ValueError(f"--scheme {scheme[0]} compares schemes at the sizes of a model; add --model FOLDER")
        if backend and model is None:
            raise ValueError(f"--backend {backend[0]} measures a model with that backend; add --model FOLDER")
        found: dict[str, Any] = {"versions": _print_versions(console, devices)}
        if model is not None:
            found["costs"] = _print_costs(
                console, model, length, batch or 1, scheme or [], backend, window, devices[-1]
            )
        else:
            found["backends"] = _print_backends(console, batch or 4, length, window, devices)
        _write_json(json_file, found)


def _print_versions(console: Console, devices: list[str]) -> dict[str, str]:
    import platform

    import torch
    import transformers

    from . import __version__

    versions = {
        "hf_relpos": __version__,
        "torch": f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "devices": ", ".join(devices),
    }
    for name, value in versions.items():
        console.print(f"{name:13}{value}", markup=False, highlight=False)
    return versions


def _print_backends(
    console: Console, batch: int, length: int, window: int | None, devices: list[str]
) -> list[dict[str, Any]]:
    from . import SCHEMES, RelPosBertConfig, explain_backend

    names: dict[tuple[str, str], list[str]] = {}  # by device and explanation
    with spinner("asking the backends"):  # on a GPU their kernels are compiled
        for device in devices:
            for name in SCHEMES:
                config = RelPosBertConfig(position_embedding_type=name, attention_window=window or None)
                explanation = explain_backend(config, batch, length, device, check_kernels=True)
                names.setdefault((device, explanation), []).append(name)
    table = new_table(f"BERT-base, {batch} × {length} tokens", "device", "attention", show_lines=True)
    for (device, explanation), alike in names.items():
        table.add_row(", ".join(alike), device, Text(explanation))
    console.print(table)
    return [
        {"schemes": alike, "device": device, "attention": explanation}
        for (device, explanation), alike in names.items()
    ]


def _print_costs(
    console: Console,
    model: str,
    length: int,
    batch: int,
    schemes: Sequence[str],
    backends: Sequence[str] | None,
    window: int | None,
    device: str,
) -> list[dict[str, Any]]:
    from dataclasses import asdict

    from .cost import model_costs, read_configuration, with_window

    config = read_configuration(model)
    if window is not None:
        config = with_window(config, window)
    has_window = config.attention_window is not None
    with progress_bar(Console(stderr=True)) as update:
        costs = model_costs(config, length, batch, schemes, backends, device, progress=update)
    floor = costs[0]
    print_table(
        console,
        f"{model}, {batch} × {length} tokens"
        + (f", attention_window = {config.attention_window}" if has_window else "")
        + f", one forward pass on {device}: measured (predicted) ms"
        + (" of the processor" if device == "cpu" else ""),
        ("scheme", "backend", *["keys"] * has_window, "attention", "model", "× absolute"),
        (
            (
                each.scheme,
                each.backend if each.taken == each.backend else f"{each.backend}: {each.taken}",
                *["window" if each.in_window else "all"] * has_window,
                f"{each.attention * 1e3:,.0f} ({each.predicted_attention * 1e3:,.0f})",
                f"{each.model * 1e3:,.0f} ({each.predicted_model * 1e3:,.0f})",
                f"{each.model / floor.model:.2f} ({each.predicted_model / floor.predicted_model:.2f})",
            )
            for each in costs
        ),
    )
    return [asdict(each) for each in costs]


@app.command()
def demo(
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="Masked language model with absolute positions, folder or Hub repository, instead of our own."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the models.")] = Path("demo-out"),
    scheme: Annotated[str, typer.Option(help="Position scheme; `hf-relpos schemes` lists them.")] = "transformer_xl",
    steps: Annotated[int, typer.Option(help="Training steps of the fine-tuning.", min=1)] = 40,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it exists and holds nothing but a demo.")
    ] = False,
    json_file: Annotated[Path | None, JSON] = None,
) -> None:
    """Convert a BERT, show what it kept, fine-tune it, reload it."""
    console = _console(json_file)
    with plain_errors(), plain_warnings():
        _check_json(json_file)
        with timed_step(console, "0. PyTorch and Transformers imported"):
            from .demo import run_demo

        rows = run_demo(checkpoint, out=out, scheme=scheme, steps=steps, overwrite=overwrite, console=console)
        _write_json(json_file, rows)


@app.command()
def plot(
    checkpoint: Annotated[str, typer.Argument(help="Folder or Hub repository of a model with relative positions.")],
    out: Annotated[Path | None, typer.Option(help="Picture to write; its suffix sets the format.")] = None,
    layer: Annotated[int | None, typer.Option(help="Number of the layer; 0 by default.")] = None,
    whole: Annotated[bool, typer.Option("--all", help="Every head of every layer, as one heat map.")] = False,
    head: Annotated[int | None, typer.Option(help="Number of the head; 0 by default.")] = None,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text for the mean query and key.")
    ] = None,
    json_file: Annotated[Path | None, JSON] = None,
) -> None:
    """Plot what the position scheme of a model adds to its attention scores."""
    with plain_errors():
        for name, number in (("layer", layer), ("head", head)):
            if whole and number is not None:
                raise ValueError(f"--{name} {number} with --all, which draws every {name}: leave one of them out")
        with spinner(LOADING):
            from .plot import plot_checkpoint

        _check_json(json_file)
        _hide_loading_bars()
        with spinner("drawing"):
            written = plot_checkpoint(checkpoint, out, None if whole else layer or 0, head or 0, text)
        _console(json_file).print(f"written to {written}", markup=False)
        _write_json(json_file, {"written": str(written)})


@app.command("app")
def page(
    left: Annotated[
        str | None, typer.Option(help="Model on the left, folder or Hub repository; by default a packaged BERT.")
    ] = None,
    right: Annotated[
        str | None, typer.Option(help="Model on the right; by default the packaged BERT made relative.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; by default this machine's own.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 for the first that is free.", min=0, max=65535)] = 7860,
) -> None:
    """Serve a page that shows two models side by side: positions, attention, masked tokens, cosines by length."""
    with plain_errors(), plain_warnings():
        with spinner(LOADING):
            from .app.models import CONVERTED, PACKAGED
            from .app.page import serve

        _hide_loading_bars()
        serve(left or PACKAGED, right or CONVERTED, host, port)


COLUMNS = "Columns of the --sts files: score, first sentence, second sentence, separated by commas."
LENGTHS = "Lengths in tokens, separated by commas, such as 64,256,1024."


def parse_lengths(text: str | None) -> list[int] | None:
    """ "64,256" to [64, 256].

    Raises:
        ValueError: for what is not a list of positive numbers.
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"--lengths {text!r} is not a list of positive numbers, such as 64,256,1024")
    return [int(part) for part in parts]


@app.command()
def compare(
    teacher: Annotated[str, typer.Argument(help="Folder or Hub repository of the model that was converted.")],
    student: Annotated[str, typer.Argument(help="Folder or Hub repository of the result.")],
    text: Annotated[list[str], typer.Option(help=f"{TEXT} Neither model may be fitted on it. May be repeated.")],
    field: Annotated[list[str] | None, typer.Option(help=FIELD)] = None,
    lengths: Annotated[str | None, typer.Option(help=LENGTHS)] = None,
    sts: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="Scored sentence pairs, .tsv or .jsonl; may be repeated."),
    ] = None,
    columns: Annotated[str, typer.Option(help=COLUMNS)] = "score,sentence1,sentence2",
    pooling: Annotated[
        str | None, typer.Option(help="mean or cls; by default that of the teacher's repository.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or repository of the tokenizer, if not the teacher's.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of text for each length, about.", min=1)] = 4096,
    json_file: Annotated[Path | None, JSON] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Picture of the fidelity by length to write.")
    ] = None,
) -> None:
    """Measure how faithful a converted model is to its source."""
    with plain_errors(), plain_warnings():
        with spinner(LOADING):
            from .evaluation.compare import CompareSettings, compare_models
            from .evaluation.printing import print_comparison
            from .plot import check_picture, plot_fidelity

        _hide_loading_bars()
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
        )
        _check_json(json_file)
        if plot_file is not None:
            check_picture(plot_file, "--plot")
        console = _console(json_file)
        with progress_bar(Console(stderr=True)) as progress:
            results = compare_models(settings, progress)
        print_comparison(results, console)
        _write_json(json_file, results)
        if plot_file is not None:
            plot_fidelity(results, plot_file)


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="Folder or Hub repository of a stock or relative model.")],
    sts: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="Scored sentence pairs, .tsv or .jsonl; may be repeated."),
    ] = None,
    columns: Annotated[str, typer.Option(help=COLUMNS)] = "score,sentence1,sentence2",
    retrieval: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="DOCS QUERIES", help="Documents (id, text) and queries (query, doc), .tsv or .jsonl."),
    ] = None,
    mlm: Annotated[str | None, typer.Option(help=f"{TEXT} Its masked tokens are to be predicted.")] = None,
    passkey: Annotated[str | None, typer.Option(help=f"{TEXT} Keys are hidden in it.")] = None,
    field: Annotated[list[str] | None, typer.Option(help=FIELD)] = None,
    lengths: Annotated[str | None, typer.Option(help=LENGTHS + " For --mlm and --passkey.")] = None,
    max_length: Annotated[int, typer.Option(help="Tokens read of a document in retrieval.", min=3)] = 2048,
    pooling: Annotated[
        str | None, typer.Option(help="mean or cls; by default that of the model's repository.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or repository of the tokenizer, if not the model's.")
    ] = None,
    update_card: Annotated[
        bool,
        typer.Option(
            "--update-card",
            help="Put the correlations of --sts into the card of MODEL, a folder, as the Hub's evaluation results.",
        ),
    ] = False,
    json_file: Annotated[Path | None, JSON] = None,
) -> None:
    """Measure a model: similarity, long-document retrieval, masked tokens, passkeys."""
    with plain_errors(), plain_warnings():
        with spinner(LOADING):
            from .evaluation import card
            from .evaluation.evaluate import EvaluateSettings, evaluate_model
            from .evaluation.printing import print_evaluation

        _hide_loading_bars()
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
        )
        _check_json(json_file)
        if update_card:
            if not sts:
                raise ValueError("--update-card writes the correlations of scored sentence pairs; give --sts FILE")
            card.check_names(sts)
            card.read_card(model)
        console = _console(json_file)
        with progress_bar(Console(stderr=True)) as progress:
            results = evaluate_model(settings, progress)
        print_evaluation(results, console)
        _write_json(json_file, results)
        if update_card:
            path = card.update_card(model, card.similarity_results(results["similarity"]))
            console.print(f"written to {path}", markup=False, highlight=False, soft_wrap=True)
