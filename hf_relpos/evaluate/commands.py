"""What `hf-relpos compare` and `hf-relpos evaluate` do: read, measure, print tables, write JSON."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .fidelity import Fidelity, default_lengths, fidelity
from .loading import load_encoder
from .masked import masked_accuracy_by_length, token_ids
from .passkey import passkey_by_mask, passkey_by_vector, passkeys
from .reading import Encoder, has_masked_head, readable_length, unknown_rate
from .reading import Progress as Report
from .records import read_documents, read_lines, read_pairs, read_queries
from .retrieval import Query, Retrieval, difference, retrieve
from .similarity import Pair, pair_vectors, similarities, spearman_difference
from .statistics import rank_correlation


UNKNOWN_LIMIT = 0.05


@contextmanager
def progress_bar(console: Console) -> Iterator[Report]:
    """A bar with the time left, which goes when it is done; gives what measuring functions take as `progress`."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            task = tasks.get("task")
            if task is None:
                task = tasks["task"] = bar.add_task(what, total=total)
            bar.update(task, description=what, completed=done, total=total)

        yield report


def check_writable(path: Path | None) -> None:
    """
    Raises:
        ValueError: for a file that could not be written, before time is spent on what it is to hold.
    """
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"--json {path}: a folder of that name exists, or its folder does not; give a file to write")


