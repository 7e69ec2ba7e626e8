"""What is measured of a student: fidelity, long documents, masked tokens of the demonstration."""

import argparse
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from shared.measuring import forward_times

from hf_relpos import demo
from hf_relpos.data import cut_windows
from hf_relpos.evaluation import (
    Encoder,
    FidelitySettings,
    fidelity,
    load_model,
    load_tokenizer,
    masked_agreement,
    model_max_length,
    pair_vectors,
    rank_correlation,
    shift_consistency,
    similarities,
    spearman_difference,
)
from hf_relpos.evaluation.compare import windows_by_length

from .making import NotMeasurable, StudentMaker
from .students import STUDENTS, split_row
from .texts import draw_pairs, read_source, source_fingerprint


# Rows whose forward pass is timed: their tokens, and how often.
TIMED, TIMED_ROUNDS = (128, 512), 15


class Bench:
    """Measures rows; students come from a StudentMaker."""

    def __init__(self, args: argparse.Namespace, console: Console):
        self.args, self.console = args, console
        self.students = StudentMaker(args, console)
        self.origin = {"source": Path(args.source).name, "seed": args.seed}

    @property
    def teacher(self) -> Encoder:
        """The source."""
        return self.students.teacher

    @cached_property
    def held_out(self) -> dict[str, dict[int, Sequence[Sequence[int]]]]:
        """Windows of each evaluation text, by length."""
        if not self.args.eval_text:
            raise NotMeasurable("no --eval-text")
        return self._windows(self.args.eval_text)

    @cached_property
    def other(self) -> dict[str, dict[int, Sequence[Sequence[int]]]]:
        """Windows of the first evaluation text and of that of another kind, by length."""
        if not (self.args.eval_text and self.args.other_text):
            raise NotMeasurable("no --eval-text or no --other-text")
        return self._windows([self.args.eval_text[0], self.args.other_text])

    def _windows(self, sources: Sequence[str]) -> dict[str, dict[int, Sequence[Sequence[int]]]]:
        """Windows of texts by the name of their file, then by length."""
        texts = {}
        for source in sources:
            path, _, column = source.partition("#")
            windows, skipped, _ = windows_by_length(
                self.teacher.tokenizer, [path], column or "text", self.args.lengths, self.args.window_tokens
            )
            for length, reason in skipped.items():
                self.console.print(f"{path}, {length} tokens: {reason}", markup=False)
            texts[Path(path).name] = windows
        return texts

    @cached_property
    def long_rows(self) -> list[Sequence[int]]:
        """Documents of `--long-length` tokens, `--documents` of each text."""
        if not self.args.long_text:
            raise NotMeasurable("no --long-text and no --eval-text")
        length, count, rows = self.args.long_length, self.args.documents, []
        for source in self.args.long_text:
            windows = cut_windows(
                self.teacher.tokenizer, read_source(source), count * length, (length,), 0.0, self.args.seed
            )
            rows += windows.ids[:count]
        return rows

    def settings(self, key: str) -> dict[str, Any]:
        """All that a row depends on."""
        kind, student, window = split_row(key)
        args = self.args
        settings: dict[str, Any] = dict(self.origin)
        if student in STUDENTS:
            settings["student"] = self.students.recipe(student, kind == "demo")
            settings["window"] = args.window if window else None
        if kind in ("fidelity", "quality"):
            sources = args.eval_text
            if kind == "quality":
                sources = [*args.eval_text[:1], *filter(None, [args.other_text])]
                settings["timed"] = TIMED
            settings |= {"lengths": args.lengths, "window_tokens": args.window_tokens}
            settings |= {"text": [*map(source_fingerprint, sources)]}
            settings |= {"sts": [*map(source_fingerprint, args.sts)], "sts_pairs": args.sts_pairs}
        elif kind == "long":
            settings |= {"length": args.long_length, "documents": args.documents}
            settings["text"] = [*map(source_fingerprint, args.long_text)]
        else:
            settings["tokens"] = args.masked_tokens
        return settings

    def measure(self, key: str) -> dict[str, Any]:
        """One row.

        Raises:
            NotMeasurable: with the reason.
        """
        kind, student, window = split_row(key)
        if kind == "fidelity":
            return self._fidelity(student, self.held_out)
        if kind == "quality":
            return {**self._fidelity(student, self.other), "times": self._times(student)}
        if kind == "long":
            return self._long(student, window)
        return self._demo(student)

    def _times(self, name: str) -> dict[str, dict[str, float]]:
        """CPU seconds of a forward pass of the teacher and of a student, by tokens of a row."""
        limit = model_max_length(self.teacher.model)
        models = {"teacher": self.teacher.model, "student": self.students.load(name)[0].model}
        lengths = [length for length in TIMED if limit is None or length <= limit]
        return {str(length): forward_times(models, length, TIMED_ROUNDS) for length in lengths}

    def _fidelity(self, name: str, held_out: dict[str, dict[int, Sequence[Sequence[int]]]]) -> dict[str, Any]:
        """Cosines to the teacher by length and text, and similarity sets; of the teacher, those to itself moved."""
        encoder, made = (self.teacher, {}) if name == "teacher" else self.students.load(name)
        texts: dict[str, Any] = {}
        for number, (text, windows) in enumerate(held_out.items()):
            if name == "teacher":
                if number == 0:  # five more passes over the text
                    texts[text] = self._ceiling(windows)
                continue
            # the divergence of attention takes as long as all the rest
            settings = FidelitySettings(encoder.pooling, divergence=number == 0, ceiling=False)
            entries = fidelity(self.teacher.model, encoder.model, windows, settings).lengths
            self.teacher.model.set_attn_implementation("sdpa")
            texts[text] = {
                "windows": {str(entry.length): entry.windows for entry in entries},
                "token": {str(entry.length): entry.token_cosine for entry in entries},
                "sentence": {str(entry.length): entry.sentence_cosine for entry in entries},
                "divergence": {str(entry.length): entry.divergence for entry in entries if entry.divergence},
            }
        sts = {Path(path).name: self._similarity(path, name, encoder) for path in self.args.sts}
        return {"texts": texts, "sts": sts} | made

    def _ceiling(self, windows: dict[int, Sequence[Sequence[int]]]) -> dict[str, Any]:
        """The teacher's agreement with itself, at lengths below its maximum."""
        limit = model_max_length(self.teacher.model)
        moved = {
            str(length): shift_consistency(self.teacher.model, rows, pooling=self.teacher.pooling)
            for length, rows in windows.items()
            if length < limit
        }
        return {
            "windows": {length: entry.windows for length, entry in moved.items()},
            "token": {length: entry.token_cosine for length, entry in moved.items()},
            "sentence": {length: entry.sentence_cosine for length, entry in moved.items()},
            "by_shift": {length: entry.by_shift for length, entry in moved.items()},
        }

    def _similarity(self, path: str, name: str, encoder: Encoder) -> dict[str, Any]:
        """Spearman's ρ × 100, and its difference to the teacher's."""
        pairs = draw_pairs(path, self.args.sts_pairs, self.args.seed)
        scores = np.array([pair.score for pair in pairs])
        teacher_cosines = self.students.cached(
            f"sts-{Path(path).stem}",
            [self.origin, source_fingerprint(path), self.args.sts_pairs],
            lambda: similarities(pair_vectors(self.teacher, pairs)),
        )
        cosines = teacher_cosines if name == "teacher" else similarities(pair_vectors(encoder, pairs))
        result = {"pairs": len(pairs), "rho": 100 * rank_correlation(cosines, scores)}
        if name != "teacher":
            result["difference"] = spearman_difference(teacher_cosines, cosines, scores, seed=self.args.seed)
        return result

    def _long(self, name: str, window: bool) -> dict[str, Any]:
        """Token cosine to the teacher's windows by quarter of long documents."""
        encoder, _ = self.students.load(name, window)
        with_ceiling = name == "zero"  # it is the same for all students
        rows = {self.args.long_length: self.long_rows}
        settings = FidelitySettings(encoder.pooling, ceiling=with_ceiling)
        entry = fidelity(self.teacher.model, encoder.model, rows, settings).lengths[0]
        result = {
            "documents": entry.windows,
            "token": entry.token_cosine,
            "sentence": entry.sentence_cosine,
            "quarters": entry.token_cosine_by_quarter,
        }
        if with_ceiling:
            result["ceiling"] = {"token": entry.ceiling.token_cosine, "sentence": entry.ceiling.sentence_cosine}
        return result

    def _demo(self, name: str) -> dict[str, Any]:
        """Accuracy on masked tokens of the demonstration's text."""
        model, made = self.students.load_demo(name)
        limit, tokens = model_max_length(load_model(demo.CHECKPOINT)), self.args.masked_tokens
        tokenizer, novel, accuracy = load_tokenizer(demo.CHECKPOINT), demo.read_text("eval"), {}
        for length in (limit // 2, limit):
            rows = demo.cut_rows(tokenizer, novel, length)[: max(1, tokens // length)].tolist()
            found = masked_agreement(model, model, rows, tokenizer.mask_token_id, self.args.seed)
            accuracy[str(length)] = round(100 * found.student_accuracy, 2)
        return {"accuracy": accuracy} | made
