"""Does training on long documents at once beat training on their pieces, with the same questions?

    hf-relpos convert SOURCE minilm-long --text novels.txt --text abstracts.txt --method-option length=2048
    python scripts/learn_long_documents.py --name squad --source SOURCE --converted minilm-long \\
        --questions train.json dev.json

Files are like SQuAD's: articles of paragraphs, and questions that these answer. Articles are split into those to train
on, to validate, and to measure. Each reader (scripts/long_learning/readers.py) is measured as it is, and trained at
each rate: it finds articles by the mean of their tokens and by their best piece, and the sentence that answers.

Documents of 2,048 tokens train in little memory and time for three reasons: of attention only the window's band is
computed, the lower layers are frozen and run once, and a batch of a few documents is compared with the kept vectors of
all the others. Each run is kept in OUT/results.json; states of lower layers and trained models are in WORK.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiments.arguments import (
    add_experiment_options,
    digest,
    fingerprint,
    non_negative_int,
    positive_int,
    reproducing_command,
    settings_of,
)
from experiments.process import start_quietly
from experiments.results import Results, conditions
from long_learning.card import card, variant
from long_learning.data import UNITS, read_articles, split
from long_learning.readers import READERS, WINDOW, Halves, Reader
from long_learning.training import Readable, about_questions, retrieve, train
from safetensors.torch import load_file, save_file

from hf_relpos.evaluation import load_encoder
from hf_relpos.files import atomic_file


class Study:
    """Articles in three parts, and the runs of one reader after the other."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        articles = read_articles(
            args.questions, load_encoder(args.source, masked=False).tokenizer, args.length, args.unit
        )
        parts = split(articles, (args.held_out, args.validation, args.train))
        self.held_out, self.validation, self.train = parts

    def halves(self, reader: Reader) -> Halves:
        """The encoder of a reader, as it is."""
        encoder = load_encoder(self.args.converted if reader.converted else self.args.source, masked=False)
        if reader.converted:
            encoder.model.config.attention_window = WINDOW
        return Halves(encoder, self.args.frozen)

    def readable(self, name: str, settings: dict[str, Any]) -> tuple[dict[str, list[Readable]], float]:
        """The parts as a reader has them, and CPU seconds of the lower layers for an article; kept in a file."""
        reader, halves = READERS[name], self.halves(READERS[name])
        articles = [*self.train, *self.validation, *self.held_out]
        layouts = [reader.layout(article, halves.tokenizer, self.args.length) for article in articles]
        path = self.args.work / f"{name}.{digest(settings)}.safetensors"
        if not path.is_file():
            start = time.process_time()
            below = {str(n): torch.cat(halves.below(layout.rows)) for n, layout in enumerate(layouts)}
            below["seconds"] = torch.tensor((time.process_time() - start) / len(articles))
            self.args.work.mkdir(parents=True, exist_ok=True)
            with atomic_file(path) as unfinished:
                save_file(below, unfinished)
        below = load_file(path)
        found = iter(
            Readable(each, layout, below[str(n)])
            for n, (each, layout) in enumerate(zip(articles, layouts, strict=True))
        )
        parts = {"train": self.train, "validation": self.validation, "held_out": self.held_out}
        return {part: [next(found) for _ in members] for part, members in parts.items()}, float(below["seconds"])

    def run(
        self, name: str, rates: Sequence[float | None], seed: int, settings: dict[str, Any]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """(variant, result) of a reader at these rates, None for as it is."""
        parts, below = self.readable(name, settings)
        for rate in rates:
            halves, result = self.halves(READERS[name]), {"seconds_below": round(below, 4)}
            if rate is not None:
                result |= train(halves, parts["train"], rate, self.args.epochs, self.args.batch, self.args.asked, seed)
                halves.save(self.args.work / f"{variant(name, rate)}-{seed}")
            result |= measure(halves, parts, self.args.asked_held_out)
            yield variant(name, rate), result


def measure(halves: Halves, parts: dict[str, list[Readable]], asked: int) -> dict[str, Any]:
    """Ranks among held-out articles, and the mean reciprocal rank of validation articles and their passages."""
    found = retrieve(halves, parts["held_out"], asked)
    ranks = retrieve(halves, parts["validation"], asked)["ranks"]
    validation = np.mean([np.mean(1 / np.array(ranks[each])) for each in ("document", "passage")])
    found["ranks"] = {name: " ".join(map(str, each)) for name, each in found["ranks"].items()}
    return found | {"validation": round(float(validation), 4)}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_experiment_options(
        parser, "learn_long_documents", "long_learning", 1, "states of lower layers, trained models"
    )
    parser.add_argument("--source", required=True, help="sentence-embedding BERT with absolute positions")
    parser.add_argument("--converted", required=True, help="the model that was converted from it")
    parser.add_argument("--questions", type=Path, nargs="+", required=True, help="files of SQuAD's form")
    parser.add_argument("--readers", nargs="+", choices=READERS, default=list(READERS))
    parser.add_argument("--rates", type=float, nargs="*", default=[1e-4], help="learning rates")
    parser.add_argument("--length", type=positive_int, default=2048, help="tokens read of an article")
    parser.add_argument("--unit", choices=UNITS, default="sentence", help="what a passage is")
    parser.add_argument("--frozen", type=non_negative_int, default=4, help="lowest layers, which are not trained")
    parser.add_argument("--train", type=positive_int, default=100, help="articles")
    parser.add_argument("--validation", type=positive_int, default=16, help="articles")
    parser.add_argument("--held-out", type=positive_int, default=80, help="articles")
    parser.add_argument("--asked-held-out", type=positive_int, default=16, help="questions about an article at most")
    parser.add_argument("--epochs", type=positive_int, default=2)
    parser.add_argument("--batch", type=positive_int, default=2, help="articles of a step")
    parser.add_argument("--asked", type=positive_int, default=12, help="questions about an article of a batch at most")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Train and measure what is not stored yet, and write the card."""
    args = parse(arguments)
    arguments = sys.argv[1:] if arguments is None else arguments
    start_quietly(args.threads)
    names = {"source": Path(args.source).name, "converted": Path(args.converted).name}
    files = [fingerprint(path) for path in args.questions]
    settings = settings_of(args, ["readers", "rates"], questions=files, **names)
    results = Results(args.out, args.name, settings, card, args.again)
    study = Study(args)
    results.entry["about"] = {
        "command": reproducing_command("learn_long_documents.py", arguments),
        "questions": about_questions(study.held_out, args.asked_held_out),
        **conditions(),
    }
    for name in args.readers:
        for seed in range(args.seeds):
            every: list[float | None] = [None, *args.rates]
            rates = [rate for rate in every if f"{variant(name, rate)}/{seed}" not in results.runs]
            for done, result in study.run(name, rates, seed, settings) if rates else ():
                results.add(done, seed, result)
                results.save()
                print(f"{done}/{seed}: validation {result['validation']}", flush=True)
    results.save()


if __name__ == "__main__":
    main()
