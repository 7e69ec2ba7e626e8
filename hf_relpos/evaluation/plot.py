"""Two figures: what positions do in a model, and the agreement of a converted model with its source by length.

They need matplotlib (extra `plot`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..data.records import read_lines
from ..extras import import_extra
from ..files import atomic_file, check_output_file
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from .loading import load_model, load_tokenizer
from .position_scores import example_inputs, offset_curves, record_calls


if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Most tokens of a window from which the mean query and key come.
TOKENS = 128


def figure_class() -> type["Figure"]:
    """The figure class of matplotlib, imported on first use.

    Raises:
        ModuleNotFoundError: without matplotlib; names the extra.
    """
    figure: type[Figure] = import_extra("matplotlib.figure", "plot", "plots need").Figure
    return figure


def check_picture(path: Path, option: str) -> None:
    """
    Args:
        path: picture to write.
        option: command-line option that named it.

    Raises:
        ModuleNotFoundError: without matplotlib.
        ValueError: for a file that cannot be written, or an extension that matplotlib does not know.
    """
    formats = figure_class()().canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise ValueError(f"{option} {path}: no picture ends in {path.suffix!r}; use .png, .svg or .pdf")
    check_output_file(path, option)


def save_figure(figure: "Figure", path: str | Path) -> Path:
    """Write a figure atomically, in the format of the suffix (.png without one); returns the file."""
    path = Path(path)
    path = path if path.suffix else path.with_name(f"{path.name}.png")
    with atomic_file(path) as partial:
        figure.savefig(partial, dpi=150)
    return path


def plot_model(model: RelPosBertPreTrainedModel, inputs: dict[str, torch.Tensor] | None = None) -> "Figure":
    """What positions do in a model.

    One panel has the scores that they add in every head of every layer, for the query in the middle by offset, each
    head less its mean (which the softmax ignores). If vectors are added to the input, another has the cosines of those
    of each pair of positions. Hidden keys are grey.

    Args:
        inputs: arguments of `forward`; None for `example_inputs`. Terms that depend on content are for the mean query
            and key of the layer.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    calls, added = record_calls(model, inputs)
    curves = offset_curves(calls)
    layers, heads, length = curves.shape
    has_scores = bool(curves.any()) or added is None
    height = 1.2 + 0.13 * layers * heads if has_scores else 3.4
    figure = figure_class()(figsize=(8 * has_scores + 4.4 * (added is not None), height), layout="constrained")
    figure.suptitle(model.config.position_scheme_name, fontsize=10)
    panels = figure.subplots(1, has_scores + (added is not None), squeeze=False)[0]
    if has_scores:
        axes = panels[0]
        rows = (curves - curves.nanmean(-1, keepdim=True)).flatten(0, 1)
        limit = float(rows.nan_to_num().abs().flatten().quantile(0.99)) or 1.0  # without outliers
        first, last = -(length // 2) - 0.5, layers * heads - 0.5
        _draw_map(figure, axes, rows, limit, aspect="auto", extent=(first, first + length, last, -0.5))
        for layer in range(1, layers):
            axes.axhline(layer * heads - 0.5, color="0.2", linewidth=0.6)
        axes.set_yticks(
            [heads * (layer + 0.5) - 0.5 for layer in range(layers)], [f"layer {n}" for n in range(layers)]
        )
        axes.set_xlabel("r = j − i", fontsize=9)
        axes.set_title("added to the score, each head less its mean", fontsize=9)
    if added is not None:
        vectors = torch.nn.functional.normalize(added[0].float().cpu(), dim=-1)
        _draw_map(figure, panels[-1], vectors @ vectors.T, 1.0)
        panels[-1].set_xlabel("j", fontsize=9)
        panels[-1].set_ylabel("i", fontsize=9)
        panels[-1].set_title("cosine of the input vectors of i and j", fontsize=9)
    return figure


def _draw_map(figure: "Figure", axes: Any, values: torch.Tensor, limit: float, **settings: Any) -> None:
    """Draw a heat map: zero is white, NaN is grey."""
    axes.set_facecolor("0.6")
    image = axes.imshow(values.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest", **settings)
    figure.colorbar(image, ax=axes, extend="both").ax.tick_params(labelsize=8)
    axes.tick_params(labelsize=8)
    axes.locator_params("x", integer=True)


def plot_checkpoint(checkpoint: str | Path, out: str | Path | None = None, text: str | Path | None = None) -> Path:
    """Write `plot_model` of a checkpoint.

    Args:
        checkpoint: folder or Hub repository.
        out: file to write, its format by its suffix; None for `<checkpoint>.png` in this folder.
        text: file whose tokens give the mean query and key; None for random tokens.

    Returns:
        The file.

    Raises:
        ModuleNotFoundError: without matplotlib.
        ValueError: for an unknown model, a model of another package, a text without tokens, and a file that cannot be
            written.
    """
    if out is not None:
        check_picture(Path(out), "--out")
    model = load_model(checkpoint)
    if not isinstance(model, RelPosBertPreTrainedModel):
        raise ValueError(
            f"{checkpoint}: model_type = {model.config.model_type!r}: only models of this package are drawn; convert "
            "it first (`hf-relpos convert`)"
        )
    inputs = example_inputs(model.config, TOKENS)
    if text is not None:
        tokenizer = load_tokenizer(checkpoint)
        ids = tokenizer("\n".join(read_lines(text)), add_special_tokens=False, verbose=False).input_ids
        if not ids:
            raise ValueError(f"{text}: the tokenizer finds no tokens in it")
        length = min(inputs["input_ids"].shape[1], len(ids))
        windows = torch.tensor(ids[: len(ids) // length * length][: 16 * length]).view(-1, length)
        inputs = {**example_inputs(model.config, length, batch=len(windows)), "input_ids": windows}
    return save_figure(plot_model(model, inputs), out or f"{Path(checkpoint).name}.png")


def fidelity_figure(report: Mapping[str, Any]) -> "Figure":
    """Cosines to the teacher by length, with those of the shifted teacher to itself.

    Args:
        report: result of `evaluation.Fidelity.to_dict`, or the JSON of `hf-relpos compare`.

    Raises:
        ModuleNotFoundError: without matplotlib.
        ValueError: for a report without lengths.
    """
    entries = report.get("lengths") or []
    if not entries:
        raise ValueError("the report holds no lengths, so there is nothing to draw; give what `fidelity` returned")
    past = (report.get("as_it_is") or {}).get("lengths") or []
    figure = figure_class()(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    for key, label, color in (
        ("token_cosine", "tokens", "tab:blue"),
        ("sentence_cosine", "sentence vectors", "tab:red"),
    ):
        for kind, style, points in (
            ("", {"marker": "o", "markersize": 3}, [(entry["length"], entry[key]) for entry in entries]),
            (
                ", teacher shifted",
                {"linestyle": ":", "linewidth": 1.2},
                [(entry["length"], entry["ceiling"][key]) for entry in entries if entry["ceiling"]],
            ),
            (", as it is", {"linestyle": "--", "marker": "x"}, [(entry["length"], entry[key]) for entry in past]),
        ):
            if points:
                axes.plot(*zip(*points, strict=True), color=color, label=label + kind, **style)
    if report.get("teacher_limit"):
        axes.axvline(report["teacher_limit"], color="0.4", linewidth=0.8)
    axes.set_title("cosine to the teacher; past a line to its windows", fontsize=9)
    axes.set_xscale("log", base=2)
    lengths = [entry["length"] for entry in entries]
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xlabel("tokens", fontsize=9)
    axes.legend(fontsize=8)
    axes.tick_params(labelsize=8)
    return figure
