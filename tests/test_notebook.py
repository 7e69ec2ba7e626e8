"""The notebook of docs/: its code runs, what it says holds, and its outputs are those of its code, on any machine."""

import base64
import json
import re
import sys
from pathlib import Path

import nbformat
import pytest


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "maintenance"))
import run_notebook  # noqa: E402


# What a cell put behind the last one tells of the run.
FIGURES = """
import json
print(json.dumps({
    "limit": source.config.max_position_embeddings,
    "lengths": [entry.length for entry in report.fidelity.lengths],
    "cosines": cosines,
    "results": results,
    "guesses": [each["label"] for each in classify([tokenizer.decode(row["input_ids"][1:-1]) for row in test[:4]])],
}))
"""


def run(**parameters):
    """The notebook as it is committed, after a run, and the figures that it came to."""
    notebook = nbformat.read(run_notebook.NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(FIGURES))
    run_notebook.run(notebook, **parameters)
    figures = json.loads(notebook.cells.pop().outputs[0].text)
    return notebook, figures


def kinds(notebook):
    """What each cell shows: kinds of streams and of data, without the warnings of libraries."""
    run_notebook.tidy(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [(cell.id, [output.get("name") or sorted(output.data) for output in cell.outputs]) for cell in cells]


@pytest.mark.heavy
def test_every_cell_runs():
    """With less text and fewer steps than are committed."""
    committed = kinds(nbformat.read(run_notebook.NOTEBOOK, as_version=4))
    fewer = {"distillation_steps": 3, "steps": 1, "train_sentences": 32, "test_sentences": 20}
    notebook, figures = run(**fewer, lengths=(16, 128, 256))
    assert kinds(notebook) == committed
    assert figures["limit"] == 128 and all(len(each) == 3 for each in figures["cosines"].values())


@pytest.mark.full
def test_what_the_notebook_says_holds():
    _, figures = run()
    cosines, results, guesses = figures["cosines"], figures["results"], figures["guesses"]
    for position in range(5):
        relative = min(cosines["harmonic"][position], cosines["transformer_xl"][position])
        assert relative > cosines["drop"][position] + 0.2
    assert min(cosines["harmonic"] + cosines["transformer_xl"]) > 0.9
    assert min(results["harmonic"], results["transformer_xl"]) > 0.9 and results["drop"] < 0.65
    assert len(guesses) == 4 and guesses[0::2] == ["as written"] * 2 and guesses[1::2] == ["shuffled"] * 2


def test_the_outputs_are_of_this_code_and_of_no_machine():
    notebook = nbformat.read(run_notebook.NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    pictures = 0
    for cell in code:
        assert set(cell.metadata) <= {"tags"}
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr"
            shown = output.get("text") or output.data.get("text/plain", "")
            assert not re.search(r"/(home|root|tmp|work|usr)/|0x[0-9a-f]{6}|\d+:\d\d", shown), shown
            if "image/png" in output.get("data", {}):
                assert base64.b64decode(output.data["image/png"]).startswith(b"\x89PNG")
                pictures += 1
    assert pictures == 1
    assert run_notebook.NOTEBOOK.stat().st_size < 200_000


def test_a_parameter_that_it_does_not_have():
    notebook = nbformat.read(run_notebook.NOTEBOOK, as_version=4)
    with pytest.raises(KeyError, match="stepz"):
        run_notebook.run(notebook, stepz=1)
