"""Where position matters: retrieval from documents longer than the source of a conversion was trained to read.

    python scripts/bench_long_retrieval.py --source all-MiniLM-L6-v2 --data DATA                      # hours
    python scripts/bench_long_retrieval.py --source … --data … --tasks passkey --readers mean 'converted-long*'
    python scripts/bench_long_retrieval.py --source … --data … --tasks articles evidence --documents D --questions Q
    python scripts/bench_long_retrieval.py --list

Readers are the source in pieces or with other positions, and students converted from it, each with all keys, in a
window, and so on (long_retrieval/readers.py). Tasks: `passkey` and `needle`, documents that differ in one sentence;
`articles`, the article that answers a question; `evidence`, the paragraph that does, its vector made of the states of
its tokens in the whole article, or of the paragraph alone; `sts`, what a student lost on short sentences. Each cell of
the tables is measured once: OUT/NAME.json and .md are written after it, .png (extra `plot`) at the end;
students are kept in WORK. They learn from novels and abstracts, never from the articles.
"""

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conversion_quality.texts import DATA, draw_pairs
from experiments.arguments import RESULTS, check_patterns, digest, fingerprint, positive_int, reproducing_command
from experiments.measuring import environment
from experiments.process import start_quietly
from experiments.reports import write_report
from long_retrieval.card import card, draw
from long_retrieval.readers import Reading, readers, students
from long_retrieval.tasks import Articles, Documents, by_depth, needles, passkeys, read_haystack

from hf_relpos import convert
from hf_relpos.evaluation import (
    Retrieval,
    load_encoder,
    pair_vectors,
    passage_vectors,
    similarities,
    spearman_difference,
)


LEARNT = ("text/novels.txt.xz", "text/acl_abstracts.jsonl.xz#abstract")
HAYSTACK = "text/wikitext2.valid.txt"
TASKS = ("passkey", "needle", "articles", "evidence", "sts")
# Vectors of paragraphs without their article.
ALONE = {"alone": "source, paragraph alone", "titled": "source, paragraph after the article's title"}


def rank(questions: torch.Tensor, documents: Sequence[torch.Tensor], right: Sequence[int]) -> np.ndarray:
    """Ranks from 1 on of the right documents; the best of a document's vectors counts; of equals the right is last.

    Args:
        questions: (Q, D).
        documents: (n, D) of each.
        right: (Q,).
    """
    vectors = torch.nn.functional.normalize(torch.cat(list(documents)).double(), dim=-1)
    cosines = torch.nn.functional.normalize(questions.double(), dim=-1) @ vectors.T
    owner = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor([len(each) for each in documents]))
    scores = cosines.new_full((len(questions), len(documents)), -2).scatter_reduce(
        1, owner.expand(len(questions), -1), cosines, "amax"
    )
    return (scores >= scores.gather(1, torch.tensor(right)[:, None])).sum(1).numpy()


