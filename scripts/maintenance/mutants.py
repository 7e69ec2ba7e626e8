"""Seed one fault at a time into the package and see which tests notice: what CI leaves out must not matter.

    python scripts/maintenance/mutants.py                  # all of tests/mutants.toml that are not in the results yet
    python scripts/maintenance/mutants.py --only NAME ...  # these, again
    python scripts/maintenance/mutants.py --check          # only whether every text is found exactly once
    python scripts/maintenance/mutants.py --quick --jobs 2 # only the tests named for each; survivors wait

Each mutant is a copy of the repository in a temporary folder in which one text of one file is replaced. It is run
against the tests that are named for it, then against all that `make test` and `make test-more` run, then, if it is
still alive, against all that `make test-all` runs; the first failure ends it. The reduced suite is a part of the full
one, so what the former kills the latter kills too. Results are kept mutant by mutant in docs/results/mutants.json,
from which docs/results/mutants.md is written; a mutant whose texts have changed is run again.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from selection import TIERS  # noqa: E402


TABLE = ROOT / "tests" / "mutants.toml"
RESULTS = ROOT / "docs" / "results"


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: what is wrong then, in a few words.
        kind: sign, off by one, dropped term and so on.
        file: of the package, from the root of the repository.
        old: text that the file has exactly once.
        new: what stands there instead.
        tests: files, or tests of them (`FILE::test`), that should notice, the likeliest first.
    """

    name: str
    kind: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Changes with the fault."""
        return hashlib.sha256("\0".join((self.file, self.old, self.new)).encode()).hexdigest()[:12]

    def apply(self, root: Path) -> None:
        """Write the fault into a copy of the repository.

        Raises:
            ValueError: where the text is not there exactly once.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(f"{self.name}: {self.file} has the text {text.count(self.old)} times, not once")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant.

    Attributes:
        killed_by: the test that failed first; None for a survivor.
        reduced: whether the reduced suite kills it.
        full: whether the full suite does.
        seconds: until the first failure, or of all runs.
    """

    fingerprint: str
    killed_by: str | None
    reduced: bool
    full: bool
    seconds: float


def read_table(path: Path = TABLE) -> list[Mutant]:
    """The mutants of the table, in its order.

    Raises:
        ValueError: for two of one name.
    """
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    mutants = [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]
    if len({mutant.name for mutant in mutants}) < len(mutants):
        raise ValueError(f"{path}: two mutants have the same name")
    return mutants


def copy_repository(to: Path) -> None:
    """What git knows of the repository, as it stands in the working tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def first_failure(root: Path, arguments: list[str], processes: str, limit: float) -> str | None:
    """Run tests in a copy of the repository until one fails, and name it; None where all pass."""
    dist = ["-n", processes] + (["--dist", "loadgroup"] if processes != "0" else [])
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *dist, *arguments]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return "(it hangs)"
    if done.returncode == 0:
        return None
    if done.returncode < 0:  # such as memory that a fault must not read
        return f"(signal {-done.returncode} ends the process)"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if failed is None and done.returncode != 4:  # 4: conftest.py cannot be imported
        raise RuntimeError(f"pytest ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return failed[1] if failed else "(the package cannot be imported)"


@contextmanager
def mutated(mutant: Mutant) -> Iterator[Path]:
    """A copy of the repository with the fault."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy_repository(Path(folder))
        mutant.apply(Path(folder))
        yield Path(folder)


def run(mutant: Mutant, processes: str, limit: float, quick: bool = False) -> Outcome | None:
    """Whether the tests notice it; with `quick` those named for it, and None where they do not."""
    start = time.monotonic()
    with mutated(mutant) as root:
        killer = first_failure(root, list(mutant.tests), "0", limit)
        if killer is None and quick:
            return None
        for suite in ([], ["-m", " or ".join(TIERS)]):
            killer = killer or first_failure(root, suite, processes, limit)
        reduced = killer is not None
        if not reduced:
            killer = first_failure(root, ["--full"], processes, 2 * limit)
    return Outcome(mutant.fingerprint, killer, reduced, killer is not None, round(time.monotonic() - start, 1))


def write_results(mutants: list[Mutant], outcomes: dict[str, Outcome]) -> None:
    """The JSON file and the table in Markdown, of the mutants that have been run."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    kept = {mutant.name: outcomes[mutant.name] for mutant in mutants if mutant.name in outcomes}
    rows = {name: asdict(outcome) for name, outcome in kept.items()}
    (RESULTS / "mutants.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (RESULTS / "mutants.md").write_text(card(rows), encoding="utf-8")


def card(rows: dict[str, dict]) -> str:
    """The table in Markdown, of the outcomes by name, as the JSON file has them."""
    mutants = read_table()
    kept = {mutant.name: Outcome(**rows[mutant.name]) for mutant in mutants if mutant.name in rows}
    reduced, full = (sum(getattr(each, suite) for each in kept.values()) for suite in ("reduced", "full"))
    lines = [
        "# Seeded faults, and the suites that find them",
        "",
        "Written by `scripts/maintenance/mutants.py` from `tests/mutants.toml`: each fault alone, in a copy of "
        "the repository. `make test` and `make test-more` run the reduced suite, `make test-all` the full one.",
        "",
        f"Of {len(kept)} mutants that were run, of {len(mutants)}, the reduced suite kills {reduced}, "
        f"the full one {full}.",
        "mutants.json says which test kills each.",
    ]
    survivors = [m for m in mutants if m.name in kept and not (kept[m.name].reduced and kept[m.name].full)]
    lines += ["", "Survivors of a suite:", ""] if survivors else []
    lines += [f"- {m.name} ({m.file}){', also of the full one' * (not kept[m.name].full)}" for m in survivors]
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these, also if there are results")
    parser.add_argument("--check", action="store_true", help="only check that every text is found exactly once")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default: 1)")
    parser.add_argument("--processes", default="auto", help="pytest processes for the whole suites (default: auto)")
    parser.add_argument("--limit", type=float, default=1800, help="seconds after which the reduced suite hangs")
    parser.add_argument("--quick", action="store_true", help="run the tests named for each only; survivors wait")
    arguments = parser.parse_args()
    mutants = read_table()
    with tempfile.TemporaryDirectory() as folder:
        copy_repository(Path(folder))
        problems = []
        for mutant in mutants:
            original = (ROOT / mutant.file).read_bytes() if (ROOT / mutant.file).is_file() else b""
            try:
                mutant.apply(Path(folder))
                compile((Path(folder) / mutant.file).read_text(encoding="utf-8"), mutant.file, "exec")
                (Path(folder) / mutant.file).write_bytes(original)
            except (ValueError, SyntaxError) as error:
                problems.append(f"{mutant.name}: {error}")
            problems += [
                f"{mutant.name}: no file {test}" for test in mutant.tests if not (ROOT / test.split("::")[0]).exists()
            ]
    if problems:
        sys.exit("\n".join(problems))
    print(f"{len(mutants)} mutants")
    if arguments.check:
        return
    kept = RESULTS / "mutants.json"
    rows = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    outcomes = {name: Outcome(**row) for name, row in rows.items()}
    known = {(name, outcome.fingerprint) for name, outcome in outcomes.items()}
    waiting = [mutant for mutant in mutants if (mutant.name, mutant.fingerprint) not in known]
    if arguments.only is not None:
        waiting = [mutant for mutant in mutants if mutant.name in arguments.only]

    def work(mutant: Mutant) -> tuple[Mutant, Outcome | None]:
        return mutant, run(mutant, arguments.processes, arguments.limit, arguments.quick)

    survivors = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for done in as_completed([pool.submit(work, mutant) for mutant in waiting]):
            mutant, outcome = done.result()
            if outcome is not None:
                outcomes[mutant.name] = outcome
                write_results(mutants, outcomes)
            if outcome is None or outcome.killed_by is None:
                survivors.append(mutant.name)
            print(f"{mutant.name}: {outcome.killed_by if outcome and outcome.killed_by else 'SURVIVES'}", flush=True)
    write_results(mutants, outcomes)
    print(f"{len(waiting) - len(survivors)} of {len(waiting)} killed", *survivors, sep="\n    ")


if __name__ == "__main__":
    main()
