"""What the training experiments share: options, results that are kept run by run, and the card made of them.

An experiment has a folder with `results.json`, {data set: {"settings", "about", "runs": {"arm/seed": …}}}, and
`README.md`, written anew after every run. What stands below the line `<!-- notes -->` there is written by hand, and
stays.
"""

import argparse
import hashlib
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarking import ROOT, environment, write

from hf_relpos import __version__
from hf_relpos.files import write_json


NOTES = "<!-- notes -->"
# Fields of TrainingArguments for a run whose only result is what is measured at its end.
QUIETLY = {
    "save_strategy": "no",
    "logging_strategy": "epoch",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "remove_unused_columns": False,
}
# Options that no result depends on.
PASSED_OVER = ("name", "out", "work", "seeds", "again", "threads")


def count(text: str) -> int:
    """A positive integer, for argparse."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def natural(text: str) -> int:
    """An integer from 0 on, for argparse."""
    return 0 if text == "0" else count(text)


def share(text: str) -> float:
    """A number from 0 on and below 1, for argparse."""
    value = float(text)
    if not 0 <= value < 1:
        raise ValueError
    return value


def add_options(parser: argparse.ArgumentParser, script: str, card: str, seeds: int, work: str) -> None:
    """The options that all experiments have.

    Args:
        script: its name, which the folder for files in between has by default.
        card: name of the folder under docs/results.
        seeds: by default.
        work: what that folder is for.
    """
    parser.add_argument("--name", required=True, help="of the data set, in the results")
    parser.add_argument("--seeds", type=count, default=seeds, help="how many, from 0 on")
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / card)
    parser.add_argument("--work", type=Path, default=Path("build") / script, help=work)
    parser.add_argument("--again", action="store_true", help="forget the runs of this data set")


def fingerprint(path: Path) -> str:
    """Name and content of a file, in short."""
    return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"


def command(script: str, arguments: Sequence[str]) -> str:
    """The command for all these runs; paths lose their folders, which say nothing elsewhere."""
    words, skipping = [f"python scripts/{script}"], False
    for word in arguments:
        if word.startswith("--"):
            skipping = word in ("--again", "--out", "--work")
        if not skipping:
            words.append(Path(word).name if "/" in word else word)
    return " ".join(words)


def settings_of(args: argparse.Namespace, passed_over: Sequence[str] = (), **instead) -> dict:
    """All that a run depends on, but what tells the runs apart.

    Args:
        passed_over: options that no result depends on, besides PASSED_OVER, or that tell runs apart.
        instead: what stands for an option, such as the `fingerprint` of a file for its path.
    """
    kept = {key: value for key, value in vars(args).items() if key not in (*PASSED_OVER, *passed_over)}
    return json.loads(json.dumps({**kept, **instead}))


def circumstances() -> dict[str, str]:
    """Machine, versions and date, for the card."""
    here = environment()
    return {
        "machine": f"{here['machine']}, {here['threads']} thread, other work beside",
        "versions": f"hf_relpos {__version__}, torch {here['torch']}, transformers {here['transformers']}, Python "
        f"{here['python']}",
        "date": here["date"],
    }


def stored_in(path: Path, name: str, settings: dict, again: bool) -> dict:
    """results.json, less this data set where `again`.

    Raises:
        ValueError: for a file that is not ours, and a data set measured with other settings.
    """
    if not path.is_file():
        return {}
    try:
        content = dict(json.loads(path.read_text(encoding="utf-8")))
        before = content[name]["settings"] if name in content else None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a file of this script ({error!r}); choose another --out") from None
    if before is None or again:
        content.pop(name, None)
        return content
    if before != settings:
        key = next(key for key in {**before, **settings} if before.get(key) != settings.get(key))
        raise ValueError(
            f"{path}: {name!r} was measured with {key} = {before.get(key)!r}, and now it is {settings.get(key)!r}; "
            "choose another --name or --out, or throw those runs away with --again"
        )
    return content


def save(out: Path, content: dict, card: str) -> None:
    """Write results.json and README.md, whose notes stay.

    Args:
        card: README.md, but for the notes.
    """
    readme = out / "README.md"
    notes = readme.read_text(encoding="utf-8").partition(f"{NOTES}\n")[2] if readme.is_file() else ""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "results.json", content)
    write(readme, f"{card}\n{NOTES}\n{notes}")


def spread(values: Sequence[float], places: int = 1) -> str:
    """Mean ± standard deviation of a sample; of one value the value alone."""
    mean = f"{statistics.mean(values):.{places}f}"
    return f"{mean} ± {statistics.stdev(values):.{places}f}" if len(values) > 1 else mean


def by_arm(runs: dict[str, dict]) -> dict[str, list[dict]]:
    """Results of all seeds, in the order in which arms were run first."""
    found: dict[str, list[dict]] = {}
    for key, run in runs.items():
        found.setdefault(key.rpartition("/")[0], []).append(run["result"])
    return found
