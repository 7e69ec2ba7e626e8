"""How much of a sentence encoder the converter keeps, what it costs, and how fast the results are.

    python scripts/benchmarks/bench_conversion.py --source all-MiniLM-L6-v2 --data DATA     # fast and default
    python scripts/benchmarks/bench_conversion.py --source MODEL --train-text a.txt b.jsonl#abstract \\
        --eval-text c.txt --sts d.tsv --students default long

Writes OUT/conversion.json and .md after every student; other students that are there stay, with their dates. SOURCE is
a sentence-embedding BERT. DATA is a folder with the files in `DATA`. Text is `FILE` or `FILE#FIELD`. Training text is
cut into passages, about equally many of each file; those that share twelve words in a row with an evaluation text are
left out.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from sentence_transformers import SentenceTransformer
from shared.arguments import RESULTS, positive_int
from shared.measuring import environment, utc_now
from shared.process import start_quietly
from shared.reports import Table, describe, markdown_sections, print_tables, stored, write_report

from hf_relpos.conversion import convert
from hf_relpos.data import read_texts
from hf_relpos.data.records import iterate_records
from hf_relpos.evaluation import Encoder, fidelity, load_encoder
from hf_relpos.evaluation.compare import windows_by_length


# Files in the folder --data.
DATA = {
    "train_text": ["text/novels.txt.xz", "long/wikidocs.docs.jsonl.xz", "text/acl_abstracts.jsonl.xz#abstract"],
    "eval_text": ["text/wikitext2.valid.txt", "text/peps.jsonl.xz#body"],  # the second unlike all that is trained on
    "sts": ["sts/stsb.dev.tsv", "sts/stsb.train.tsv"],
}
# Arguments of `convert`, by the name of the student.
STUDENTS: dict[str, dict[str, Any]] = {
    "fast": {"method_options": {"steps": 150}},
    "default": {},
    "no pairs": {"method_options": {"pairs": 0.0}},
    "long": {"method_options": {"length": 2048}},
}
LENGTHS = (16, 64, 128, 256, 512)
TRAINING_CHARACTERS = 3_057_600  # of training text; all students find enough windows in it
PASSAGE = 12_000  # characters of text that are taken in one piece
SHARED_WORDS = 12  # words in a row that no training text shares with an evaluation text


def read_source(source: str) -> list[str]:
    """The documents of `FILE` or `FILE#FIELD`."""
    path, _, column = source.partition("#")
    return list(read_texts(path, column or "text"))


def word_ngrams(text: str) -> set[int]:
    """Hashes of all runs of SHARED_WORDS words."""
    words = text.lower().split()
    return {hash(tuple(words[at : at + SHARED_WORDS])) for at in range(len(words) - SHARED_WORDS + 1)}


def training_passages(sources: Sequence[str], held_out: Sequence[str], characters: int, seed: int) -> list[str]:
    """Passages at random positions, about equally many characters of each source, in random order.

    Args:
        sources: `FILE` or `FILE#FIELD`.
        held_out: sources with which no passage shares SHARED_WORDS words in a row.
        characters: in all; fewer where the text is short.
        seed: of the positions.
    """
    rng = np.random.default_rng(seed)
    held_out_ngrams = set().union(*(word_ngrams(" ".join(read_source(source))) for source in held_out))
    passages = []
    for source in sources:
        text = "\n\n".join(read_source(source))
        size = min(PASSAGE, max(len(text), 1))
        starts = size * rng.permutation(max(1, len(text) // size))
        for start in starts[: -(-characters // (len(sources) * size))].tolist():
            passage = text[start : start + size]
            if start:  # the rest of a word
                passage = passage.partition(" ")[2]
            passage = passage.rpartition(" ")[0] or passage
            if held_out_ngrams.isdisjoint(word_ngrams(passage)):
                passages.append(passage)
    return [passages[number] for number in rng.permutation(len(passages))]


def correlation(encoder: SentenceTransformer, path: str, most: int, seed: int) -> float:
    """Spearman's ρ × 100 of the cosines of sentence vectors with the scores of pairs, at most so many at random."""
    from scipy.stats import spearmanr

    columns = ("score", "sentence1", "sentence2")
    pairs = [[record[name] for name in columns] for record in iterate_records(path, columns)]
    drawn = np.random.default_rng(seed).permutation(len(pairs))[:most]
    scores, one, other = zip(*(pairs[number] for number in drawn), strict=True)
    cosines = encoder.similarity_pairwise(*(encoder.encode(list(texts)) for texts in (one, other)))
    return 100 * float(spearmanr(cosines, np.array(scores, dtype=float)).statistic)


