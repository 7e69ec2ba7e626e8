"""Results of an experiment, kept run by run."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_relpos import __version__
from hf_relpos.files import write_json, write_text

from .measuring import environment, utc_now
from .reports import with_notes


class Results:
    """The runs of one data set, in the folder of an experiment.

    The folder holds `results.json`, {data set: {"settings", "about", "runs": {"variant/seed": {"date", "result"}}}},
    and `README.md`, the card with its notes, both written after every run.

    Attributes:
        content: all data sets, as in results.json.
        entry: this data set.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        settings: dict[str, Any],
        card: Callable[[dict[str, Any]], str],
        again: bool = False,
    ):
        """
        Args:
            folder: read if it exists; nothing is written yet.
            name: of the data set.
            settings: that all of its runs have in common.
            card: makes README.md from `content`, without the notes.
            again: delete the stored runs of this data set.

        Raises:
            ValueError: for a results.json of another kind, and for stored runs with other settings.
        """
        self.folder, self.card = folder, card
        self.content: dict[str, Any] = {}
        path = folder / "results.json"
        if path.is_file():
            try:
                self.content = dict(json.loads(path.read_text(encoding="utf-8")))
                stored = self.content[name]["settings"] if name in self.content else settings
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}: not a file of this script ({error!r}); choose another --out") from None
            if again:
                self.content.pop(name, None)
            elif stored != settings:
                key = next(key for key in {**stored, **settings} if stored.get(key) != settings.get(key))
                raise ValueError(
                    f"{path}: {name!r} was measured with {key} = {stored.get(key)!r}, and now it is "
                    f"{settings.get(key)!r}; choose another --name or --out, or throw those runs away with --again"
                )
        self.entry: dict[str, Any] = self.content.setdefault(name, {"settings": settings, "about": {}, "runs": {}})

    @property
    def runs(self) -> dict[str, dict[str, Any]]:
        """{"variant/seed": {"date", "result"}}."""
        return self.entry["runs"]

    def pending(self, variants: Sequence[Any], seeds: int, quiet: bool = False) -> Iterator[tuple[Any, int]]:
        """(variant, seed) of every run that is not stored; unless `quiet`, the others are printed."""
        for seed in range(seeds):
            for variant in variants:
                if f"{variant}/{seed}" in self.runs:
                    if not quiet:
                        print(f"{variant}/{seed}: there already")
                else:
                    yield variant, seed

    def add(self, variant: object, seed: int, result: dict[str, Any]) -> None:
        """Add a run."""
        self.runs[f"{variant}/{seed}"] = {"date": utc_now(), "result": result}

    def save(self) -> None:
        """Write results.json and README.md."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "results.json", self.content)
        write_text(self.folder / "README.md", with_notes(self.card(self.content), self.folder / "README.md"))


def by_variant(runs: dict[str, dict[str, Any]], order: Iterable[str] = ()) -> dict[str, list[dict[str, Any]]]:
    """The results of all seeds of each variant: first those in `order`, then others as they were run."""
    names = [key.rpartition("/")[0] for key in runs]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in [*order, *names] if name in names}
    for name, run in zip(names, runs.values(), strict=True):
        results[name].append(run["result"])
    return results


def conditions() -> dict[str, str]:
    """Machine, versions and date, for the card."""
    here = environment()
    return {
        "machine": f"{here['machine']}, {here['threads']} thread, other work beside",
        "versions": f"hf_relpos {__version__}, torch {here['torch']}, transformers {here['transformers']}, Python "
        f"{here['python']}",
        "date": here["date"],
    }
