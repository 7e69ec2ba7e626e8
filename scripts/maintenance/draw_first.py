"""Draw docs/pictures/first.png, README's picture, from the results of two benchmarks.

python scripts/maintenance/draw_first.py
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


DOCS = Path(__file__).resolve().parents[2] / "docs"
FAMILY = "DeBERTa v3 / AMD EPYC 26/2"
CASES = ("1 × 128", "4 × 512", "32 rows, padded")
VARIANTS = {"stock PyTorch": "tab:gray", "ONNX Runtime": "tab:orange", "OpenVINO": "tab:brown", "optimize": "tab:blue"}
WAYS = {
    "converted, one vector": "tab:blue",
    "source, best of windows of 256": "tab:green",
    "source, mean of windows of 512, half overlapping": "tab:orange",
    "source, first 512 tokens": "tab:gray",
}


def read(name: str) -> dict[str, Any]:
    """The results of a benchmark."""
    content: dict[str, Any] = json.loads((DOCS / "results" / "benchmarks" / f"{name}.json").read_text("utf-8"))
    return content


def draw() -> Figure:
    """Keys found, as the mean of both fillers, by tokens; times as fast as stock, by case."""
    figure = Figure(figsize=(12.5, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = read("passkeys")["rows"].values()
    lengths = list(next(iter(rows)))
    for way, colour in WAYS.items():
        pairs = [[row[length][way] for row in rows] for length in lengths]
        shares = [sum(hits / count for hits, count in each) / len(each) for each in pairs]
        left.plot(range(len(lengths)), shares, "o-", color=colour, label=way, linewidth=1 + 2 * (colour == "tab:blue"))
    left.set_xticks(range(len(lengths)), [f"{int(length):,}" for length in lengths])
    left.set(ylim=(0, 1), xlabel="tokens of a document", title="all-MiniLM-L6-v2: pass keys found among 50 documents")
    left.legend(loc="lower left", frameon=False)
    times = read("cpu-encoder")["families"][FAMILY]["times"]
    cases = {each["case"]: each["seconds"] for each in times if each["pass"] == "forward"}
    for number, (variant, colour) in enumerate(VARIANTS.items()):
        places = [place + 0.2 * number for place in range(len(CASES))]
        gains = [cases[case]["stock PyTorch"] / cases[case][variant] for case in CASES]
        bars = right.bar(places, gains, 0.18, color=colour, label=variant)
        right.bar_label(bars, fmt="%.1f", fontsize=9)
    right.set_xticks([place + 0.3 for place in range(len(CASES))], CASES)
    right.set(title=f"{FAMILY.replace(' / ', ', ')}, one core: times as fast")
    right.legend(loc="upper left", frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    """Write the picture."""
    draw().savefig(DOCS / "pictures" / "first.png", dpi=100)


if __name__ == "__main__":
    main()
