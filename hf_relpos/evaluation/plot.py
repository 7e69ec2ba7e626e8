"""Figures of what a scheme adds to attention scores, and of the agreement of a converted model with its source.

They need matplotlib (extra `plot`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from ..data.records import read_lines
from ..extras import import_extra
from ..files import atomic_file, check_output_file
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..models.modeling_relpos_bert import RelPosBertModel, RelPosBertPreTrainedModel
from .loading import check_folder, load_quietly, load_tokenizer, no_such_model, refuse_missing
from .position_scores import example_inputs, input_map, offset_curves, record_layer, score_map


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


def _figure(width: float, height: float) -> "Figure":
    """An empty figure of that many inches.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    return figure_class()(figsize=(width, height), layout="constrained")


def save_figure(figure: "Figure", path: str | Path) -> Path:
    """Write a figure atomically, in the format of the suffix (.png without one); returns the file."""
    path = Path(path)
    path = path if path.suffix else path.with_name(f"{path.name}.png")
    with atomic_file(path) as partial:
        figure.savefig(partial, dpi=150)
    return path


def plot_scheme(
    model: RelPosBertPreTrainedModel | RelPosBertConfig,
    layer: int = 0,
    head: int = 0,
    inputs: dict[str, torch.Tensor] | None = None,
) -> "Figure":
    """The scores that a scheme adds, over all pairs and for the query in the middle.

    Args:
        model: a model, or a configuration, from which a model is initialised with seed 0.
        layer: number of the layer.
        head: number of the head.
        inputs: arguments of `forward`; None for `example_inputs`.

    Raises:
        ModuleNotFoundError: without matplotlib.
        ValueError: for a layer or head that the model does not have.
    """
    call = record_layer(model, layer, inputs)
    count = call.query.shape[1]
    if not 0 <= head < count:
        raise ValueError(f"head = {head}: the model has heads 0 to {count - 1}")
    rows = []
    similarity = input_map(call)
    if set(call.letters) != {"input"}:
        rows.append((score_map(call), f"added to the score, head {head}", "added to the score"))
    if similarity is not None:
        rows.append((similarity[None], "cosine of the input vectors of i and j", "cosine"))
    figure = _figure(8, 0.5 + 2.9 * len(rows))
    config = model if isinstance(model, RelPosBertConfig) else model.config
    letters = ", ".join("V (not shown)" if letter == "V" else letter for letter in call.letters)
    figure.suptitle(f"{config.position_scheme_name}, layer {layer}; terms: {letters}", fontsize=11)
    panels = figure.subplots(len(rows), 2, squeeze=False, width_ratios=(1, 1.25))
    for (maps, title, label), (left, right) in zip(rows, panels, strict=True):
        _draw_map(figure, left, maps[min(head, len(maps) - 1)], title)
        _draw_curves(right, maps, min(head, len(maps) - 1), label)
    return figure


def _draw_map(figure: "Figure", axes: Any, values: torch.Tensor, title: str) -> None:
    """Draw a heat map over (i, j): zero is white, hidden keys are grey."""
    limit = float(values.nan_to_num().abs().max()) or 1.0
    axes.set_facecolor("0.6")
    image = axes.imshow(values.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, shrink=0.9)
    bar.ax.tick_params(labelsize=8)
    axes.set_title(title + (" (grey: hidden)" if values.isnan().any() else ""), fontsize=9)
    axes.set_xlabel("key j", fontsize=9)
    axes.set_ylabel("query i", fontsize=9)
    axes.locator_params(integer=True)
    axes.tick_params(labelsize=8)


def _draw_curves(axes: Any, maps: torch.Tensor, head: int, label: str) -> None:
    """Draw the scores of the middle query over r = j − i: all heads as thin lines, the chosen head bold."""
    i = maps.shape[1] // 2
    r = torch.arange(maps.shape[2]) - i
    for number, values in enumerate(maps[:, i]):
        if number != head:
            axes.step(r, values, where="mid", color="0.75", linewidth=0.7)
    axes.step(r, maps[head, i], where="mid", color="tab:blue", linewidth=1.6)
    axes.axvline(0, color="0.4", linewidth=0.6, linestyle=":")
    others = "; grey: the other heads" if len(maps) > 1 else ""
    axes.set_title(f"query i = {i}{others}", fontsize=9)
    axes.set_xlabel("r = j − i", fontsize=9)
    axes.set_ylabel(label, fontsize=9)
    axes.locator_params("x", integer=True)
    axes.tick_params(labelsize=8)