class Bench:
    """Measures cells, `task/length/reader`."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.source = load_encoder(args.source, masked=False)
        self.trained = self.source.model.config.max_position_embeddings
        self.students = students(max(args.lengths), self.trained)
        self.readers = readers(self.students, self.trained)

    @cached_property
    def articles(self) -> Articles:
        """All articles."""
        return Articles.read(self.args.documents, self.args.questions)

    @cached_property
    def haystack(self) -> str:
        """Text around needles."""
        return read_haystack(self.args.haystack)

    def cells(self) -> list[str]:
        """All cells of the chosen tasks and readers."""
        chosen = [name for name in [*self.readers, *ALONE] if any(fnmatch(name, p) for p in self.args.readers)]
        found = []
        for task in self.args.tasks:
            lengths = self.args.lengths if task in ("passkey", "needle", "articles") else [self.args.evidence_length]
            for length in [0] if task == "sts" else lengths:
                found += [f"{task}/{length}/{name}" for name in chosen if self.takes(task, length, name)]
        return found

    def takes(self, task: str, length: int, name: str) -> bool:
        """Whether a reader is one for a task."""
        if name in ALONE:
            return task == "evidence"
        reader = self.readers[name]
        if length > self.reach(name):
            return False
        if task == "sts":
            return name in self.students
        if task == "evidence":  # tokens in the context of all the article, or of overlapping windows of the source
            return name == "mean" or (reader.pieces is None and reader.positions is None)
        return True

    def reach(self, name: str) -> float:
        """Tokens up to which a reader can tell distances apart; in a window or in pieces it meets no others."""
        reader = self.readers[name]
        reach = None if reader.student is None else self.students[reader.student].reach
        return math.inf if reach is None or reader.pieces or reader.config.get("attention_window") else reach

    def settings(self, cell: str) -> dict[str, Any]:
        """What a cell depends on."""
        task, _, name = cell.split("/")
        args = self.args
        settings: dict[str, Any] = {"source": Path(args.source).name, "seed": args.seed, "count": args.count}
        if task == "needle":
            settings["haystack"] = fingerprint(args.haystack)
        if task in ("needle", "articles", "evidence"):
            settings["documents"], settings["questions"] = map(fingerprint, (args.documents, args.questions))
        if task == "evidence":
            settings["articles"] = 2 * args.count
        student = None if name in ALONE else self.readers[name].student
        if student is not None:
            settings["student"] = self._made(student)
        if task == "sts":
            settings["pairs"] = args.sts_pairs
            settings["sets"] = [fingerprint(args.data / path) for path in DATA["sts"]]
        return json.loads(json.dumps(settings))

    def _made(self, name: str) -> list[Any]:
        """How a student is made."""
        student = self.students[name]
        return [
            student.method,
            student.options,
            *([student.reach, self._made(student.grouped)] if student.grouped else []),
        ]

    def folder(self, name: str) -> Path:
        """The folder of a student, converted if it is missing; to read single texts."""
        student = self.students[name]
        folder = self.args.work / f"{name}.{digest(Path(self.args.source).name, student.method, student.options)}"
        if not folder.is_dir():
            learnt = [each.partition("#") for each in LEARNT]
            texts = {
                "texts": [self.args.data / path for path, _, _ in learnt],
                "field": [column or "text" for _, _, column in learnt],
            }
            partial = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            convert(
                self.args.source,
                partial,
                method=student.method,
                method_options={**student.options, **({"pairs": 0} if student.method is None else {})},
                seed=self.args.seed,
                **(texts if student.method is None else {}),
            )
            partial.rename(folder)
        return folder

    def reading(self, name: str) -> Reading:
        """A reader with its model."""
        reader = self.readers[name]
        if reader.student is None:
            return Reading(reader, self.source, self.trained, None)
        student = self.students[reader.student]
        return Reading(
            reader,
            self.source,
            self.trained,
            self.folder(student.grouped or reader.student),
            grouped=student.reach if student.grouped else None,
        )

    def measure(self, cell: str) -> dict[str, Any]:
        """One cell."""
        task, length, name = cell.split("/")
        if task == "sts":
            return self._similarity(name)
        if task == "evidence":
            return self._evidence(name, int(length))
        return self._documents(task, int(length), name)

    def _make(self, task: str, length: int) -> Documents:
        """The documents of a task."""
        tokenizer, count, seed = self.source.tokenizer, self.args.count, self.args.seed
        if task == "passkey":
            return passkeys(tokenizer, length, count, seed)
        if task == "needle":
            return needles(tokenizer, length, count, seed, self.haystack, self.articles)
        return self.articles.draw(2 * count, seed).at_length(tokenizer, length)

    def _documents(self, task: str, length: int, name: str) -> dict[str, Any]:
        """Ranks of the documents that answer, and CPU seconds for each document."""
        made, reading = self._make(task, length), self.reading(name)
        questions = reading.encoder.encode(made.questions)
        reading.document(made.rows[0])
        start = time.process_time()
        vectors = [reading.document(row) for row in made.rows]
        seconds = (time.process_time() - start) / len(made.rows)
        return summary(rank(questions, vectors, made.right), made.depths) | {"cpu_seconds": round(seconds, 4)}

    def _evidence(self, name: str, length: int) -> dict[str, Any]:
        """Ranks of the paragraph that answers, among those of all articles."""
        articles = self.articles.draw(2 * self.args.count, self.args.seed)
        tokenizer, encoder = self.source.tokenizer, self.source if name in ALONE else self.reading(name).encoder
        vectors, seconds = [], 0.0
        index: dict[str, list[tuple[int, int, int]]] = {}  # of each article: start, end, number of its paragraphs
        count = 0
        for document, text in articles.texts.items():
            read = tokenizer(text, truncation=True, max_length=length, return_offsets_mapping=True, verbose=False)
            text = text[: read.offset_mapping[-2][1]]
            borders = [(start, end) for start, end in articles.paragraphs(document) if end <= len(text)]
            index[document] = [(start, end, count + number) for number, (start, end) in enumerate(borders)]
            count += len(borders)
            start = time.process_time()
            vectors.append(paragraph_vectors(name, encoder, document, text, borders))
            seconds += time.process_time() - start
        right, asked, depths = [], [], []
        for question in articles.questions:
            for start, end, number in index[question.document]:
                if start <= question.evidence < end:
                    right.append(number)
                    asked.append(question.text)
                    depths.append(start / index[question.document][-1][1])
        ranks = rank(encoder.encode(asked), [row[None] for row in torch.cat(vectors)], right)
        return summary(ranks, depths) | {"paragraphs": count, "cpu_seconds": round(seconds / len(articles.texts), 4)}

    def _similarity(self, name: str) -> dict[str, Any]:
        """Spearman's ρ × 100 less the source's, on each set."""
        encoder, differences = self.reading(name).encoder, {}
        for path in DATA["sts"]:
            pairs = draw_pairs(str(self.args.data / path), self.args.sts_pairs, self.args.seed)
            scores = np.array([pair.score for pair in pairs])
            before, after = (similarities(pair_vectors(each, pairs)) for each in (self.source, encoder))
            found = spearman_difference(before, after, scores, seed=self.args.seed)
            differences[Path(path).name] = {"mean": found.mean, "low": found.low, "high": found.high}
        return {"differences": differences}


def paragraph_vectors(
    name: str, encoder: Any, document: str, text: str, borders: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Vectors of the paragraphs of an article by a reader, (paragraphs, D)."""
    if name not in ALONE:
        return passage_vectors(encoder, text, borders)
    title = f"{document.replace('_', ' ')}: " if name == "titled" else ""
    return encoder.encode([title + text[start:end] for start, end in borders])