def write_json(path: Path, content: Any) -> None:
    """Write JSON to a temporary name beside `path`, then rename it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def read_text(files: Sequence[Path], tokenizer, console: Console) -> list[str]:
    """The lines of text files; warns of text that the tokenizer does not know.

    Raises:
        ValueError: for a file without text.
    """
    lines = []
    for path in files:
        own = [line for line in read_lines(path) if line.strip()]
        if not own:
            raise ValueError(f"{path}: holds no text; give another file")
        lines += own
    rate = unknown_rate(tokenizer, lines[:: max(1, len(lines) // 500)])
    if rate > UNKNOWN_LIMIT:
        console.print(
            f"Warning: the tokenizer does not know {100 * rate:.0f} % of the tokens of the text. Is it in the "
            "language of the model?",
            style="yellow",
            markup=False,
        )
    return lines


def cut_windows(tokenizer, ids: Sequence[int], length: int, count: int) -> list[list[int]]:
    """At most `count` windows `[CLS] … [SEP]` of `length` tokens, spread over the whole text."""
    room = length - 2
    whole = len(ids) // room
    starts = (
        [whole * number // count * room for number in range(count)] if whole > count else range(0, whole * room, room)
    )
    return [[tokenizer.cls_token_id, *ids[at : at + room], tokenizer.sep_token_id] for at in starts]


def windows_by_length(
    tokenizer, lines: Sequence[str], lengths: Sequence[int], tokens: int
) -> tuple[dict[int, list[list[int]]], dict[int, str]]:
    """Windows for each length, about `tokens` tokens of them but 4 to 64, and the lengths that the text does not fill.

    Raises:
        ValueError: when it fills none.
    """
    ids = token_ids(tokenizer, lines)
    found, skipped = {}, {}
    for length in lengths:
        windows = cut_windows(tokenizer, ids, length, max(4, min(64, tokens // length)))
        if windows:
            found[length] = windows
        else:
            skipped[length] = f"the text has {len(ids)} tokens"
    if not found:
        raise ValueError(
            f"the text has {len(ids)} tokens, and the shortest window takes {min(lengths)}: give more text"
        )
    return found, skipped


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _cosine(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def print_fidelity(measured: Fidelity, console: Console) -> None:
    """Tables by length and by layer, and the verdict."""
    table = Table(
        "tokens",
        "windows",
        "token cosine",
        "sentence cosine",
        "by quarter",
        "ceiling: token",
        "sentence",
        box=box.SIMPLE_HEAD,
        title="Fidelity to the teacher",
    )
    masked = any(entry.masked for entry in measured.lengths)
    if masked:
        table.add_column("same masked token, %")
        table.add_column("teacher right, %")
        table.add_column("student right, %")
    for column in table.columns:
        column.justify = "right"
    for entry in measured.lengths:
        own, ceiling = entry.masked, entry.ceiling
        cells = [
            f"{entry.length:,}" + ("" if entry.reference == "teacher" else " *"),
            str(entry.windows),
            _cosine(entry.token_cosine),
            _cosine(entry.sentence_cosine),
            " ".join(_cosine(value) for value in entry.token_cosine_by_quarter),
            _cosine(ceiling and ceiling.token_cosine),
            _cosine(ceiling and ceiling.sentence_cosine),
        ]
        if masked:
            cells += [
                _percent(own and own.agreement),
                _percent(own and own.teacher_accuracy),
                _percent(own and own.student_accuracy),
            ]
        table.add_row(*cells)
    console.print(table)
    notes = ["ceiling: how far the teacher agrees with itself when its input moves by some positions"]
    if any(entry.reference != "teacher" for entry in measured.lengths):
        notes.append("* compared with what the teacher says of overlapping windows")
    notes += [f"{length:,} tokens: not measured, {reason}" for length, reason in measured.skipped.items()]
    console.print("\n".join(notes), style="dim", markup=False, highlight=False)
    rows = [entry for entry in measured.lengths if entry.divergence]
    if rows:
        layers = range(len(rows[0].divergence))
        table = Table("tokens", *(f"layer {layer}" for layer in layers), box=box.SIMPLE_HEAD)
        table.title = "Attention: KL(teacher‖student), nats"
        for column in table.columns:
            column.justify = "right"
        for entry in rows:
            table.add_row(f"{entry.length:,}", *(f"{value:.3f}" for value in entry.divergence))
        console.print(table)


def compare_similarity(
    teacher: Encoder, student: Encoder, pairs: Sequence[Pair], progress: Report | None = None
) -> dict[str, Any]:
    """Spearman × 100 of both, their difference with its range, and how near their vectors of a sentence are."""
    vectors = [pair_vectors(encoder, pairs, progress) for encoder in (teacher, student)]
    scores = np.array([pair.score for pair in pairs])
    cosines = [similarities(both) for both in vectors]
    near = torch.nn.functional.cosine_similarity(*(both.double().flatten(0, 1) for both in vectors), dim=-1)
    worst = int(near.argmin())

    return {
        "pairs": len(pairs),
        "teacher": 100 * rank_correlation(cosines[0], scores),
        "student": 100 * rank_correlation(cosines[1], scores),
        "difference": asdict(spearman_difference(*cosines, scores)),
        "sentence_cosine": {
            "mean": float(near.mean()),
            "min": float(near[worst]),
            "sentence_of_min": (pairs[worst // 2].sentence1, pairs[worst // 2].sentence2)[worst % 2],
        },
    }


def run_compare(
    teacher: str,
    student: str,
    text: Sequence[Path],
    lengths: Sequence[int] | None = None,
    sts: Sequence[Path] = (),
    columns: Sequence[str] = ("score", "sentence1", "sentence2"),
    pooling: str | None = None,
    tokenizer: str | None = None,
    tokens: int = 4096,
    out: Path | None = None,
    plot: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure how faithful a student is to its teacher, print it, and write it.

    Args:
        teacher: folder or Hub repository.
        student: likewise.
        text: files that neither was fitted on; their lines are strung together.
        lengths: tokens per window; None for `default_lengths`.
        sts: files of scored sentence pairs.
        columns: their columns: score, first and second sentence.
        pooling: `mean` or `cls`; None for what the teacher's repository asks for, else `mean`.
        tokenizer: where the tokenizer is; None for beside the teacher.
        tokens: of text for each length, about.
        out: JSON file to write, or None.
        plot: picture to write, or None.

    Returns:
        What is written to `out`.

    Raises:
        ValueError: for what cannot be read or compared.
    """
    console = console or Console()
    for path in (out, plot):
        check_writable(path)
    if lengths and min(lengths) < 3:
        raise ValueError(f"--lengths {min(lengths)}: [CLS] and [SEP] take two tokens; give 3 or more")
    sets = {str(path): read_pairs(path, columns) for path in sts}
    one = load_encoder(teacher, tokenizer, pooling)
    other = load_encoder(student, tokenizer or teacher, one.pooling)
    lines = read_text(text, one.tokenizer, console)
    wanted = sorted(set(lengths or default_lengths(readable_length(one.model))))
    windows, skipped = windows_by_length(one.tokenizer, lines, wanted, tokens)
    with progress_bar(console) as progress:
        measured = fidelity(
            one.model, other.model, windows, one.pooling, one.tokenizer.mask_token_id, progress=progress
        )
        similarity = {name: compare_similarity(one, other, pairs, progress) for name, pairs in sets.items()}
    measured.skipped.update(skipped)
    found = {"teacher": teacher, "student": student, "text": [str(path) for path in text], **measured.to_dict()}
    if similarity:
        found["similarity"] = similarity
    print_fidelity(measured, console)
    if similarity:
        table = Table(
            "set", "pairs", "teacher", "student", "difference, 95 %", "sentence cosine, smallest", box=box.SIMPLE_HEAD
        )
        table.title = "Similarity: Spearman × 100"
        for name, row in similarity.items():
            gap, near = row["difference"], row["sentence_cosine"]
            table.add_row(
                Path(name).name,
                f"{row['pairs']:,}",
                f"{row['teacher']:.2f}",
                f"{row['student']:.2f}",
                f"{gap['mean']:+.2f} ({gap['low']:+.2f} to {gap['high']:+.2f})",
                f"{near['mean']:.3f}, {near['min']:.3f}",
            )
        console.print(table)
    console.print(f"Verdict: {found['verdict']}.", markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        write_json(out, found)
    if plot is not None:
        from ..plot import plot_fidelity

        plot_fidelity(found, plot)
    return found


def evaluate_retrieval(
    encoder: Encoder,
    documents: dict[str, str],
    queries: Sequence[Query],
    length: int | None = None,
    progress: Report | None = None,
) -> dict[str, Any]:
    """Retrieval by each reader that the model can be, and what the others gain on `truncate`.

    Args:
        length: tokens read of a document; None for what the model reads at once, in chunks for all of it.
    """
    limit = readable_length(encoder.model)
    settings: dict[str, dict[str, Any]] = {"truncate": {"reader": "truncate", "chunk": min(512, limit or 512)}}
    settings["chunks"] = {"reader": "chunks", "length": length, "chunk": min(512, limit or 512)}
    if (length or 513) > 512 and (limit is None or (length or limit) <= limit) and limit != 512:
        settings["full"] = {"reader": "full", "length": length}
    results: dict[str, Retrieval] = {
        name: retrieve(encoder, documents, queries, progress=progress, **kwargs) for name, kwargs in settings.items()
    }
    found = {}
    for name, result in results.items():
        found[name] = result.to_dict()
        if name != "truncate":
            gains = difference(results["truncate"], result)
            found[name]["difference"] = {measure: asdict(gain) for measure, gain in gains.items()}
    return found


def run_evaluate(
    model: str,
    sts: Sequence[Path] = (),
    columns: Sequence[str] = ("score", "sentence1", "sentence2"),
    retrieval: tuple[Path, Path] | None = None,
    mlm: Path | None = None,
    passkey: Path | None = None,
    lengths: Sequence[int] | None = None,
    max_length: int | None = None,
    pooling: str | None = None,
    tokenizer: str | None = None,
    out: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure one model on what is given, print it, and write it.

    Args:
        model: folder or Hub repository.
        sts: files of scored sentence pairs.
        columns: their columns: score, first and second sentence.
        retrieval: files of documents (id, text) and of queries (query, doc).
        mlm: text whose masked tokens are to be predicted.
        passkey: text to hide keys in.
        lengths: tokens per window or text, for `mlm` and `passkey`; None for some that the model reads.
        max_length: tokens read of a document in retrieval.
        pooling: `mean` or `cls`; None for what the repository asks for, else `mean`.
        tokenizer: where the tokenizer is; None for beside the model.
        out: JSON file to write, or None.

    Raises:
        ValueError: when there is nothing to measure, and for what cannot be read.
    """
    console = console or Console()
    if not (sts or retrieval or mlm or passkey):
        raise ValueError("nothing to measure: give --sts, --retrieval, --mlm or --passkey")
    check_writable(out)
    sets = {str(path): read_pairs(path, columns) for path in sts}
    documents = read_documents(retrieval[0]) if retrieval else {}
    queries = read_queries(retrieval[1]) if retrieval else []
    encoder = load_encoder(model, tokenizer, pooling, masked=True if mlm else None)
    limit = readable_length(encoder.model)
    chosen = sorted(set(lengths or (n for n in default_lengths(limit) if n >= 64)))
    chosen = [length for length in chosen if limit is None or length <= limit]
    found: dict[str, Any] = {"model": model}
    with progress_bar(console) as progress:
        if sets:
            found["similarity"] = {
                name: {
                    "pairs": len(pairs),
                    "spearman": 100
                    * rank_correlation(
                        similarities(pair_vectors(encoder, pairs, progress)), np.array([pair.score for pair in pairs])
                    ),
                }
                for name, pairs in sets.items()
            }
        if retrieval:
            found["retrieval"] = evaluate_retrieval(encoder, documents, queries, max_length, progress)
        if mlm:
            text = read_text([mlm], encoder.tokenizer, console)
            rows = masked_accuracy_by_length(encoder.model, encoder.tokenizer, text, chosen, progress=progress)
            found["masked"] = {str(length): row for length, row in rows.items()}
        if passkey:
            ids = token_ids(encoder.tokenizer, read_text([passkey], encoder.tokenizer, console))
            rows = {}
            for length in chosen:
                trials = passkeys(encoder.tokenizer, ids, length)
                rows[str(length)] = {"vector": passkey_by_vector(encoder, trials, progress)}
                if has_masked_head(encoder.model):
                    trials = passkeys(encoder.tokenizer, ids, length, masked=True)
                    by_mask = passkey_by_mask(encoder.model, encoder.tokenizer, trials, progress)
                    rows[str(length)]["masked"] = by_mask
            found["passkey"] = rows
    _print_evaluation(found, console)
    if out is not None:
        write_json(out, found)
    return found


def _print_evaluation(found: dict[str, Any], console: Console) -> None:
    def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(*columns, title=title, box=box.SIMPLE_HEAD)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        console.print(table)

    if "similarity" in found:
        rows = [(Path(n).name, f"{r['pairs']:,}", f"{r['spearman']:.2f}") for n, r in found["similarity"].items()]
        show("Similarity", ("set", "pairs", "Spearman × 100"), rows)
    if "retrieval" in found:
        rows = []
        for name, row in found["retrieval"].items():
            gain = row.get("difference", {}).get("ndcg@10")
            shown = f"{gain['mean']:+.3f} ({gain['low']:+.3f} to {gain['high']:+.3f})" if gain else ""
            rows.append((name, _percent(row["accuracy@1"]), f"{row['mrr']:.3f}", f"{row['ndcg@10']:.3f}", shown))
        count = found["retrieval"]["truncate"]["queries"]
        columns = ("reader", "accuracy@1, %", "MRR", "nDCG@10", "nDCG on truncate, 95 %")
        show(f"Retrieval, {count:,} queries", columns, rows)
    if "masked" in found:
        rows = [
            (length, str(row["windows"]), f"{row['accuracy']:.2f}", f"{row['nll']:.3f}")
            for length, row in found["masked"].items()
        ]
        show("Masked tokens", ("tokens", "windows", "accuracy, %", "nll, nats"), rows)
    if "passkey" in found:
        rows = [
            (
                length,
                how,
                _percent(row["accuracy"]),
                " ".join(_percent(v) for key, v in row.items() if key.startswith("depth")),
                _percent(row["chance"]),
            )
            for length, both in found["passkey"].items()
            for how, row in both.items()
        ]
        show("Passkey, %", ("tokens", "by", "found", "by depth", "chance"), rows)
