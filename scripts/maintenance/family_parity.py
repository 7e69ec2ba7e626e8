"""Run the tests that compare families with their own classes, and write what they measured.

    python scripts/maintenance/family_parity.py                       # docs/results/families.json and its card

`tests/test_family_parity.py` and `tests/test_gated_feed_forward.py` record their figures with
`record_property("parity", …)`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

from write_cards import publish

from hf_relpos.console import markdown_table


ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "families.json"
TESTS = ("tests/test_family_parity.py", "tests/test_gated_feed_forward.py")
COLUMNS = {
    "float64": "outputs, float64",
    "gradient64": "gradients, float64",
    "float32": "outputs, float32",
    "gradient32": "gradients, float32",
    "back": "exported again",
    "onnx": "ONNX",
}
HEAD = """# Relative families compared with their own classes

Written by `scripts/maintenance/family_parity.py` from the figures of {tests}:
PyTorch {torch}, Transformers {transformers}, {date}.

Models of random weights, loaded by `from_pretrained` of hf_relpos. The largest difference over all heads, relative to
the largest value, from the family's class in Transformers; for JinaBERT and MosaicBERT from stored outputs of their
own code.

- *outputs*: at real tokens. *gradients*: of all parameters.
- float64: constants that Transformers rounds to float32 (DeBERTa, RoFormer, XLNet) are computed in float64.
- *exported again*: `hf_relpos.export_checkpoint` writes the same config.json and weights, bit for bit.
- *ONNX*: ONNX Runtime compared with the model in float32, at the exported length and another.

families.json has each head.

"""


def measure() -> list[dict[str, Any]]:
    """What the tests recorded, {"family", "head", figure: value} of each.

    Raises:
        SystemExit: when a test fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--full", f"--junitxml={report}", *TESTS]
        if subprocess.run(command, cwd=ROOT).returncode:
            raise SystemExit("Error: tests failed, nothing was written")
        properties = xml.etree.ElementTree.parse(report).iter("property")
        return [json.loads(each.attrib["value"]) for each in properties if each.attrib["name"] == "parity"]


def merged(records: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """{family: {head: {figure: the worst of its values}}}."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        row = rows.setdefault(record.pop("family"), {}).setdefault(record.pop("head"), {})
        for name, value in record.items():
            worse = min if isinstance(value, bool) else max
            row[name] = worse(row[name], value) if name in row else value
    return rows


def cell(value: Any) -> str:
    """A figure of the table."""
    if value is None:
        return "–"
    return ("✓" if value else "✗") if isinstance(value, bool) else f"{value:.0e}"


def card(stored: dict[str, Any]) -> str:
    """The Markdown file."""
    rows = []
    for family, heads in stored["families"].items():
        (figures,) = merged([{"family": family, "head": "", **each} for each in heads.values()])[family].values()
        rows.append([f"`{family}`", f"{len(heads)}", *(cell(figures.get(name)) for name in COLUMNS)])
    return HEAD.format(**stored["about"]) + markdown_table(["family", "heads", *COLUMNS.values()], rows) + "\n"


def main() -> None:
    """Measure, and write figures and card."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    tests = " and ".join(f"[{Path(test).name}](../../{test})" for test in TESTS)
    publish(RESULTS, {"families": merged(measure())}, tests=tests)


if __name__ == "__main__":
    main()
