"""Draw docs/pictures/first.png, the picture of docs/long_inputs.md, from the results of bench_passkeys.py.

python scripts/maintenance/draw_first.py
"""

import json
from pathlib import Path

from matplotlib.figure import Figure


DOCS = Path(__file__).resolve().parents[2] / "docs"
WAYS = {
    "converted, one vector": "tab:blue",
    "source, best of windows of 256": "tab:green",
    "source, mean of windows of 512, half overlapping": "tab:orange",
    "source, first 512 tokens": "tab:gray",
}


def draw() -> Figure:
    """Share of keys found, as the mean of both fillers, by tokens."""
    rows = json.loads((DOCS / "results" / "benchmarks" / "passkeys.json").read_text("utf-8"))["rows"].values()
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    lengths = list(next(iter(rows)))
    for way, colour in WAYS.items():
        pairs = [[row[length][way] for row in rows] for length in lengths]
        shares = [sum(hits / count for hits, count in each) / len(each) for each in pairs]
        axes.plot(range(len(lengths)), shares, "o-", color=colour, label=way, linewidth=1 + 2 * (colour == "tab:blue"))
    axes.set_xticks(range(len(lengths)), [f"{int(length):,}" for length in lengths])
    axes.set(ylim=(0, 1), xlabel="tokens of a document", title="all-MiniLM-L6-v2: pass keys found among 50 documents")
    axes.legend(loc="lower left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    """Write the picture."""
    draw().savefig(DOCS / "pictures" / "first.png", dpi=100)


if __name__ == "__main__":
    main()
