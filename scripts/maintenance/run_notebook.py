"""Run docs/tour.ipynb and keep what it shows, without what differs from run to run and from machine to machine.

python scripts/maintenance/run_notebook.py                # two minutes on one CPU core; needs the extra `dev`
"""

import argparse
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

from hf_relpos.files import write_text


NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "tour.ipynb"


def run(notebook: nbformat.NotebookNode, **parameters: object) -> nbformat.NotebookNode:
    """Run a notebook in place, from its first cell to its last.

    Args:
        parameters: values of names in the cell with the tag `parameters`, for a smaller run.

    Raises:
        CellExecutionError: when a cell fails.
        KeyError: for a parameter that the cell does not have.
    """
    cell = next(each for each in notebook.cells if "parameters" in each.metadata.get("tags", ()))
    source = cell.source
    names: dict[str, object] = {}
    exec(source, names)
    for name in parameters:
        names[name]
    cell.source = "\n".join([source, *(f"{name} = {value!r}" for name, value in parameters.items())])
    with tempfile.TemporaryDirectory() as sockets:  # in files, which unlike ports no one else can reach
        config = Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
        try:
            NotebookClient(notebook, timeout=600, record_timing=False, coalesce_streams=True, config=config).execute()
        finally:
            cell.source = source
    return notebook


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Leave out warnings of libraries, and the version of the interpreter."""
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", nargs="?", type=Path, default=NOTEBOOK)
    path = parser.parse_args().notebook
    notebook = nbformat.read(path, as_version=4)
    run(notebook)
    tidy(notebook)
    write_text(path, nbformat.writes(notebook) + "\n")


if __name__ == "__main__":
    main()
