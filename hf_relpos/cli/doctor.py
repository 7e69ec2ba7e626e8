"""The command `doctor`: versions, devices and backends of this machine."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..console import new_table, spinner
from .options import JsonFile
from .output import command_output, loading, write_json


def doctor(
    why: Annotated[
        bool,
        typer.Option("--why", help="Also print why other backends are rejected, and how fast libraries multiply."),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Check everything that depends on this machine and its libraries: 30 s.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Print versions, devices and the attention backend of each scheme; with --check, test them on this machine."""
    with loading():
        import torch
        import transformers  # noqa: F401  its version is printed

    devices = ["cpu"]
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        devices.append(accelerator.type)
    with command_output(json_file) as console:
        found: dict[str, Any] = {"versions": _print_versions(console, devices, why)}
        if check:
            found["checks"] = _print_checks(console, devices)
        else:
            found["backends"] = _print_backends(console, devices, why)
        write_json(json_file, found)
    if check and not all(each["passed"] for each in found["checks"]):
        raise typer.Exit(code=1)


def _print_versions(console: Console, devices: list[str], why: bool) -> dict[str, str]:
    import platform

    import torch
    import transformers

    from .. import __version__
    from ..host.cores import quota
    from ..live.optimize import rates_of
    from ..products.cpu_gemm import HALF, bmm_library, half_library, linear_library

    threads = torch.get_num_threads()
    processor = f"{torch.backends.cpu.get_cpu_capability()}, {threads} {'threads' if threads > 1 else 'thread'}"
    processor += "" if (limit := quota()) is None else f"; the container has a quota of {limit:g} CPUs"
    versions = {"hf_relpos": __version__, "torch": f"{torch.__version__}, {processor}"}
    versions |= {"transformers": transformers.__version__, "python": platform.python_version()}
    versions["devices"] = ", ".join(devices)
    ways = {name: ("oneDNN", "PyTorch's own") for name in ("linear", "bmm")}
    ways |= {str(dtype)[6:]: ("float32", str(dtype)[6:]) for dtype in HALF}
    for name, library in zip(ways, (linear_library(), bmm_library(), *map(half_library, HALF)), strict=True):
        allowed = "" if library.allowed else ", because of HF_RELPOS_ONEDNN"
        versions[name] = f"{rates_of(library, *ways[name])}; {ways[name][not library.is_used]} is used{allowed}"
    for name, value in versions.items():
        if why or name not in ways:
            console.print(f"{name:13}{value}", markup=False, highlight=False)
    return versions


def _print_checks(console: Console, devices: list[str]) -> list[dict[str, Any]]:
    """Print each check as it is done; return their fields."""
    from ..machine import checks

    done = []
    for each in checks(devices):
        done.append(each)
        style = "" if each.passed else "bold red"
        console.print(str(each), style=style, markup=False, highlight=False, soft_wrap=True)
    failed = sum(not each.passed for each in done)
    seconds = sum(each.seconds for each in done)
    verdict = f"{failed} FAILED; paste all of the above into an issue" if failed else "all right"
    console.print(f"{len(done)} checks in {seconds:.0f} s: {verdict}", highlight=False)
    return [vars(each) for each in done]


def _print_backends(console: Console, devices: list[str], why: bool) -> list[dict[str, Any]]:
    from .. import RelPosBertConfig, explain_backend
    from ..schemes import SCHEMES

    names: dict[tuple[str, str], list[str]] = {}  # schemes by device and explanation
    shown: dict[tuple[str, str], list[str]] = {}  # likewise, by what is printed of it
    with spinner("asking the backends"):
        for device in devices:
            for name in SCHEMES:
                explanation = explain_backend(RelPosBertConfig(position_embedding_type=name), 4, 512, device)
                taken = explanation.partition("\n")[0].partition(" takes ")[2] or explanation
                names.setdefault((device, explanation), []).append(name)
                shown.setdefault((device, explanation if why else taken), []).append(name)
    table = new_table("device", "attention", "schemes (BERT-base, 4 × 512 tokens)", show_lines=why)
    for (device, text), alike in shown.items():
        table.add_row(device, Text(text), ", ".join(alike))
    console.print(table)
    if not why:
        console.print("--why prints why other backends are rejected", highlight=False)
    return [{"schemes": alike, "device": device, "attention": text} for (device, text), alike in names.items()]
