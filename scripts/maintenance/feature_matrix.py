"""Run the tests of features and write docs/features.md: which feature works with which kind of position scheme.

    python scripts/maintenance/feature_matrix.py                            # all of them
    python scripts/maintenance/feature_matrix.py --feature "PEFT LoRA" ...  # these rows anew; the others stay
    python scripts/maintenance/feature_matrix.py --processes 2

A test of a feature is marked `@pytest.mark.feature("name")`, is parametrized with `scheme`, and where a combination is
refused on purpose asserts the refusal and calls `record_property("refused", reason)`; where something is to be said of
what works, `record_property("note", text)`. The results are kept test by
test in docs/results/features.json, from which the matrix is written. Exit code 1 if a test failed.

This file is also the pytest plugin that does it: `pytest -p feature_matrix --full --feature-results FILE`, with
`scripts/maintenance` on PYTHONPATH.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_relpos.files import write_json, write_text


ROOT = Path(__file__).resolve().parents[2]
# What `record_property` names, and the outcome that it makes.
SAID = {"refused": "refused", "note": "passed"}
RESULTS = ROOT / "docs" / "results" / "features.json"
CARD_PATH = "features.md"  # in docs


# The plugin ------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("features")
    group.addoption("--feature", action="append", metavar="NAME", help="only tests of this feature; may be repeated")
    group.addoption("--feature-results", type=Path, metavar="FILE", help="results of features, brought up to date")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--feature-results") is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.getoption("--feature-results"), config.getoption("--feature")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of the chosen features; each report says of which feature and scheme it is."""
    import selection

    chosen = config.getoption("--feature")
    features = {item: [mark.args[0] for mark in item.iter_markers("feature")] for item in items}
    known = sorted({name for names in features.values() for name in names})
    unknown = set(chosen or ()) - set(known)
    if unknown:
        raise pytest.UsageError(f"--feature: no test is marked {sorted(unknown)}; there are {known}")
    kept = []
    for item in items:
        if not features[item] or (chosen is not None and not set(chosen) & set(features[item])):
            continue
        scheme = item.callspec.params.get("scheme") if hasattr(item, "callspec") else None
        if scheme is None:
            raise pytest.UsageError(f"{item.nodeid}: the test of a feature is parametrized with `scheme`")
        if scheme in selection.FEATURE_SCHEMES:  # others have no column
            item.user_properties += [("features", features[item]), ("scheme", scheme)]
            kept.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


