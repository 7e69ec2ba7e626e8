"""Students are converted, changed or trained once, and kept in the work folder."""

import argparse
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hf_relpos.conversion.calibration.embeddings import fold_positions
from rich.console import Console
from shared.arguments import digest
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedModel

from hf_relpos import demo
from hf_relpos.conversion import METHODS, QUALITIES, convert
from hf_relpos.data import cut_windows
from hf_relpos.evaluation import Encoder, load_encoder, load_model, load_tokenizer, model_max_length
from hf_relpos.files import atomic_file, write_json
from hf_relpos.training import DistillationSettings, distil
from hf_relpos.training.distillation_losses import DEFAULT_LOSSES

from .students import BASELINES, STUDENTS, Student, ancestry
from .texts import source_fingerprint, training_passages


CHARACTERS = 12  # of training text for each token; windows take a part of it
DISTILLED = 204_800  # tokens for distillation that the training text is to hold, whatever the steps
COST = ("cpu_seconds", "tokens")


class NotMeasurable(Exception):
    """A row that cannot be measured, with the reason."""


class StudentMaker:
    """Students by name, the texts that they are trained on, and the teacher."""

    def __init__(self, args: argparse.Namespace, console: Console):
        self.args, self.console = args, console
        self.work: Path = args.work
        self.work.mkdir(parents=True, exist_ok=True)

    @cached_property
    def train_text(self) -> list[str]:
        """Passages of the training text."""
        if not self.args.train_text:
            raise NotMeasurable("no --train-text")
        characters = CHARACTERS * (self.args.tokens + DISTILLED)
        texts, left_out = training_passages(self.args.train_text, self.args.eval_text, characters, self.args.seed)
        self.console.print(
            f"{len(texts)} passages of training text; {left_out} that the evaluation text shares left out"
        )
        return texts

    @cached_property
    def teacher(self) -> Encoder:
        """The source, without a head."""
        return load_encoder(self.args.source, masked=False)

    def source(self, demonstration: bool) -> str:
        """The model that is converted: `--source`, or that of the demonstration."""
        return str(demo.CHECKPOINT) if demonstration else self.args.source

    def recipe(self, name: str, demonstration: bool = False) -> dict[str, Any]:
        """All that a student depends on; among the settings of its rows."""
        student = STUDENTS[name]
        recipe = {"source": Path(self.source(demonstration)).name, "seed": self.args.seed, **asdict(student)}
        del recipe["label"], recipe["quality"]
        if student.quality is not None:
            recipe["quality"] = asdict(QUALITIES[student.quality])
        if student.start is not None:
            recipe["start"] = self.recipe(student.start, demonstration)
        if student.needs_text:
            if student.quality is None:
                recipe["tokens"] = self.args.tokens
            train, held_out = ([], []) if demonstration else (self.args.train_text, self.args.eval_text)
            recipe["text"] = {
                "train": [*map(source_fingerprint, train)],
                "held out": [*map(source_fingerprint, held_out)],
            }
        if student.then == "distil":
            recipe |= {"steps": self.args.steps, "batch_tokens": self.args.batch_tokens, "distil": self.args.distil}
        if student.method in BASELINES or student.long:
            recipe["length"] = self.args.long_length
        del recipe["long"]
        if student.long == "window":
            recipe["window"] = self.args.window
        return recipe

    def make(self, name: str, demonstration: bool = False) -> tuple[Path, dict[str, Any]]:
        """The folder of a student, made if it is missing, and its cost: CPU seconds and tokens of text."""
        folder = self.work / f"{'demo-' * demonstration}{name}.{digest(self.recipe(name, demonstration))}"
        cost_file = folder / "made.json"
        if cost_file.is_file():
            return folder, json.loads(cost_file.read_text(encoding="utf-8"))
        student, start_cost = STUDENTS[name], {"cpu_seconds": 0.0, "tokens": 0}
        if student.start is not None:
            start, start_cost = self.make(student.start, demonstration)
        texts = None
        if student.needs_text:  # reading it costs the same for all students, and is not counted
            texts = demo.read_text("train") if demonstration else self.train_text
        self.console.print(f"making {folder.name}", style="dim")
        start_time = time.process_time()
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        details: dict[str, Any] = {}
        if student.start is not None:
            shutil.copytree(start, partial, ignore=shutil.ignore_patterns("made.json"))
        else:
            details = self._convert(student, partial, demonstration, texts)
        if student.then is not None:
            details |= self._change(student, partial, demonstration, texts)
        cost = {"cpu_seconds": time.process_time() - start_time, "tokens": 0}
        made = {**cost, "before": {what: start_cost[what] for what in COST}, **details}
        write_json(partial / "made.json", made)
        partial.rename(folder)
        return folder, made

    def _convert(
        self, student: Student, target: Path, demonstration: bool, texts: Sequence[str] | None
    ) -> dict[str, Any]:
        """Convert; returns the cost of the fits and steps, where there were any, and the details of the report."""
        if student.quality is not None:
            source = self.source(demonstration)
            details = convert(
                source,
                target,
                quality=student.quality,
                method_options=self._long_options(student),
                texts=texts,
                seed=self.args.seed,
            ).details
            details = json.loads(json.dumps(details))
            spent, parts = details["cpu_seconds"], ("calibration", "distillation")
            cost = {
                "cpu_seconds": sum(seconds for what, seconds in spent.items() if what != "check"),
                "tokens": sum(details[part]["tokens"] for part in parts if part in details),
            }
            return {**cost, "details": details}
        method = student.method
        if method not in METHODS:
            raise NotMeasurable(f"method = {method!r} is not there yet")
        if texts is None and METHODS[method].text == "required":
            raise NotMeasurable(f"method = {method!r} needs text")
        options = self._long_options(student)
        if texts is not None and "tokens" in METHODS[method].options:
            options["tokens"] = self.args.tokens
        report = convert(
            self.source(demonstration),
            target,
            position_embedding_type=student.scheme,
            position_options=student.options or None,
            method=method,
            method_options=options,
            texts=texts,
            seed=self.args.seed,
        )
        details = json.loads(json.dumps(report.details))
        cost = {name: details["calibration"][name] for name in COST if "calibration" in details}
        return {**cost, "details": details}  # without the converter's own checks

    def _long_options(self, student: Student) -> dict[str, Any]:
        """Options of its method; none is fitted to pairs, since single texts are compared."""
        learns = student.quality is not None or "pairs" in METHODS[student.method].options
        options: dict[str, Any] = {"pairs": 0} if learns else {}
        if student.method in BASELINES or student.long:
            options["length"] = self.args.long_length
        if student.long == "window":
            options["window"] = self.args.window
        return options

    def _change(
        self, student: Student, folder: Path, demonstration: bool, texts: Sequence[str] | None
    ) -> dict[str, Any]:
        """Do what `student.then` says to the model in a folder; returns tokens and losses of a distillation."""
        auto = AutoModelForMaskedLM if demonstration else AutoModel
        model, teacher = (
            auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
            for path in (folder, self.source(demonstration))
        )
        tokenizer, details = load_tokenizer(folder), {}
        if student.then == "fold":
            embeddings, teacher_embeddings = (each.base_model.embeddings for each in (model, teacher))
            with torch.no_grad():  # `drop` put the mean there
                embeddings.token_type_embeddings.weight.copy_(teacher_embeddings.token_type_embeddings.weight)
            fold_positions(model, teacher_embeddings.position_embeddings.weight.detach(), tokenizer.cls_token_id)
        elif student.then == "random":
            generator = torch.Generator().manual_seed(self.args.seed)
            for name, parameter in model.named_parameters():
                if "distance_embedding" in name:
                    parameter.data.normal_(0, 0.02, generator=generator)
        elif student.then == "distil":
            limit = model_max_length(teacher)
            windows = cut_windows(
                tokenizer,
                texts,
                self.args.steps * self.args.batch_tokens,
                sorted({min(length, limit) for length in (32, 128, 256, 512)}),
                seed=self.args.seed + 1,
            )
            settings = DistillationSettings(
                steps=self.args.steps,
                batch_tokens=self.args.batch_tokens,
                seed=self.args.seed,
                **({"losses": {**DEFAULT_LOSSES, "logits": 1.0}} if demonstration else {}),
                **self.args.distil,
            )
            report = distil(model, teacher, windows.ids, settings)
            details = {"tokens": report.tokens, "losses": report.losses}
        model.save_pretrained(folder)
        return details

    def load(self, name: str, variant: str = "") -> tuple[Encoder, dict[str, Any]]:
        """A student as an encoder, with a window or temperature, and its cost."""
        folder, made = self.make(name)
        encoder = load_encoder(folder, pooling=self.teacher.pooling)
        for key, value in self.variant_settings(variant).items():
            setattr(encoder.model.config, key, value)
        return encoder, made

    def load_demo(self, name: str) -> tuple[PreTrainedModel, dict[str, Any]]:
        """The demonstration's teacher or a student of it, and its cost."""
        if name == "teacher":
            return load_model(demo.CHECKPOINT), {}
        folder, made = self.make(name, demonstration=True)
        return load_model(folder), made

    def variant_settings(self, variant: str) -> dict[str, Any]:
        """Fields of the configuration that a variant sets."""
        if variant == "+window":
            return {"attention_window": self.args.window}
        if variant == "+log":
            length = model_max_length(self.teacher.model)
            return {"attention_temperature": "log", "attention_temperature_length": length}
        return {}

    def cached(self, name: str, settings: Any, compute: Callable[[], np.ndarray]) -> np.ndarray:
        """An array in the work folder, computed if it is missing."""
        path = self.work / f"{name}.{digest(settings)}.npy"
        if not path.is_file():
            save_array(path, compute())
        return np.load(path)


def save_array(path: Path, array: np.ndarray) -> None:
    """`np.save`, atomically."""
    with atomic_file(path) as partial, partial.open("wb") as file:
        np.save(file, array)


def forget(names: Sequence[str], rows: dict[str, Any], work: Path) -> None:
    """Remove students, those that started from them, and what was measured of them.

    Args:
        names: of the students.
        rows: of the results, changed in place.
        work: folder.
    """

    def concerned(name: str) -> bool:
        """Whether a row, or something in the work folder, rests on one of the students."""
        name = name.partition(".")[0].rpartition("/")[2]
        for prefix in ("demo-", "docs-", "queries-"):
            name = name.removeprefix(prefix)
        return not set(ancestry(name.partition("+")[0])).isdisjoint(names)

    for path in filter(lambda path: concerned(path.name), list(work.iterdir()) if work.is_dir() else []):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    for key in filter(concerned, list(rows)):
        del rows[key]