def plot_checkpoint(
    checkpoint: str | Path,
    out: str | Path | None = None,
    layer: int | None = 0,
    head: int = 0,
    text: str | Path | None = None,
) -> Path:
    """Plot what the scheme of a trained model adds, and write the picture.

    Args:
        checkpoint: folder or Hub repository.
        out: file to write, its format by its suffix; None for `<checkpoint>-layer<n>-head<n>.png` in this folder, or
            `<checkpoint>.png` for the whole model.
        layer: number of the layer; None for the whole model.
        head: number of the head; ignored if `layer` is None.
        text: file whose tokens give the mean query and key; None for random tokens.

    Returns:
        The file.

    Raises:
        ValueError: for an unknown model, a model of another package, an unknown layer or head, a scheme that
            `plot_model` rejects, a text without tokens, and a file that cannot be written.
    """
    if out is not None:
        check_picture(Path(out), "--out")
    check_folder(checkpoint)
    try:
        model_type = PreTrainedConfig.get_config_dict(checkpoint)[0].get("model_type")
        if model_type not in (None, RelPosBertConfig.model_type):
            raise ValueError(
                f"{checkpoint}: model_type = {model_type!r}: only models of this package, "
                f"{RelPosBertConfig.model_type!r}, are drawn; convert it first (`hf-relpos convert`)"
            )
        model, missing = load_quietly(RelPosBertModel, checkpoint, add_pooling_layer=False)
    except OSError as error:
        raise ValueError(no_such_model(checkpoint, error)) from error
    refuse_missing(checkpoint, missing)
    inputs = example_inputs(model.config, TOKENS)
    if text is not None:
        tokenizer = load_tokenizer(checkpoint)
        ids = tokenizer("\n".join(read_lines(text)), add_special_tokens=False, verbose=False).input_ids
        if not ids:
            raise ValueError(f"{text}: the tokenizer finds no tokens in it")
        length = min(inputs["input_ids"].shape[1], len(ids))
        windows = torch.tensor(ids[: len(ids) // length * length][: 16 * length]).view(-1, length)
        inputs = {**example_inputs(model.config, length, batch=len(windows)), "input_ids": windows}
    if layer is None:
        figure, name = plot_model(model, inputs), f"{Path(checkpoint).name}.png"
    else:
        figure, name = plot_scheme(model, layer, head, inputs), f"{Path(checkpoint).name}-layer{layer}-head{head}.png"
    out = name if out is None else out
    return save_figure(figure, out)


def plot_model(model: RelPosBertPreTrainedModel, inputs: dict[str, torch.Tensor] | None = None) -> "Figure":
    """Heat map of a whole model: the score that position adds, for every head of every layer over r = j − i.

    Args:
        model: a model whose terms depend on r = j − i.
        inputs: arguments of `forward`; None for `example_inputs`.

    Raises:
        ModuleNotFoundError: without matplotlib.
        ValueError: for a scheme that adds nothing to the score.
    """
    if record_layer(model, 0, inputs).letters == ["input"]:
        raise ValueError(
            f"layer = None (--all): position_embedding_type = {model.config.position_embedding_type!r} adds nothing "
            "to the score, only vectors to the input; give a layer (leave out --all) to see those"
        )
    curves = offset_curves(model, inputs)
    layers, heads, length = curves.shape
    figure = _figure(8, 1.2 + 0.13 * layers * heads)
    axes = figure.subplots()
    # the softmax does not change when a constant is added to a row
    rows = (curves - curves.nanmean(-1, keepdim=True)).flatten(0, 1)
    limit = float(rows.nan_to_num().abs().flatten().quantile(0.99)) or 1.0  # without outliers
    first = -(length // 2) - 0.5
    axes.set_facecolor("0.6")
    image = axes.imshow(
        rows.numpy(),
        cmap="RdBu_r",
        vmin=-limit,
        vmax=limit,
        aspect="auto",
        interpolation="nearest",
        extent=(first, first + length, layers * heads - 0.5, -0.5),
    )
    figure.colorbar(image, ax=axes, extend="both").ax.tick_params(labelsize=8)
    for layer in range(1, layers):
        axes.axhline(layer * heads - 0.5, color="0.2", linewidth=0.6)
    axes.set_yticks([heads * (layer + 0.5) - 0.5 for layer in range(layers)], [f"layer {n}" for n in range(layers)])
    axes.set_xlabel("r = j − i", fontsize=9)
    axes.locator_params("x", integer=True)
    axes.set_title(f"{model.config.position_scheme_name}: added to the score, each head less its mean", fontsize=10)
    axes.tick_params(labelsize=8)
    return figure


def fidelity_figure(report: Mapping[str, Any]) -> "Figure":
    """Cosine to the teacher by length, with that of the shifted teacher, and divergence of attention by layer.

    Args:
        report: result of `evaluation.Fidelity.to_dict`, or the JSON of `hf-relpos compare`.

    Raises:
        ModuleNotFoundError: without matplotlib.
        ValueError: for a report without lengths.
    """
    entries = report.get("lengths") or []
    if not entries:
        raise ValueError("the report holds no lengths, so there is nothing to draw; give what `fidelity` returned")
    compared = [entry for entry in entries if entry["divergence"]]
    figure = _figure(9 if compared else 5, 3.4)
    panels = figure.subplots(1, 2 if compared else 1, squeeze=False)[0]
    for key, label, color in (
        ("token_cosine", "tokens", "tab:blue"),
        ("sentence_cosine", "sentence vectors", "tab:red"),
    ):
        lengths = [entry["length"] for entry in entries]
        panels[0].plot(lengths, [entry[key] for entry in entries], color=color, marker="o", markersize=3, label=label)
        shown = [(entry["length"], entry["ceiling"][key]) for entry in entries if entry["ceiling"]]
        if shown:
            where, ceiling = zip(*shown, strict=True)
            panels[0].plot(
                where, ceiling, color=color, linestyle=":", linewidth=1.2, label=f"{label}, teacher shifted"
            )
        if both := (report.get("as_it_is") or {}).get("lengths"):
            past, values = [entry["length"] for entry in both], [entry[key] for entry in both]
            panels[0].plot(past, values, color=color, linestyle="--", marker="x", label=f"{label}, as it is")
    if report.get("teacher_limit"):
        panels[0].axvline(report["teacher_limit"], color="0.4", linewidth=0.8)
        panels[0].set_title("cosine to the teacher; past the line to its windows", fontsize=9)
    else:
        panels[0].set_title("cosine to the teacher", fontsize=9)
    panels[0].set_xscale("log", base=2)
    panels[0].set_xticks(lengths, [str(length) for length in lengths])
    panels[0].set_xlabel("tokens", fontsize=9)
    panels[0].legend(fontsize=8)
    if compared:
        for entry in compared:
            panels[1].plot(entry["divergence"], marker="o", markersize=3, label=f"{entry['length']} tokens")
        panels[1].set_xticks(range(len(compared[0]["divergence"])))
        panels[1].set_title("attention, KL(teacher‖student) in nats", fontsize=9)
        panels[1].set_xlabel("layer", fontsize=9)
        panels[1].set_ylim(bottom=0)
        panels[1].legend(fontsize=8)
    for axes in panels:
        axes.tick_params(labelsize=8)
    return figure


def plot_fidelity(report: Mapping[str, Any], path: str | Path) -> Path:
    """Write `fidelity_figure`.

    Args:
        report: as in `fidelity_figure`.
        path: file to write, its format by its suffix.

    Returns:
        The file.

    Raises:
        ModuleNotFoundError: without matplotlib.
        ValueError: for a report without lengths.
    """
    return save_figure(fidelity_figure(report), path)
