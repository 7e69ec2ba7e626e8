"""The figures of conversion: how much of an absolute BERT its relative copies keep, row by row.

    python scripts/bench_conversion.py --source all-MiniLM-L6-v2 --data DATA
    python scripts/bench_conversion.py --source MODEL --train-text a.txt b.jsonl#abstract --eval-text c.txt --sts d.tsv
    python scripts/bench_conversion.py --source … --data … --rows 'fidelity/*' long/calibrated+window   # only these
    python scripts/bench_conversion.py --list                                                  # names of the rows

Writes OUT/conversion.json and .md after every row, and .png at the end (extra `plot`). A row that is in the JSON
already, with the same settings, is not measured again; converted models and vectors of documents are kept in WORK.
Settings say nothing of the code: after a change of it, `--again calibrated` forgets that student and what rests on it.
SOURCE is a sentence-embedding BERT. DATA is a folder with the files that `DATA` below names.

Text is `FILE` or `FILE#FIELD`. What is learnt from is cut into stretches, about equally many of each file; stretches
that share twelve words in a row with an evaluation text are left out, and so are questions about documents that share
them with the training text. Seconds are CPU seconds of this process.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedModel
from transformers.utils import logging

from hf_relpos import demo
from hf_relpos.calibration.embeddings import fold_positions
from hf_relpos.console import print_table
from hf_relpos.conversion import METHODS, convert
from hf_relpos.conversion.calibrated import LEARNING_RATE, TABLE_LEARNING_RATE
from hf_relpos.data import cut_windows, read_texts
from hf_relpos.evaluation import (
    Encoder,
    FidelitySettings,
    Retrieval,
    difference,
    document_vectors,
    fidelity,
    load_encoder,
    load_model,
    load_tokenizer,
    masked_accuracy_by_length,
    model_max_length,
    pair_vectors,
    rank_correlation,
    rank_documents,
    read_documents,
    read_pairs,
    read_queries,
    shift_consistency,
    similarities,
    spearman_difference,
)
from hf_relpos.evaluation.compare import windows_by_length
from hf_relpos.files import write_json
from hf_relpos.model.scheme import is_count
from hf_relpos.training import DistillationSettings, distil
from hf_relpos.training.distillation_losses import DEFAULT_LOSSES


# Folder of --data.
DATA = {
    "train_text": ["text/novels.txt.xz", "long/wikidocs.docs.jsonl.xz", "text/acl_abstracts.jsonl.xz#abstract"],
    "eval_text": ["text/wikitext2.valid.txt", "text/peps.jsonl.xz#abstract"],
    "sts": ["sts/stsb.dev.tsv", "sts/stsb.train.tsv"],
    "docs": "long/wikidocs.docs.jsonl.xz",
    "queries": "long/wikidocs.queries.jsonl",
}
STRETCH = 12_000  # letters of text that are taken in one piece
LETTERS = 12  # of training text for each token that is learnt from; windows use a part of what they are given
DISTILLED = 204_800  # tokens for distillation that the training text is to hold, whatever the steps
SHARED = 12  # words in a row that no training text shares with an evaluation text
SLICE = 16  # documents between two writings of their vectors
# The rates of the method calibrate+distil, whose two halves are taken one after the other here.
DISTIL = {"learning_rate": LEARNING_RATE, "table_learning_rate": TABLE_LEARNING_RATE}
KINDS = ("fidelity/", "long/", "demo/", "retrieval/")
COST = ("cpu_seconds", "tokens")
TEACHERS = ("truncate", "chunks")  # readers that are the teacher itself
BASELINES = ("truncate", "chunks", "interpolate", "hierarchical")


@dataclass(frozen=True)
class Student:
    """One way to make a student.

    Attributes:
        label: for the tables.
        method: of the converter; None for one that goes on from another student.
        scheme: position_embedding_type.
        options: position_options.
        start: the student to go on from.
        then: what is done afterwards: `random` (tables N(0, 0.02)), `fold` (position vectors into the embeddings) or
            `distil`.
        needs_text: whether it learns from any.
        long: it is fitted to rows of `--long-length` tokens as well, with the attention window of `--window`.
    """

    label: str
    method: str | None
    scheme: str | None = "tables"
    options: dict[str, Any] = field(default_factory=dict)
    start: str | None = None
    then: str | None = None
    needs_text: bool = False
    long: bool = False


STUDENTS = {
    "random": Student("positions dropped, tables N(0, 0.02)", "drop", "relative_key", then="random"),
    "zero": Student("positions dropped, tables zero", "drop"),
    "fold": Student("+ mean vector and [CLS] folded in", "drop", then="fold"),
    "no-data": Student("calibrated without text, on random tokens", "calibrate"),
    "calibrated": Student("calibrated (A, B, c, V per head)", "calibrate", needs_text=True),
    "distilled": Student("calibrated, distilled", None, start="calibrated", then="distil", needs_text=True),
    "key": Student("`relative_key`, calibrated", "calibrate", "relative_key", needs_text=True),
    "key-distilled": Student(
        "`relative_key`, calibrated, distilled", None, "relative_key", start="key", then="distil", needs_text=True
    ),
    "shaw": Student("`shaw`, calibrated", "calibrate", "shaw", {"clip": 64}, needs_text=True),
    "transformer_xl": Student("`transformer_xl`, calibrated", "calibrate", "transformer_xl", needs_text=True),
    "scalar": Student("c per head (T5-like), calibrated", "calibrate", "tables", {"terms": "c"}, needs_text=True),
    "fold-distilled": Student("control: folded, distilled", None, start="fold", then="distil", needs_text=True),
    "long": Student("calibrated on long rows too, window", "calibrate", needs_text=True, long=True),
    "interpolate": Student("table interpolated", "interpolate", None),
    "hierarchical": Student("hierarchical decomposition", "hierarchical", None),
}
FIDELITY = [name for name, student in STUDENTS.items() if student.scheme is not None]
VARIANTS = {"": "all keys", "+log": "log temperature", "+window": "window"}
LONG = [
    *("interpolate", "interpolate+log", "hierarchical", "hierarchical+log", "hierarchical+window"),
    *("zero", "zero+window", "fold", "fold+window"),
    *("calibrated", "calibrated+log", "calibrated+window", "distilled", "distilled+log", "distilled+window", "long"),
]
READERS = [
    *(*BASELINES, "hierarchical+window", "calibrated+window", "distilled+window", "long", "calibrated", "distilled"),
]
DEMO = ["teacher", "zero", "fold", "no-data", "calibrated", "distilled", "key", "key-distilled"]
ROWS = [
    "fidelity/teacher",
    *(f"fidelity/{name}" for name in FIDELITY),
    *(f"long/{name}" for name in LONG),
    *(f"demo/{name}" for name in DEMO),
    *(f"retrieval/{name}" for name in READERS),
]


def label(name: str) -> str:
    """What a student, or a variant of one, is called in the tables."""
    student, plus, variant = name.partition("+")
    words = {"teacher": "teacher", "truncate": "teacher, cut", "chunks": "teacher, mean of chunks"}.get(student)
    return (words or STUDENTS[student].label) + (f", {VARIANTS[plus + variant]}" if plus else "")


class Missing(Exception):
    """A row that cannot be measured, with the reason."""


def digest(content: Any) -> str:
    """A short name of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def fingerprint(source: str) -> list[Any]:
    """Name, field and size of a text file, so that another one of the same name is told apart."""
    path, _, column = source.partition("#")
    return [Path(path).name, column, Path(path).stat().st_size if Path(path).is_file() else None]


