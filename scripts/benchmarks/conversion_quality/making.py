"""Students are converted once, and kept in the work folder."""

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from shared.arguments import digest
from transformers import PreTrainedModel

from hf_relpos import demo
from hf_relpos.conversion import QUALITIES, convert
from hf_relpos.evaluation import Encoder, load_encoder, load_model
from hf_relpos.files import atomic_file, write_json

from .students import STUDENTS
from .texts import source_fingerprint, training_passages


TRAINING_CHARACTERS = 3_057_600  # of training text; all presets find enough windows in it


class NotMeasurable(Exception):
    """A row that cannot be measured, with the reason."""


class StudentMaker:
    """Students by name, the text that they are trained on, and the teacher."""

    def __init__(self, args: argparse.Namespace, console: Console):
        self.args, self.console = args, console
        self.work: Path = args.work
        self.work.mkdir(parents=True, exist_ok=True)

    @cached_property
    def train_text(self) -> list[str]:
        """Passages of the training text."""
        if not self.args.train_text:
            raise NotMeasurable("no --train-text")
        texts, left_out = training_passages(
            self.args.train_text, self.args.eval_text, TRAINING_CHARACTERS, self.args.seed
        )
        self.console.print(
            f"{len(texts)} passages of training text; {left_out} that the evaluation text shares left out"
        )
        return texts

    @cached_property
    def teacher(self) -> Encoder:
        """The source."""
        return load_encoder(self.args.source)

    def _source(self, demonstration: bool) -> str:
        return str(demo.CHECKPOINT) if demonstration else self.args.source

    def recipe(self, name: str, demonstration: bool = False) -> dict[str, Any]:
        """All that a student depends on; among the settings of its rows."""
        student = STUDENTS[name]
        recipe = {"source": Path(self._source(demonstration)).name, "seed": self.args.seed, **student.arguments}
        if student.learns:
            recipe["quality"] = asdict(QUALITIES[recipe["quality"]])
            del recipe["quality"]["help"]
            if student.pairs:
                recipe["pairs"] = student.pairs
            train, held_out = ([], []) if demonstration else (self.args.train_text, self.args.eval_text)
            recipe["text"] = {
                "train": [*map(source_fingerprint, train)],
                "held out": [*map(source_fingerprint, held_out)],
            }
        if student.long:
            recipe["length"] = self.args.long_length
        return recipe

    def make(self, name: str, demonstration: bool = False) -> tuple[Path, dict[str, Any]]:
        """The folder of a student, made if it is missing, and the details of the converter's report."""
        folder = self.work / f"{'demo-' * demonstration}{name}.{digest(self.recipe(name, demonstration))}"
        made_file = folder / "made.json"
        if made_file.is_file():
            return folder, json.loads(made_file.read_text(encoding="utf-8"))
        student, texts, options = STUDENTS[name], None, {}
        if student.learns:
            texts = demo.read_text("train") if demonstration else self.train_text
            options["pairs"] = student.pairs
        if student.long:
            options["length"] = self.args.long_length
        self.console.print(f"making {folder.name}", style="dim")
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        report = convert(
            self._source(demonstration),
            partial,
            **student.arguments,
            method_options=options,
            texts=texts,
            seed=self.args.seed,
        )
        made = {"details": report.details}
        write_json(partial / "made.json", made)
        partial.rename(folder)
        return folder, json.loads(json.dumps(made))

    def load(self, name: str, window: bool = False) -> tuple[Encoder, dict[str, Any]]:
        """A student as an encoder, with or without a window, and how it was made."""
        folder, made = self.make(name)
        encoder = load_encoder(folder, pooling=self.teacher.pooling)
        if window:
            encoder.model.config.attention_window = self.args.window
        return encoder, made

    def load_demo(self, name: str) -> tuple[PreTrainedModel, dict[str, Any]]:
        """The demonstration's teacher or a student of it, and how it was made."""
        if name == "teacher":
            return load_model(demo.CHECKPOINT), {}
        folder, made = self.make(name, demonstration=True)
        return load_model(folder), made

    def cached(self, name: str, settings: Any, compute: Callable[[], np.ndarray]) -> np.ndarray:
        """An array in the work folder, computed if it is missing."""
        path = self.work / f"{name}.{digest(settings)}.npy"
        if not path.is_file():
            with atomic_file(path) as partial, partial.open("wb") as file:
                np.save(file, compute())
        return np.load(path)


def forget(names: Sequence[str], rows: dict[str, Any], work: Path) -> None:
    """Remove students, and what was measured of them.

    Args:
        names: of the students.
        rows: of the results, changed in place.
        work: folder.
    """

    def concerned(name: str) -> bool:
        """Whether a row, or something in the work folder, is of one of the students."""
        name = name.partition(".")[0].rpartition("/")[2].removeprefix("demo-")
        return name.partition("+")[0] in names

    for path in filter(lambda path: concerned(path.name), list(work.iterdir()) if work.is_dir() else []):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    for key in filter(concerned, list(rows)):
        del rows[key]