def measure(name: str, teacher: Encoder, texts: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Convert the source, and measure the result.

    Returns:
        `date`, `cosines` of sentence vectors to the source by text and length, `correlations` of both models by set,
        and the `details` of the converter, with the time of both models.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = (args.keep or Path(folder)) / name
        details = convert(args.source, out, **STUDENTS[name], texts=texts, seed=args.seed).details
        student = load_encoder(out, pooling=teacher.pooling)
        encoders = [SentenceTransformer(each) for each in (args.source, str(out))]
    cosines = {}
    for source in args.eval_text:
        path, _, column = source.partition("#")
        rows, *_ = windows_by_length(teacher.tokenizer, [path], column or "text", args.lengths, args.window_tokens)
        entries = fidelity(teacher.model, student.model, rows, teacher.pooling).lengths
        cosines[Path(path).name] = {str(entry.length): entry.sentence_cosine for entry in entries}
    correlations = {
        Path(path).name: [correlation(each, path, args.sts_pairs, args.seed) for each in encoders] for path in args.sts
    }
    return {"date": utc_now(), "cosines": cosines, "correlations": correlations, "details": details}


def tables(rows: dict[str, Any]) -> list[Table]:
    """One table, a line for each student."""
    lines: list[list[str]] = []
    for name, row in rows.items():
        closeness = [" ".join(f"{value:.3f}" for value in cosines.values()) for cosines in row["cosines"].values()]
        gaps = [f"{student - teacher:+.2f}" for teacher, student in row["correlations"].values()]
        spent, speed, learnt = (row["details"][each] for each in ("cpu_seconds", "speed", "distillation"))
        ratio = f"{speed['result'] / speed['source']:.2f}"
        passes = spent["distillation"] / (speed["source"] * learnt["tokens"] / speed["tokens"])
        costs = [f"{passes:.1f}", *(f"{seconds:,.0f}" for seconds in spent.values())]
        lines.append([name, *closeness, " ".join(gaps), ratio, *costs, row["date"].partition(" ")[0]])
    row = next(iter(rows.values()))
    lengths = ", ".join(next(iter(row["cosines"].values())))
    tokens = row["details"]["speed"]["tokens"]
    columns = ["", *row["cosines"], "Spearman's ρ × 100", f"time × source, {tokens} tokens"]
    spent = [f"{what}, CPU s" for what in row["details"]["cpu_seconds"]]
    columns += ["training × the source's reading", *spent, "date"]
    return [(f"Sentence cosine at {lengths} tokens", columns, lines)]


def card(content: dict[str, Any]) -> str:
    """conversion.md."""
    return (
        f"# Conversion of {content['source']}\n\n{describe(content['environment'])}\n"
        f"Cosines are means over held-out text, {content['window_tokens']:,} tokens of each length. The held-out text "
        f"shares no {SHARED_WORDS} words in a row with the training text.\n"
        f"{markdown_sections(tables(content['rows']))}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="sentence-embedding BERT with absolute positions")
    parser.add_argument("--data", type=Path, help="folder with the files named in DATA")
    parser.add_argument("--train-text", nargs="+", default=[], help="to train on")
    parser.add_argument("--eval-text", nargs="+", default=[], help="to measure on, never trained on")
    parser.add_argument("--sts", nargs="+", default=[], help="scored pairs of sentences: score, sentence1, sentence2")
    parser.add_argument("--students", nargs="+", choices=STUDENTS, default=["fast", "default"])
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmarks")
    parser.add_argument("--keep", type=Path, help="folder for the students, which are else thrown away")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=positive_int, default=1)
    parser.add_argument("--lengths", type=positive_int, nargs="+", default=LENGTHS)
    parser.add_argument("--window-tokens", type=positive_int, default=6144, help="tokens compared at each length")
    parser.add_argument("--sts-pairs", type=positive_int, default=1300, help="of a set at most, drawn at random")
    args = parser.parse_args(arguments)
    for name, files in DATA.items():
        if args.data and not getattr(args, name):
            setattr(args, name, [str(args.data / each) for each in files])
    for path in (args.train_text or [""]) + (args.eval_text or [""]) + args.sts:
        if not Path(path.partition("#")[0]).is_file():
            parser.error(f"{path or '--train-text, --eval-text'}: no such file; check --data, or name the file")
    start_quietly(args.threads)
    console, teacher = Console(), load_encoder(args.source)
    texts = training_passages(args.train_text, args.eval_text, TRAINING_CHARACTERS, args.seed)
    content: dict[str, Any] = {"source": Path(args.source).name, "environment": environment()}
    content |= {"window_tokens": args.window_tokens, "rows": stored(args.out / "conversion").get("rows", {})}
    for name in args.students:
        console.print(f"converting: {name}", style="dim")
        content["rows"][name] = measure(name, teacher, texts, args)
        write_report(args.out / "conversion", content, card(content))
    print_tables(tables(content["rows"]))


if __name__ == "__main__":
    main()
