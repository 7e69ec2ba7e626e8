"""Draw the pictures of README.md and docs/how_it_works.md into docs/pictures. Needs matplotlib (extra `plot`).

python scripts/maintenance/docs_pictures.py            # or with another folder
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_relpos.attention.fourier_tables import TURN, geometric, phases


DOCS = Path(__file__).resolve().parents[2] / "docs"
FOLDER = DOCS / "pictures"
BENCHMARKS = DOCS / "results" / "benchmarks"
GREY = "0.93"


def cells(axes: Axes, values: np.ndarray, labels: np.ndarray, title: str, colours: str = "coolwarm") -> None:
    """A grid of labelled cells; NaN is grey and has no label."""
    axes.set_facecolor(GREY)
    axes.imshow(np.ma.masked_invalid(values), cmap=colours, alpha=0.6)
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            axes.text(column, row, labels[row, column], ha="center", va="center", fontsize=8)
    axes.set_xticks(np.arange(values.shape[1] + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(values.shape[0] + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="both", length=0, labelsize=8)
    axes.set_title(title, fontsize=10)
    for side in axes.spines.values():
        side.set_visible(False)


def offsets() -> Figure:
    """The offsets of the pairs of six tokens, and the rows that they have in a table clipped at 2."""
    size, clip = 6, 2
    r = np.arange(size)[None] - np.arange(size)[:, None]
    figure = Figure(figsize=(7, 3.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    cells(left, r.astype(float), np.vectorize("{:+d}".format)(r), "offset r = j − i")
    rows = r.clip(-clip, clip) + clip
    cells(right, rows - float(clip), np.vectorize("A{}".format)(rows), f"row of a table clipped at {clip}")
    for axes in (left, right):
        axes.set_xlabel("key j", fontsize=9)
        axes.set_ylabel("query i", fontsize=9)
    return figure


def skewed() -> Figure:
    """One buffer, by offset as it is written, and by pair as it is read."""
    size = 5
    width = 2 * size - 1
    row, offset = np.indices((size, width))
    key = (offset - row).astype(float)
    key[(key < 0) | (key >= size)] = np.nan
    query = size - 1 - row
    labels = np.array([f"{i}·{j:.0f}" for i, j in zip(query.flat, key.flat, strict=True)]).reshape(key.shape)
    figure = Figure(figsize=(7, 2.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(width, width + 1))
    cells(left, key, labels, f"written: rows of {width}, one column for each offset", "viridis")
    left.set_xticks(range(width), [f"{r:+d}" for r in range(1 - size, size)])
    left.set_yticks(range(size), query[:, 0])
    left.set_xlabel("offset r = j − i", fontsize=9)
    shape = (size, width + 1)
    flat_key = np.full(size * (width + 1), np.nan)
    flat_key[: key.size] = key.flat
    flat_labels = np.full(flat_key.size, "", dtype=labels.dtype)
    flat_labels[: key.size] = labels.flat
    cells(
        right,
        flat_key.reshape(shape),
        flat_labels.reshape(shape),
        f"read: rows of {width + 1}, one column for each key",
        "viridis",
    )
    right.set_xticks(range(size), range(size))
    right.set_yticks(range(size), query[:, 0])
    right.set_xlabel("key j", fontsize=9)
    left.set_ylabel("query i", fontsize=9)
    return figure


def waves() -> Figure:
    """A table of scalars by offset, and the closest sums of 4, 8 and 16 waves."""
    r = torch.arange(-64, 65)
    table = torch.where(r < 0, 1.0, 0.6) * torch.exp(-r.abs() / 12.0)
    figure = Figure(figsize=(7, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(r, table, color="black", linewidth=2, label="table")
    for count, colour in ((4, "tab:orange"), (8, "tab:green"), (16, "tab:blue")):
        frequencies = geometric(count, 160)
        features = torch.cat(phases(r, frequencies, torch.float64), dim=-1)
        solution = torch.linalg.lstsq(features, table.double()[:, None]).solution
        left.plot(r, features @ solution, color=colour, label=f"{count} waves")
    left.set_title("a table, and sums of waves", fontsize=10)
    left.legend(fontsize=8, frameon=False)
    for number, frequency in enumerate(geometric(8, 160)):
        cosine, _ = phases(r, (frequency,), torch.float64)
        right.plot(r, cosine[:, 0] / 2.4 + 7 - number, color="tab:blue", linewidth=0.9)
        right.text(66, 7 - number, f"{TURN / frequency:.0f}", fontsize=8, va="center")
    right.set_title("the 8 cosines, with their periods in tokens", fontsize=10)
    right.set_yticks([])
    for axes in (left, right):
        axes.set_xlabel("offset r = j − i", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def rows(card: str, section: str) -> dict[str, dict[str, str]]:
    """The table below a heading of a card: name of the row to column to cell."""
    text = (BENCHMARKS / card).read_text(encoding="utf-8").split(f"## {section}", 1)[1]
    lines = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    header, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name: dict(zip(header[1:], cells, strict=True)) for name, *cells in body}


def first() -> Figure:
    """Pass keys that are found, by length, and how fast DeBERTa is."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    readers = {
        "default of today, window 256 and [CLS]": ("converted, in a window of 256", "tab:blue", 2.2),
        "source, mean of windows of 512": ("source, mean of windows", "tab:orange", 1.4),
        "source, best of windows of 512": ("source, best of windows", "tab:brown", 1.4),
        "source, first 512 tokens": ("source, cut at 512", "0.5", 1.4),
    }
    found = rows("long_retrieval.md", "Pass key")
    for name, (words, colour, width) in readers.items():
        cells = [(int(length), float(cell)) for length, cell in found[name].items() if cell != "–"]
        left.plot(*zip(*cells, strict=True), marker="o", markersize=4, label=words, color=colour, linewidth=width)
    left.set_xscale("log", base=2)
    left.set_xticks([256, 1024, 4096, 8192], ["256", "1,024", "4,096", "8,192"])
    left.set_ylim(0, 1)
    left.set_xlabel("tokens of a text", fontsize=9)
    left.set_title("all-MiniLM-L6-v2: pass keys found, of 50 texts", fontsize=10)
    left.legend(fontsize=7, frameon=False, loc="lower left")
    times = rows("cpu-encoder.md", "DeBERTa v3: times faster than stock, forward pass")
    variants = {"stock PyTorch": "0.6", "ONNX Runtime": "tab:orange", "OpenVINO": "tab:brown", "optimize": "tab:blue"}
    sizes = ["1 × 128", "4 × 512", "32 rows, padded"]
    for number, (name, colour) in enumerate(variants.items()):
        heights = [float(times[name][size]) for size in sizes]
        places = np.arange(len(sizes)) + 0.2 * (number - 1.5)
        right.bar_label(right.bar(places, heights, 0.18, color=colour, label=name), fmt="%.1f", fontsize=7)
    right.set_xticks(range(len(sizes)), sizes)
    right.set_title("DeBERTa v3 on one CPU core: times as fast", fontsize=10)
    right.legend(fontsize=7, frameon=False, loc="upper left")
    for axes in (left, right):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


PICTURES = {"first": first, "offsets": offsets, "skewed": skewed, "waves": waves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        draw().savefig(folder / f"{name}.png", dpi=140)


if __name__ == "__main__":
    main()