class Recorder:
    """Puts the outcomes of a session into the results. Runs in one process, also under pytest-xdist."""

    def __init__(self, path: Path, chosen: list[str] | None) -> None:
        """
        Args:
            path: the results.
            chosen: the features that were asked for; None for all, and then others leave the results.
        """
        self.path, self.chosen = path, chosen
        self.rows: dict[str, dict[str, dict[str, str]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        if "features" not in properties or (report.when != "call" and report.passed):
            return
        test = report.nodeid.partition("@")[0]  # pytest-xdist appends the name of a group
        for feature in properties["features"]:
            cell = self.rows.setdefault(feature, {}).setdefault(properties["scheme"], {})
            if not cell.get(test, "").startswith("failed"):
                cell[test] = outcome(report, properties)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            write_json(self.path, merged(read(self.path), self.rows, self.chosen))


def outcome(report: pytest.TestReport, properties: dict[str, Any]) -> str:
    """What became of a test, in a word or with a reason or note."""
    if report.failed or hasattr(report, "wasxfail"):
        return "failed"
    if report.skipped:
        return "skipped"
    return next((f"{word}: {properties[key]}" for key, word in SAID.items() if key in properties), "passed")


# The results -----------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """Stored results; empty where there are none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"schemes": {}, "features": {}}


def merged(
    stored: dict[str, Any], rows: dict[str, dict[str, dict[str, str]]], chosen: Iterable[str] | None
) -> dict[str, Any]:
    """Stored results with the rows of a session in place of those that it ran.

    Args:
        rows: {feature: {scheme: {test: outcome}}}.
        chosen: the features that the session was confined to; None for all, so that only its own remain.
    """
    import selection

    about = {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    new = {
        name: about | {"tests": {scheme: dict(sorted(cell.items())) for scheme, cell in sorted(row.items())}}
        for name, row in rows.items()
        if chosen is None or name in chosen
    }
    return {
        "schemes": {name: sorted(selection.kinds(name)) for name in selection.FEATURE_SCHEMES},
        "features": dict(sorted({**({} if chosen is None else stored["features"]), **new}.items())),
    }


# The card --------------------------------------------------------------------------------------------------------


class Footnotes:
    """Numbers for the notes of a card, one for each text."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, texts: Iterable[str]) -> str:
        """References to these notes."""
        return "".join(f"[^{self.numbers.setdefault(text, len(self.numbers) + 1)}]" for text in texts)

    def lines(self) -> list[str]:
        """The notes themselves."""
        return [f"[^{number}]: {text}" for text, number in self.numbers.items()]


def cell_text(outcomes: Iterable[str], notes: Footnotes) -> str:
    """A cell of the matrix, from what became of its tests."""
    found = sorted(set(outcomes))
    if "failed" in found:
        return "✗"
    said = notes.mark(text for _, _, text in (each.partition(": ") for each in found) if text)
    if any(each.startswith("passed") for each in found):
        return f"✓{said}"
    return f"refused{said}" if said else ""


def card(results: dict[str, Any]) -> str:
    """The matrix in Markdown, of results as the JSON file has them."""
    notes, schemes, features = Footnotes(), results["schemes"], results["features"]
    rows = []
    for name, row in features.items():
        files = sorted({Path(test.partition("::")[0]).name for cell in row["tests"].values() for test in cell})
        cells = [cell_text(row["tests"].get(scheme, {}).values(), notes) for scheme in schemes]
        links = ", ".join(f"[{file.removeprefix('test_').removesuffix('.py')}](../tests/{file})" for file in files)
        rows.append(f"| {name} | {' | '.join(cells)} | {links} |")
    runs = {(row["torch"], row["transformers"]) for row in features.values()}
    versions = "; ".join(f"PyTorch {torch} and Transformers {transformers}" for torch, transformers in sorted(runs))
    tests = sum(len(cell) for row in features.values() for cell in row["tests"].values())
    lines = [
        "# Features and position schemes",
        "",
        "Written by `scripts/maintenance/feature_matrix.py` from the outcomes of tests; a column stands for all "
        f"schemes with such terms. {len(features)} features, {tests} tests, with {versions}.",
        "",
        "✓: tests show that it works, as far as a note says. refused: an error says so, for the reason below. ✗: a "
        "test failed. Empty: not tested.",
        "",
        f"| feature | {' | '.join(f'`{scheme}`' for scheme in schemes)} | tests |",
        f"| --- |{' :-: |' * len(schemes)} --- |",
        f"| *terms* | {' | '.join(', '.join(kinds) for kinds in schemes.values())} | |",
        *rows,
    ]
    if notes.numbers:
        lines += ["", *notes.lines()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--feature", nargs="+", default=[], metavar="NAME", help="these rows only")
    parser.add_argument("--processes", default="0", help="pytest processes, a number or auto (default: this one)")
    arguments = parser.parse_args()
    options = ["-p", "feature_matrix", "-q", "--rootdir", str(ROOT), "--full"]
    options += ["-n", arguments.processes, "--dist", "loadgroup", "--feature-results", str(RESULTS)]
    options += [word for name in arguments.feature for word in ("--feature", name)]
    status = pytest.main([*options, str(ROOT / "tests")])
    if RESULTS.is_file():
        write_text(ROOT / "docs" / CARD_PATH, card(read(RESULTS)))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