def read(source: str) -> Iterable[str]:
    """The documents of `FILE` or `FILE#FIELD`."""
    path, _, column = source.partition("#")
    return read_texts(path, column or "text")


def runs_of_words(text: str) -> set[int]:
    """A number for each run of `SHARED` words."""
    words = text.lower().split()
    return {hash(tuple(words[at : at + SHARED])) for at in range(len(words) - SHARED + 1)}


def training_stretches(
    sources: Sequence[str], held_out: Sequence[str], letters: int, seed: int
) -> tuple[list[str], int]:
    """Stretches of text at random places, about as many letters of each source.

    Args:
        sources: `FILE` or `FILE#FIELD`.
        held_out: sources, no run of words of which may occur.
        letters: in all; fewer where the text is short.
        seed: of the places.

    Returns:
        The stretches in random order, and how many were left out because of the evaluation text.
    """
    rng = np.random.default_rng(seed)
    seen = set().union(*(runs_of_words(" ".join(read(source))) for source in held_out))
    chosen, refused = [], 0
    for source in sources:
        text = "\n\n".join(read(source))
        size = min(STRETCH, max(len(text), 1))
        starts = size * rng.permutation(max(1, len(text) // size))
        for start in starts[: -(-letters // (len(sources) * size))].tolist():
            stretch = text[start : start + size]
            if start:  # the rest of a word
                stretch = stretch.partition(" ")[2]
            stretch = stretch.rpartition(" ")[0] or stretch
            if seen.isdisjoint(runs_of_words(stretch)):
                chosen.append(stretch)
            else:
                refused += 1
    return [chosen[number] for number in rng.permutation(len(chosen))], refused


class Bench:
    """What the rows share: models by name, texts, and where things are kept."""

    def __init__(self, args: argparse.Namespace, console: Console):
        self.args, self.console = args, console
        self.work: Path = args.work
        self.work.mkdir(parents=True, exist_ok=True)
        self.origin = {"source": Path(args.source).name, "seed": args.seed}

    # -- texts ---------------------------------------------------------------------------------------------------

    @cached_property
    def train_text(self) -> list[str]:
        """What students learn from."""
        if not self.args.train_text:
            raise Missing("no --train-text")
        letters = LETTERS * (self.args.tokens + DISTILLED)
        texts, refused = training_stretches(self.args.train_text, self.args.eval_text, letters, self.args.seed)
        self.console.print(f"{len(texts)} stretches of training text; {refused} left out for the evaluation's sake")
        return texts

    @cached_property
    def held_out(self) -> dict[str, dict[int, list[list[int]]]]:
        """Windows of each evaluation text, by length."""
        if not self.args.eval_text:
            raise Missing("no --eval-text")
        found = {}
        for source in self.args.eval_text:
            path, _, column = source.partition("#")
            windows, skipped, _ = windows_by_length(
                self.teacher.tokenizer, [path], column or "text", self.args.lengths, self.args.window_tokens
            )
            for length, reason in skipped.items():
                self.console.print(f"{path}, {length} tokens: {reason}", markup=False)
            found[Path(path).name] = windows
        return found

    @cached_property
    def teacher(self) -> Encoder:
        """The source, without a head."""
        return load_encoder(self.args.source, masked=False)

    # -- students ------------------------------------------------------------------------------------------------

    def source(self, demonstration: bool) -> str:
        """What is converted: the model that is measured, or the demonstration's."""
        return str(demo.CHECKPOINT) if demonstration else self.args.source

    def recipe(self, name: str, demonstration: bool = False) -> dict[str, Any]:
        """All that a student depends on."""
        student = STUDENTS[name]
        found = {"source": Path(self.source(demonstration)).name, "seed": self.args.seed, **asdict(student)}
        del found["label"]
        if student.start is not None:
            found["start"] = self.recipe(student.start, demonstration)
        if student.needs_text:
            found["tokens"] = self.args.tokens
            texts, held_out = ([], []) if demonstration else (self.args.train_text, self.args.eval_text)
            found["text"] = {"train": [*map(fingerprint, texts)], "held out": [*map(fingerprint, held_out)]}
        if student.then == "distil":
            found |= {"steps": self.args.steps, "batch_tokens": self.args.batch_tokens, "distil": self.args.distil}
        if student.scheme is None or student.long:
            found["length"] = self.args.long_length
        del found["long"]  # of the others it says nothing
        if student.long:
            found["window"] = self.args.window
        return found

    def make(self, name: str, demonstration: bool = False) -> tuple[Path, dict[str, Any]]:
        """The folder of a student, made if it is not there, and what it cost: CPU seconds and tokens of text."""
        recipe = self.recipe(name, demonstration)
        folder = self.work / f"{'demo-' * demonstration}{name}.{digest(recipe)}"
        noted = folder / "made.json"
        if noted.is_file():
            return folder, json.loads(noted.read_text(encoding="utf-8"))
        student, before = STUDENTS[name], {"cpu_seconds": 0.0, "tokens": 0}
        if student.start is not None:
            start, before = self.make(student.start, demonstration)
        texts = None
        if student.needs_text:  # read before the clock starts: that costs the same whoever learns from it
            texts = demo.read_text("train") if demonstration else self.train_text
        self.console.print(f"making {folder.name}", style="dim")
        started = time.process_time()
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        more: dict[str, Any] = {}
        if student.start is not None:
            shutil.copytree(start, partial, ignore=shutil.ignore_patterns("made.json"))
        else:
            more = self._convert(student, partial, demonstration, texts)
        if student.then is not None:
            more |= self._change(student, partial, demonstration, texts)
        own = {"cpu_seconds": time.process_time() - started, "tokens": 0}
        made = {**own, "before": {what: before[what] for what in COST}, **more}
        write_json(partial / "made.json", made)
        partial.rename(folder)
        return folder, made

    def _convert(
        self, student: Student, out: Path, demonstration: bool, texts: Sequence[str] | None
    ) -> dict[str, Any]:
        """A conversion; `tokens` of text, and what its report says beside."""
        method = student.method
        if method not in METHODS:
            raise Missing(f"method = {method!r} is not there yet")
        if texts is None and METHODS[method].text == "required":
            raise Missing(f"method = {method!r} needs text")
        options: dict[str, Any] = {}
        if student.scheme is None or student.long:
            options["length"] = self.args.long_length
        if student.long:
            options["window"] = self.args.window
        if texts is not None and "tokens" in METHODS[method].options:
            options["tokens"] = self.args.tokens
        report = convert(
            self.source(demonstration),
            out,
            position_embedding_type=student.scheme,
            position_options=student.options or None,
            method=method,
            method_options=options,
            texts=texts,
            seed=self.args.seed,
        )
        details = json.loads(json.dumps(report.details))
        found = {name: details["calibration"][name] for name in COST if "calibration" in details}
        return {**found, "details": details}  # the cost of the fits, without that of the converter's own checks

    def _change(
        self, student: Student, folder: Path, demonstration: bool, texts: Sequence[str] | None
    ) -> dict[str, Any]:
        """What is done to a converted model in its folder; `tokens` of text, and what more there is to say."""
        kind = AutoModelForMaskedLM if demonstration else AutoModel
        model, teacher = (
            kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
            for path in (folder, self.source(demonstration))
        )
        tokenizer, more = load_tokenizer(folder), {}
        if student.then == "fold":
            mine, theirs = (each.base_model.embeddings for each in (model, teacher))
            with torch.no_grad():  # `drop` put the mean there
                mine.token_type_embeddings.weight.copy_(theirs.token_type_embeddings.weight)
            fold_positions(model, theirs.position_embeddings.weight.detach(), tokenizer.cls_token_id)
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
            more = {"tokens": report.tokens, "losses": report.losses}
        model.save_pretrained(folder)
        return more

    def load(self, name: str, variant: str = "") -> tuple[Encoder, dict[str, Any]]:
        """A student as an encoder, with a window or temperature, and what it cost."""
        folder, made = self.make(name)
        encoder = load_encoder(folder, pooling=self.teacher.pooling)
        for key, value in self.variant(variant).items():
            setattr(encoder.model.config, key, value)
        return encoder, made

    def variant(self, variant: str) -> dict[str, Any]:
        """Fields of the configuration."""
        if variant == "+window":
            return {"attention_window": self.args.window}
        if variant == "+log":
            length = model_max_length(self.teacher.model)
            return {"attention_temperature": "log", "attention_temperature_length": length}
        return {}

    # -- rows ----------------------------------------------------------------------------------------------------

    def cached(self, name: str, settings: Any, compute: Callable[[], np.ndarray]) -> np.ndarray:
        """An array that is kept in the work folder."""
        path = self.work / f"{name}.{digest(settings)}.npy"
        if not path.is_file():
            replace_file(path, lambda aside: save_array(aside, compute()))
        return np.load(path)

    def settings(self, key: str) -> dict[str, Any]:
        """All that a row depends on."""
        kind, _, name = key.partition("/")
        student, plus, variant = name.partition("+")
        args = self.args
        found: dict[str, Any] = dict(self.origin)
        if student in STUDENTS:
            found["student"] = self.recipe(student, kind == "demo")
            found["variant"] = self.variant(plus + variant)
        if kind == "fidelity":
            found |= {"lengths": args.lengths, "window_tokens": args.window_tokens}
            found |= {"text": [*map(fingerprint, args.eval_text)], "sts": [*map(fingerprint, args.sts)]}
            found["sts_pairs"] = args.sts_pairs
        elif kind == "long":
            found |= {"length": args.long_length, "documents": args.documents}
            found["text"] = [*map(fingerprint, args.long_text)]
        elif kind == "retrieval":
            found |= {"length": args.long_length, "chunk": args.chunk, "limit": args.retrieval_documents}
            found |= {"tokens": args.tokens, "text": [*map(fingerprint, [*args.train_text, *args.eval_text])]}
            found["files"] = [*map(fingerprint, filter(None, (args.docs, args.queries)))]
        else:
            found["tokens"] = args.masked_tokens
        return found

    def measure(self, key: str) -> dict[str, Any]:
        """One row.

        Raises:
            Missing: for what cannot be measured, with the reason.
        """
        kind, _, name = key.partition("/")
        student, plus, variant = name.partition("+")
        return getattr(self, f"_{kind}")(student, plus + variant)

    def _fidelity(self, name: str, variant: str) -> dict[str, Any]:
        """Cosines to the teacher by length and text, and similarity sets; for the teacher, those to itself moved."""
        encoder, made = (self.teacher, {}) if name == "teacher" else self.load(name)
        texts: dict[str, Any] = {}
        for number, (text, windows) in enumerate(self.held_out.items()):
            if name == "teacher":
                if number == 0:  # five readings more
                    texts[text] = self._ceiling(windows)
                continue
            found = fidelity(
                self.teacher.model,
                encoder.model,
                windows,
                # attention takes as long as all the rest
                FidelitySettings(encoder.pooling, divergence=number == 0, ceiling=False),
            )
            self.teacher.model.set_attn_implementation("sdpa")
            texts[text] = {
                "windows": {str(entry.length): entry.windows for entry in found.lengths},
                "token": {str(entry.length): entry.token_cosine for entry in found.lengths},
                "sentence": {str(entry.length): entry.sentence_cosine for entry in found.lengths},
                "divergence": {str(entry.length): entry.divergence for entry in found.lengths if entry.divergence},
            }
        return {
            "texts": texts,
            "sts": {Path(p).name: self._similarity(p, name, encoder) for p in self.args.sts},
        } | made

    def _ceiling(self, windows: dict[int, list[list[int]]]) -> dict[str, Any]:
        """The teacher's agreement with itself, at the lengths that leave room for a shift."""
        limit = model_max_length(self.teacher.model)
        moved = {
            str(length): shift_consistency(self.teacher.model, rows, pooling=self.teacher.pooling)
            for length, rows in windows.items()
            if length < limit
        }
        return {
            "windows": {length: found.windows for length, found in moved.items()},
            "token": {length: found.token_cosine for length, found in moved.items()},
            "sentence": {length: found.sentence_cosine for length, found in moved.items()},
            "by_shift": {length: found.by_shift for length, found in moved.items()},
        }

    def _similarity(self, path: str, name: str, encoder: Encoder) -> dict[str, Any]:
        """Spearman's ρ × 100, and how much more than the teacher's."""
        pairs = read_pairs(path)
        if self.args.sts_pairs and len(pairs) > self.args.sts_pairs:
            drawn = np.random.default_rng(self.args.seed).permutation(len(pairs))[: self.args.sts_pairs]
            pairs = [pairs[number] for number in sorted(drawn)]
        scores = np.array([pair.score for pair in pairs])
        theirs = self.cached(
            f"sts-{Path(path).stem}",
            [self.origin, fingerprint(path), self.args.sts_pairs],
            lambda: similarities(pair_vectors(self.teacher, pairs)),
        )
        mine = theirs if name == "teacher" else similarities(pair_vectors(encoder, pairs))
        found = {"pairs": len(pairs), "rho": 100 * rank_correlation(mine, scores)}
        if name != "teacher":
            found["difference"] = asdict(spearman_difference(theirs, mine, scores, seed=self.args.seed))
        return found

    @cached_property
    def long_rows(self) -> list[list[int]]:
        """Documents of `long_length` tokens, `documents` of each text."""
        if not self.args.long_text:
            raise Missing("no --long-text and no --eval-text")
        length, count, rows = self.args.long_length, self.args.documents, []
        for source in self.args.long_text:
            cut = cut_windows(self.teacher.tokenizer, read(source), count * length, (length,), 0.0, self.args.seed)
            rows += cut.ids[:count]
        return rows

    def _long(self, name: str, variant: str) -> dict[str, Any]:
        """Token cosine to the teacher's windows by quarter of long documents."""
        encoder, _ = self.load(name, variant)
        first = (name, variant) == ("hierarchical", "")  # the ceiling is the same with any
        rows = {self.args.long_length: self.long_rows}
        settings = FidelitySettings(encoder.pooling, ceiling=first)
        entry = fidelity(self.teacher.model, encoder.model, rows, settings).lengths[0]
        return {
            "documents": entry.windows,
            "token": entry.token_cosine,
            "sentence": entry.sentence_cosine,
            "quarters": entry.token_cosine_by_quarter,
        } | (
            {"ceiling": {"token": entry.ceiling.token_cosine, "sentence": entry.ceiling.sentence_cosine}}
            if first
            else {}
        )

    def _retrieval(self, name: str, variant: str) -> dict[str, Any]:
        """Ranks of the right documents."""
        args = self.args
        if not (args.docs and args.queries):
            raise Missing("no --docs and --queries")
        documents, queries = read_documents(args.docs), read_queries(args.queries)
        if args.retrieval_documents:
            kept = np.random.default_rng(args.seed).permutation(len(documents))[: args.retrieval_documents]
            names = list(documents)
            documents = {names[number]: documents[names[number]] for number in sorted(kept)}
            queries = [query for query in queries if query.document in documents]
        asked_all, learnt = len(queries), set().union(*map(runs_of_words, self.train_text))
        known = {name for name, text in documents.items() if not learnt.isdisjoint(runs_of_words(text))}
        queries = [query for query in queries if query.document not in known]
        if not queries:
            raise Missing("the training text holds something of every document")
        encoder = self.teacher if name in TEACHERS else self.load(name, variant)[0]
        reader = name if name in TEACHERS else "full"
        settings = self.settings(f"retrieval/{name}{variant}")
        found = self._documents(f"docs-{name}{variant}", settings, encoder, list(documents.values()), reader)
        asked = self.cached(
            f"queries-{name}{variant}", settings, lambda: encoder.encode([query.text for query in queries]).numpy()
        )
        number = {name: n for n, name in enumerate(documents)}
        right = torch.tensor([number[query.document] for query in queries])
        ranks = rank_documents(torch.from_numpy(asked), torch.from_numpy(found), right)
        return {
            "documents": len(documents),
            "left_out": asked_all - len(queries),
            **Retrieval(ranks).to_dict(),
            "ranks": " ".join(map(str, ranks.tolist())),
        }

    def _documents(self, name: str, settings: Any, encoder: Encoder, texts: Sequence[str], reader: str) -> np.ndarray:
        """Vectors of documents, kept as they come, so that an interruption costs little."""
        path = self.work / f"{name}.{digest(settings)}.npy"
        rows = list(np.load(path)) if path.is_file() else []
        started, first = time.process_time(), len(rows)
        while len(rows) < len(texts):
            part = texts[len(rows) : len(rows) + SLICE]
            rows += list(document_vectors(encoder, part, reader, self.args.long_length, self.args.chunk).numpy())
            replace_file(path, lambda aside, rows=tuple(rows): save_array(aside, np.stack(rows)))
            spent = time.process_time() - started
            left = spent / (len(rows) - first) * (len(texts) - len(rows))
            self.console.print(f"  {len(rows)} of {len(texts)} documents, {left:.0f} CPU s left", style="dim")
        return np.stack(rows)

    def _demo(self, name: str, variant: str) -> dict[str, Any]:
        """Masked tokens of the demonstration's text that are predicted right."""
        model, made = (load_model(demo.CHECKPOINT), {}) if name == "teacher" else self._demo_student(name)
        tokenizer = load_tokenizer(demo.CHECKPOINT)
        limit = model_max_length(load_model(demo.CHECKPOINT))
        found = masked_accuracy_by_length(
            model, tokenizer, demo.read_text("eval"), (limit // 2, limit), self.args.masked_tokens, self.args.seed
        )
        return {"accuracy": {str(length): entry["accuracy"] for length, entry in found.items()}} | made

    def _demo_student(self, name: str) -> tuple[PreTrainedModel, dict[str, Any]]:
        folder, made = self.make(name, demonstration=True)
        return load_model(folder), made


def chain(name: str | None) -> list[str]:
    """A student and those that it started from."""
    found = []
    while name is not None:
        found.append(name)
        name = STUDENTS[name].start if name in STUDENTS else None
    return found


def student_of(name: str) -> str:
    """The student in the key of a row, or in the name of something in the work folder."""
    name = name.partition(".")[0]
    for prefix in (*KINDS, "demo-", "docs-", "queries-"):
        name = name.removeprefix(prefix)
    return name.partition("+")[0]


def forget(names: Sequence[str], rows: dict[str, Any], work: Path) -> None:
    """Remove students, those that started from them, and what was measured of them."""
    for path in list(work.iterdir()) if work.is_dir() else []:
        if set(chain(student_of(path.name))) & set(names):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for key in [key for key in rows if set(chain(student_of(key))) & set(names)]:
        del rows[key]


# What is to be reached ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """A figure that was set before it was measured, on all-MiniLM-L6-v2.

    Attributes:
        what: in words.
        row: that it is taken from.
        value: the figure, from all rows; None where it was not measured.
        must: bound to reach.
        stretch: bound to reach if possible; None without one.
        least: bounds are below the figure, not above it.
    """

    what: str
    row: str
    value: Callable[[dict[str, Any]], float | None]
    must: float | None
    stretch: float | None = None
    least: bool = True

    def reached(self, rows: dict[str, Any], bound: float | None) -> str:
        """In a word."""
        value = self.value(rows)
        if bound is None:
            return "–"
        if value is None:
            return "not measured"
        return "reached" if (value >= bound if self.least else value <= bound) else "**not reached**"


def worst_sentence(row: str, lengths: Sequence[int]) -> Callable[[dict[str, Any]], float | None]:
    """The smallest sentence cosine of a row over lengths, on the first evaluation text."""

    def value(rows: dict[str, Any]) -> float | None:
        if row not in rows:
            return None
        found = next(iter(rows[row]["texts"].values()))["sentence"]
        return min((found[str(length)] for length in lengths if str(length) in found), default=None)

    return value


def spent(row: str) -> Callable[[dict[str, Any]], float | None]:
    """CPU seconds that a student took, without what it started from."""
    return lambda rows: rows[row]["cpu_seconds"] if row in rows else None


def spearman_lost(row: str) -> Callable[[dict[str, Any]], float | None]:
    """Points of Spearman's ρ, mean over the sets."""

    def value(rows: dict[str, Any]) -> float | None:
        sets = rows.get(row, {}).get("sts")
        return -float(np.mean([entry["difference"]["mean"] for entry in sets.values()])) if sets else None

    return value


def worst_quarter(row: str) -> Callable[[dict[str, Any]], float | None]:
    """The smallest token cosine of a quarter of long documents."""
    return lambda rows: min(rows[row]["quarters"]) if row in rows else None


def rank_gain(rows: dict[str, Any], name: str) -> dict[str, Any] | None:
    """How much more a reader reaches than the best baseline (by nDCG@10), by measure; None where that is missing."""
    found = {key.partition("/")[2]: row for key, row in rows.items() if key.startswith("retrieval/")}
    if name not in found or name in BASELINES:
        return None
    size = found[name]["documents"], found[name]["queries"]
    there = [
        baseline
        for baseline in BASELINES
        if baseline in found and (found[baseline]["documents"], found[baseline]["queries"]) == size
    ]
    if not there:
        return None
    best = max(there, key=lambda baseline: found[baseline]["ndcg@10"])
    one, other = (Retrieval(np.array([int(rank) for rank in found[each]["ranks"].split()])) for each in (best, name))
    gains = {measure: asdict(gap) for measure, gap in difference(one, other).items()}
    return {"baseline": best, "of": len(there), **gains}


def retrieval_gain(bound: str) -> Callable[[dict[str, Any]], float | None]:
    """The best gain in nDCG@10 over all four baselines, or the lower end of its range."""

    def value(rows: dict[str, Any]) -> float | None:
        gains = [
            rank_gain(rows, name)
            for name in ("calibrated+window", "distilled+window", "calibrated", "distilled", "long")
        ]
        return max((gain["ndcg@10"][bound] for gain in gains if gain and gain["of"] == len(BASELINES)), default=None)

    return value


def accuracy_kept(row: str, worst: bool = False) -> Callable[[dict[str, Any]], float | None]:
    """Percent of the teacher's accuracy on masked tokens: over all lengths, or at the worst."""

    def value(rows: dict[str, Any]) -> float | None:
        if row not in rows or "demo/teacher" not in rows:
            return None
        mine, theirs = rows[row]["accuracy"], rows["demo/teacher"]["accuracy"]
        shares = [100 * mine[length] / theirs[length] for length in mine]
        return min(shares) if worst else 100 * sum(mine.values()) / sum(theirs[length] for length in mine)

    return value


SHORT, MIDDLE = (16, 64, 128), (256, 512)
GOALS = [
    Goal("no data: sentence cosine, 16-128", "no-data", worst_sentence("fidelity/no-data", SHORT), 0.90, 0.93),
    Goal(
        "calibrated: sentence cosine, 16-128", "calibrated", worst_sentence("fidelity/calibrated", SHORT), 0.96, 0.98
    ),
    Goal("same, 256-512", "calibrated", worst_sentence("fidelity/calibrated", MIDDLE), 0.95, 0.97),
    Goal("same, CPU seconds", "calibrated", spent("fidelity/calibrated"), 300, least=False),
    Goal("same, points of Spearman lost, mean", "calibrated", spearman_lost("fidelity/calibrated"), 0.5, 0.2, False),
    Goal("distilled: sentence cosine, 16-128", "distilled", worst_sentence("fidelity/distilled", SHORT), 0.98, 0.99),
    Goal("same, 256-512", "distilled", worst_sentence("fidelity/distilled", MIDDLE), 0.97, 0.98),
    Goal("same, CPU seconds more", "distilled", spent("fidelity/distilled"), 600, least=False),
    Goal("same, points of Spearman lost, mean", "distilled", spearman_lost("fidelity/distilled"), 0.5, 0.2, False),
    Goal("long, window: token cosine, every quarter", "long", worst_quarter("long/long"), 0.85, 0.90),
    Goal("long, all keys: token cosine, every quarter", "calibrated", worst_quarter("long/calibrated"), None, 0.85),
    Goal("retrieval: nDCG@10 above the best of four", "best student", retrieval_gain("mean"), 1e-9),
    Goal("same, lower end of the 95 % range", "best student", retrieval_gain("low"), None, 1e-9),
    Goal("`relative_key`: sentence cosine, 16-256", "key", worst_sentence("fidelity/key", (16, 64, 128, 256)), 0.90),
    Goal("same, distilled, 16-128", "key-distilled", worst_sentence("fidelity/key-distilled", SHORT), None, 0.98),
    Goal("demo BERT: % of masked tokens kept", "calibrated", accuracy_kept("demo/calibrated"), 97.0),
    Goal("same, at the worse length", "calibrated", accuracy_kept("demo/calibrated", worst=True), 97.0),
    Goal("distilled", "distilled", accuracy_kept("demo/distilled"), 99.0),
    Goal("same, at the worse length", "distilled", accuracy_kept("demo/distilled", worst=True), 99.0),
]


# Tables ------------------------------------------------------------------------------------------------------------

Rows = dict[str, Any]  # key of `ROWS` to its result
Table = tuple[str, list[str], list[list[str]]]  # title, columns, cells


def of_kind(rows: Rows, kind: str) -> Rows:
    """Rows of one kind, by what comes after it, in the order of `ROWS`."""
    return {key.partition("/")[2]: rows[key] for key in ROWS if key in rows and key.startswith(f"{kind}/")}


def number(value: float | None, form: str = ".3f") -> str:
    return "–" if value is None else format(value, form)


def cosines(entry: dict[str, Any], lengths: Sequence[int]) -> list[str]:
    """Token and sentence cosine at each length."""
    return [" / ".join(number(entry[each].get(str(length))) for each in ("token", "sentence")) for length in lengths]


def fidelity_tables(rows: Rows, lengths: Sequence[int]) -> Iterator[Table]:
    """Cosines by text, and similarity sets."""
    found = of_kind(rows, "fidelity")
    for text in max((row["texts"] for row in found.values()), key=len, default=()):
        cells = []
        for name, row in found.items():
            if text in row["texts"]:
                words = "ceiling: the teacher, moved" if name == "teacher" else label(name)
                cells.append([words, *cosines(row["texts"][text], lengths), *cost(row)])
        columns = ["student", *map(str, lengths), "CPU s", "tokens"]
        yield f"Token / sentence cosine to the teacher, {text}", columns, cells
    sets = next((row["sts"] for row in found.values()), {})
    if sets:
        cells = []
        for name, row in found.items():
            lost = spearman_lost(f"fidelity/{name}")(rows) if name != "teacher" else None
            cells.append([label(name), *map(rho, row["sts"].values()), number(lost, "+.2f")])
        columns = ["student", *(f"{name} ({entry['pairs']:,})" for name, entry in sets.items()), "lost, mean"]
        yield "Spearman's ρ × 100 (difference to the teacher: 95 % range)", columns, cells


def cost(row: dict[str, Any]) -> list[str]:
    """CPU seconds and tokens of a student, `a + b` where another one was before."""
    if "before" not in row:
        return ["–", "–"]
    forms = {"cpu_seconds": ",.0f", "tokens": ",.0f"}
    return [
        " + ".join(format(part[what], form) for part in (row["before"], row) if part is row or part[what])
        for what, form in forms.items()
    ]


def rho(entry: dict[str, Any]) -> str:
    """Spearman's ρ, and the difference to the teacher's."""
    gap = entry.get("difference")
    more = f" ({gap['mean']:+.2f}: {gap['low']:+.2f} to {gap['high']:+.2f})" if gap else ""
    return f"{entry['rho']:.2f}{more}"


def long_table(rows: Rows) -> Iterator[Table]:
    """Token cosine by quarter."""
    found = of_kind(rows, "long")
    cells = [[label(name), *map(number, row["quarters"]), number(row["token"])] for name, row in found.items()]
    for row in found.values():
        if "ceiling" in row:
            cells.append(["ceiling: the teacher, other windows", *["–"] * 4, number(row["ceiling"]["token"])])
    if cells:
        columns = ["reader", "1st quarter", "2nd", "3rd", "4th", "all"]
        yield "Long documents: token cosine to the teacher's windows", columns, cells


def retrieval_table(rows: Rows) -> Iterator[Table]:
    """Measures of each reader, and the gain over the best baseline."""
    cells = []
    for name, row in of_kind(rows, "retrieval").items():
        gain, text = rank_gain(rows, name), "–"
        if gain:
            mean, low, high = (f"{100 * gain['ndcg@10'][which]:+.1f}" for which in ("mean", "low", "high"))
            text = f"{mean}: {low} to {high} ({gain['baseline']})"
        measures = [f"{100 * row[measure]:.1f}" for measure in ("accuracy@1", "mrr", "ndcg@10")]
        cells.append([label(name), f"{row['queries']:,} / {row['documents']:,}", *measures, text])
    if cells:
        columns = ["reader", "queries / documents", "accuracy@1", "MRR", "nDCG@10", "nDCG@10 over the best baseline"]
        yield "Retrieval of long documents, %", columns, cells


def demo_table(rows: Rows) -> Iterator[Table]:
    """Accuracy on masked tokens."""
    found = of_kind(rows, "demo")
    cells = []
    for name, row in found.items():
        kept = [None, None]
        if name != "teacher":
            kept = [accuracy_kept(f"demo/{name}", worst)(rows) for worst in (False, True)]
        shares = [f"{share:.2f}" for share in row["accuracy"].values()]
        cells.append([label(name), *shares, *(number(share, ".1f") for share in kept)])
    if cells:
        places = next(iter(found.values()))["accuracy"]
        columns = ["model", *(f"{place} tokens" for place in places), "% of the teacher's", "at the worse length"]
        yield "Demo BERT: masked tokens right, %", columns, cells


def tables(rows: Rows, lengths: Sequence[int]) -> list[Table]:
    """Everything that was measured, as text."""
    return [*fidelity_tables(rows, lengths), *long_table(rows), *retrieval_table(rows), *demo_table(rows)]


def verdicts(rows: dict[str, Any]) -> Table:
    """Each goal, and whether it was reached."""
    cells = []
    for goal in GOALS:
        sign = "≥" if goal.least else "≤"
        bounds = [
            "–" if bound is None else f"{sign} {bound:g}" if bound > 1e-6 else "> 0"
            for bound in (goal.must, goal.stretch)
        ]
        value = number(goal.value(rows), ".3f" if (goal.must or goal.stretch) < 10 else ".1f")
        states = [goal.reached(rows, bound) for bound in (goal.must, goal.stretch)]
        cells.append([goal.what, value, bounds[0], states[0], bounds[1], states[1]])
    return "Goals", ["figure", "measured", "must", "", "stretch", ""], cells


def markdown(table: Table) -> str:
    title, columns, cells = table
    lines = [f"## {title}", "", "| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells)]) + "\n"


def card(content: dict[str, Any], rows: dict[str, Any], lengths: Sequence[int]) -> str:
    """conversion.md.

    Args:
        content: what conversion.json holds.
        rows: results of those rows that belong to the present settings.
    """
    about = content["about"]
    missing = {key: content["missing"].get(key, "not asked for") for key in ROWS if key not in rows}
    reasons = {reason: [f"`{key}`" for key in missing if missing[key] == reason] for reason in missing.values()}
    parts = [
        f"# Conversion of {about['source']}\n",
        f"Written by `{about['command']}`, which fills in what is missing and repeats nothing; `--rows` and `--list` "
        "tell it where to begin.\n",
        "\n".join(f"- {key}: {value}" for key, value in about.items() if key not in ("source", "command")) + "\n",
        "Cosines are means over held-out text that no student learnt from. The ceiling is a scale, not a bound: how "
        "far the teacher agrees with itself when its input is moved by 1 to 64 positions. CPU seconds are those of "
        "fits and steps, without the converter's own checks; `a + b`: b on top of the student it started from. Goals "
        "take the worst of their lengths, on the first text. Questions about documents of which the training text "
        "holds something are left out; the documents stay.\n",
        markdown(verdicts(rows)),
        *(markdown(table) for table in tables(rows, lengths)),
    ]
    if missing:
        parts.append("## Not measured\n")
        parts += [f"- {reason}: {', '.join(keys)}" for reason, keys in reasons.items()] + [""]
    return "\n".join(parts)


def picture(rows: dict[str, Any], lengths: Sequence[int]):
    """Fidelity by length, with its ceiling."""
    from matplotlib.colors import TABLEAU_COLORS
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    found = {key.partition("/")[2]: row for key, row in rows.items() if key.startswith("fidelity/")}
    panels = figure.subplots(1, 2)
    for axes, (kind, title) in zip(panels, (("sentence", "sentence vectors"), ("token", "tokens")), strict=True):
        axes.set_prop_cycle(color=[*TABLEAU_COLORS, "0.3", "0.6"])
        for name in ("teacher", *FIDELITY):
            if name not in found:
                continue
            entry = next(iter(found[name]["texts"].values()))[kind]
            places = [length for length in lengths if str(length) in entry]
            look = {"color": "black", "linestyle": ":"} if name == "teacher" else {"marker": "o", "markersize": 3}
            words = "ceiling" if name == "teacher" else label(name).replace("`", "")
            axes.plot(places, [entry[str(length)] for length in places], label=words, linewidth=1.2, **look)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set_title(f"cosine to the teacher, {title}", fontsize=9)
        axes.set_xlabel("tokens", fontsize=9)
        axes.tick_params(labelsize=8)
    panels[1].legend(fontsize=6)
    return figure


def save_array(path: Path, array: np.ndarray) -> None:
    """`np.save` under exactly this name."""
    with path.open("wb") as file:
        np.save(file, array)


def replace_file(path: Path, save: Callable[[Path], Any]) -> None:
    """Let `save` write to a temporary name beside `path`, then rename it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write(folder: Path, content: dict[str, Any], rows: dict[str, Any], lengths: Sequence[int], draw: bool) -> None:
    """The files, as in `card`; the picture if asked for, since it takes a while."""
    write_json(folder / "conversion.json", content)
    text = card(content, rows, lengths)
    replace_file(folder / "conversion.md", lambda path: path.write_text(text, encoding="utf-8"))
    if draw:
        figure = picture(rows, lengths)
        replace_file(folder / "conversion.png", lambda path: figure.savefig(path, dpi=150, format="png"))


# Command line ------------------------------------------------------------------------------------------------------


def processor() -> str:
    """The name of the processor, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the code, where it is known."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def command(arguments: Sequence[str]) -> str:
    """The command for all rows: paths lose their folders, which say nothing elsewhere."""
    words, skipping = ["python scripts/bench_conversion.py"], False
    for word in arguments:
        if word.startswith("--"):
            skipping = word in ("--rows", "--again", "--out", "--work")
        if not skipping:
            words.append(Path(word).name if "/" in word else word)
    return " ".join(words)


def about(args: argparse.Namespace, arguments: Sequence[str]) -> dict[str, str]:
    """Where and when this was measured."""

    def names(sources: Sequence[str]) -> str:
        return ", ".join(Path(source.partition("#")[0]).name for source in sources)

    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "numpy")]
    return {
        "source": Path(args.source).name,
        "command": command(arguments),
        "machine": f"{processor()}, {os.cpu_count()} cores, other work beside; {args.threads} thread",
        "versions": ", ".join([*versions, f"Python {platform.python_version()}"]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "seed": str(args.seed),
        "learnt from": f"{args.tokens:,} tokens to calibrate, {args.steps} steps of {args.batch_tokens:,} to distil: "
        f"{names(args.train_text)}. No stretch of it shares {SHARED} words in a row with the held-out text",
        "held out": f"{names(args.eval_text)}; {args.window_tokens:,} tokens of each length",
        "long documents": f"{args.long_length:,} tokens, {args.documents} of each held-out text; window {args.window} "
        "and [CLS]",
        "demo BERT": "learns from She (H. R. Haggard) and is measured on Treasure Island (R. L. Stevenson)",
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Arguments, with paths of --data filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="sentence-embedding BERT with absolute positions")
    parser.add_argument("--data", type=Path, help="folder with the files named in DATA")
    parser.add_argument("--train-text", nargs="+", help="to learn from")
    parser.add_argument("--eval-text", nargs="+", help="to measure on, never learnt from")
    parser.add_argument("--long-text", nargs="+", help="for long documents; by default --eval-text")
    parser.add_argument("--sts", nargs="+", help="scored pairs of sentences")
    parser.add_argument("--docs", help="documents to look for")
    parser.add_argument("--queries", help="questions, each with its document")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "results" / "benchmarks")
    parser.add_argument("--work", type=Path, default=Path("build") / "bench_conversion", help="models and vectors")
    parser.add_argument("--rows", nargs="+", default=["*"], help="patterns of the rows to measure, in this order")
    parser.add_argument(
        "--again", nargs="+", default=[], metavar="STUDENT", help="forget these and what rests on them"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the rows, and do nothing else")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 128, 256, 512])
    parser.add_argument("--window-tokens", type=int, default=6144, help="tokens compared at each length")
    parser.add_argument("--sts-pairs", type=int, default=1500, help="of a set at most, drawn at random; 0: all")
    parser.add_argument("--tokens", type=int, default=50_000, help="to calibrate on")
    parser.add_argument("--steps", type=int, default=200, help="of distillation")
    parser.add_argument("--batch-tokens", type=int, default=1024, help="of a step of distillation")
    parser.add_argument(
        "--distil", type=json.loads, default=DISTIL, metavar="JSON", help=f"more arguments of distil; {DISTIL}"
    )
    parser.add_argument("--long-length", type=int, default=2048, help="tokens of long documents")
    parser.add_argument("--documents", type=int, default=4, help="long documents of each text")
    parser.add_argument("--window", type=int, default=256, help="attention_window of the rows with one")
    parser.add_argument("--chunk", type=int, default=512, help="where documents are cut, and into what")
    parser.add_argument("--retrieval-documents", type=int, help="only that many, and their questions")
    parser.add_argument("--masked-tokens", type=int, default=32_768, help="of text for masked tokens at each length")
    args = parser.parse_args(arguments)
    if args.list:
        return args
    if not args.source:
        parser.error("--source is needed: a folder or Hub id of a sentence-embedding BERT")
    for name, value in DATA.items():
        if args.data and getattr(args, name) is None:
            listed = [str(args.data / each) for each in ([value] if isinstance(value, str) else value)]
            setattr(args, name, listed[0] if isinstance(value, str) else listed)
    for name in ("train_text", "eval_text", "sts"):
        setattr(args, name, getattr(args, name) or [])
    args.long_text = args.long_text or args.eval_text
    for path in [*args.train_text, *args.eval_text, *args.long_text, *args.sts, args.docs, args.queries]:
        if path and not Path(path.partition("#")[0]).exists():
            parser.error(f"{path}: no such file; check --data, or name the file with an argument of its own")
    for name in ("tokens", "steps", "batch_tokens", "long_length", "documents", "window", "chunk", "threads"):
        if not is_count(getattr(args, name)):
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give a whole number from 1 on")
    unknown = [pattern for pattern in args.rows if not any(fnmatch(key, pattern) for key in ROWS)]
    if unknown:
        parser.error(f"--rows {unknown[0]}: fits no row; --list names them")
    strangers = set(args.again) - STUDENTS.keys()
    if strangers:
        parser.error(f"--again {min(strangers)}: no student of this name; known: {', '.join(STUDENTS)}")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    if args.list:
        print("\n".join(ROWS))
        return
    import matplotlib  # noqa: F401  before time is spent on what it is to draw

    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "conversion.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": {}}
    forget(args.again, content["rows"], args.work)
    bench = Bench(args, console)
    code = commit()  # what was loaded; the tree may move on during a long run
    content["about"] = about(args, sys.argv[1:] if arguments is None else arguments)
    wanted = {key: json.loads(json.dumps(bench.settings(key))) for key in ROWS}

    def rows() -> dict[str, Any]:
        """The results that belong to the present settings."""
        stored = content["rows"]
        return {key: stored[key]["result"] for key in ROWS if key in stored and stored[key]["settings"] == wanted[key]}

    content["missing"] = {key: "measured with other settings" for key in content["rows"] if key not in rows()}
    for key in dict.fromkeys(key for pattern in args.rows for key in ROWS if fnmatch(key, pattern)):
        if key in rows():
            console.print(f"{key}: there already", style="dim")
            continue
        started, clock = time.process_time(), time.perf_counter()
        try:
            result = bench.measure(key)
        except Missing as reason:
            console.print(f"{key}: {reason}", style="yellow", markup=False)
            content["missing"][key] = str(reason)
            continue
        seconds = {"cpu": round(time.process_time() - started, 1), "wall": round(time.perf_counter() - clock, 1)}
        content["missing"].pop(key, None)
        content["rows"][key] = {
            "settings": wanted[key],
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
            "commit": code,
            "row_seconds": seconds,
            "result": result,
        }
        content["rows"] = {name: content["rows"][name] for name in ROWS if name in content["rows"]}
        write(args.out, content, rows(), args.lengths, draw=False)
        console.print(f"{key}: {seconds['cpu']} CPU s", markup=False)
        kind = key.partition("/")[0]
        for title, columns, lines in tables({k: v for k, v in rows().items() if k.startswith(kind)}, args.lengths):
            print_table(console, title, columns, [line for line in lines if line[0].startswith(label_of(key))])
    write(args.out, content, rows(), args.lengths, draw=True)
    for table in [*tables(rows(), args.lengths), verdicts(rows())]:
        print_table(console, *table)


def label_of(key: str) -> str:
    """How the line of a row begins."""
    return "ceiling: the teacher, moved" if key == "fidelity/teacher" else label(key.partition("/")[2])


if __name__ == "__main__":
    main()
