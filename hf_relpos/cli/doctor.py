"""The command `doctor`: versions, devices and backends of this machine, and the cost of a model on it."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..console import new_table, plain_errors, print_table, progress_bar, spinner
from .options import JsonFile
from .output import LOADING, check_json, console_for, write_json


def doctor(
    batch: Annotated[int | None, typer.Option(help="Rows of a batch; 4, with --model 1.", min=1)] = None,
    length: Annotated[int, typer.Option(help="Tokens of a row.", min=1)] = 512,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub repository of a checkpoint of this package, or one that can be converted: print the "
            "cost of its attention and encoder with each backend, next to absolute positions."
        ),
    ] = None,
    scheme: Annotated[
        list[str] | None, typer.Option(help="With --model: another scheme at the same sizes; may be repeated.")
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="With --model: measure only this value of attn_implementation; may be repeated."),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Use this attention_window instead of the model's; 0 for none.", min=0),
    ] = None,
    why: Annotated[
        bool, typer.Option("--why", help="Also why the other backends are not taken, and the rates of products.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Print versions, devices, and the attention backend of each scheme; check the GPU kernels."""
    with spinner(LOADING):
        import torch
        import transformers  # noqa: F401  its version is printed

    devices = ["cpu"]
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        devices.append(accelerator.type)
    console = console_for(json_file)
    with plain_errors():
        check_json(json_file)
        if scheme and model is None:
            raise ValueError(f"--scheme {scheme[0]} compares schemes at the sizes of a model; add --model FOLDER")
        if backend and model is None:
            raise ValueError(f"--backend {backend[0]} measures a model with that backend; add --model FOLDER")
        found: dict[str, Any] = {"versions": _print_versions(console, devices, why)}
        if model is not None:
            found["costs"] = _print_costs(
                console, model, length, batch or 1, scheme or [], backend, window, devices[-1]
            )
        else:
            found["backends"] = _print_backends(console, batch or 4, length, window, devices, why)
        write_json(json_file, found)


def _rates(library: Any, user: str) -> str:
    """Both rates of a kind of product in float32 on the CPU, and which library is used."""
    if library.is_used:
        used = f"oneDNN is used by {user}"
    elif not library.allowed:
        used = "PyTorch's own is used, as HF_RELPOS_FAST_PRODUCTS says"
    else:
        used = "PyTorch's own is used"
    return (
        f"float32 products: oneDNN {library.onednn_rate:.0f} GFLOP/s, error {library.onednn_error:.0e}; PyTorch's own "
        f"{library.torch_rate:.0f} GFLOP/s, {library.torch_error:.0e}; {used}"
    )


def _print_versions(console: Console, devices: list[str], why: bool) -> dict[str, str]:
    import platform

    import torch
    import transformers

    from .. import __version__
    from ..attention.products import bmm_library, linear_library

    threads = torch.get_num_threads()
    processor = f"{torch.backends.cpu.get_cpu_capability()}, {threads} thread{'s' * (threads > 1)}"
    versions = {
        "hf_relpos": __version__,
        "torch": f"{torch.__version__}, {processor}",
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "devices": ", ".join(devices),
        "linear": _rates(linear_library(), "hf_relpos.optimize(model)"),
        "bmm": _rates(bmm_library(), "attention in chunks"),
    }
    for name, value in versions.items():
        if name in ("linear", "bmm") and not why:
            continue
        console.print(f"{name:13}{value}", markup=False, highlight=False)
    return versions


def _print_backends(
    console: Console, batch: int, length: int, window: int | None, devices: list[str], why: bool
) -> list[dict[str, Any]]:
    from .. import SCHEMES, RelPosBertConfig, explain_backend

    names: dict[tuple[str, str], list[str]] = {}  # schemes by device and explanation
    with spinner("asking the backends"):  # on a GPU this compiles their kernels
        for device in devices:
            for name in SCHEMES:
                config = RelPosBertConfig(position_embedding_type=name, attention_window=window or None)
                explanation = explain_backend(config, batch, length, device, check_kernels=True)
                names.setdefault((device, explanation), []).append(name)
    shown = names
    if not why:
        shown = {}
        for (device, explanation), alike in names.items():
            taken = explanation.partition("\n")[0].partition(" takes ")[2] or explanation
            shown.setdefault((device, taken), []).extend(alike)
    table = new_table("device", "attention", f"schemes (BERT-base, {batch} × {length} tokens)", show_lines=why)
    for (device, explanation), alike in shown.items():
        table.add_row(device, Text(explanation), ", ".join(alike))
    console.print(table)
    if not why:
        console.print("--why says why not another; --model FOLDER measures a model", highlight=False)
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

    from ..conversion.cost import model_costs, read_configuration, with_window

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
        + f", one forward pass on {device}: ms"
        + (" of the processor" if device == "cpu" else ""),
        ("scheme", "backend", *["keys"] * has_window, "attention", "model", "× absolute"),
        (
            (
                each.scheme,
                each.backend if each.taken == each.backend else f"{each.backend}: {each.taken}",
                *["window" if each.in_window else "all"] * has_window,
                f"{each.attention * 1e3:,.0f}",
                f"{each.model * 1e3:,.0f}",
                f"{each.model / floor.model:.2f}",
            )
            for each in costs
        ),
    )
    return [asdict(each) for each in costs]