def summary(ranks: np.ndarray, depths: Sequence[float]) -> dict[str, Any]:
    """Means over questions, accuracy by quarter of the documents, and the ranks."""
    return {
        **{name: round(value, 4) for name, value in Retrieval(ranks).to_dict().items()},
        "recall@5": round(float((ranks <= 5).mean()), 4),
        "by_quarter": by_depth(depths, (ranks == 1).tolist()),
        "ranks": " ".join(map(str, ranks.tolist())),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Arguments; with --list only that one is needed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="sentence-embedding BERT with absolute positions")
    parser.add_argument("--data", type=Path, help="folder with the files named in conversion_quality/texts.py")
    parser.add_argument("--documents", type=Path, help="other articles: {id, text} in each line")
    parser.add_argument("--questions", type=Path, help="about --documents: {query, doc, evidence} in each line")
    parser.add_argument("--haystack", type=Path, help="another text around needles")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument("--readers", nargs="+", default=["*"], help="patterns of the readers")
    parser.add_argument("--list", action="store_true", help="print the names of the readers, and do nothing else")
    parser.add_argument("--lengths", type=positive_int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--evidence-length", type=positive_int, default=2048, help="tokens read of an article")
    parser.add_argument("--count", type=positive_int, default=50, help="documents of a length; twice as many articles")
    parser.add_argument("--sts-pairs", type=positive_int, default=1500, help="of a similarity set at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=positive_int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmarks")
    parser.add_argument("--name", default="long_retrieval", help="of the files in --out")
    parser.add_argument("--work", type=Path, default=Path("build") / "bench_long_retrieval", help="students")
    args = parser.parse_args(arguments)
    names = [*readers(students(1, 512), 512), *ALONE]  # the same for every source
    if args.list:
        print("\n".join(names))
    elif not (args.source and args.data):
        parser.error("--source and --data are needed")
    elif (args.documents is None) != (args.questions is None):
        parser.error("--documents and --questions belong together: give both or neither")
    else:
        args.documents = args.documents or args.data / DATA["docs"]
        args.questions = args.questions or args.data / DATA["queries"]
        args.haystack = args.haystack or args.data / HAYSTACK
    check_patterns(parser, "--readers", args.readers, names)
    return args


def labels(bench: Bench) -> dict[str, str]:
    """Readers to what they are called in the tables."""
    return {name: reader.label for name, reader in bench.readers.items()} | ALONE


def main(arguments: Sequence[str] | None = None, tell: Callable[[str], None] = print) -> None:
    args = parse(arguments)
    if args.list:
        return
    start_quietly(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    omitted = ("--tasks", "--readers", "--out", "--work")
    command = reproducing_command("bench_long_retrieval.py", sys.argv[1:] if arguments is None else arguments, omitted)
    bench, path = Bench(args), args.out / f"{args.name}.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"cells": {}}
    others = {cell["settings"]["source"] for cell in results["cells"].values()} - {Path(args.source).name}
    if others:
        sys.exit(
            f"{path}: holds cells of {min(others)}, not of {Path(args.source).name}; give another --name or --out"
        )
    results |= {"name": args.name, "labels": labels(bench)}
    for cell in bench.cells():
        settings = bench.settings(cell)
        if results["cells"].get(cell, {}).get("settings") == settings:
            continue
        results["cells"][cell] = {"settings": settings, "result": bench.measure(cell)}
        results["environment"] = {**environment(), "command": command}
        write_report(path.with_suffix(""), results, card(results))
        result = results["cells"][cell]["result"]
        tell(f"{cell}: {result.get('accuracy@1', result.get('differences'))}")
    draw(results, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
