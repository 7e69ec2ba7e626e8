"""What `hf-relpos compare` and `hf-relpos evaluate` do: read, measure, print tables, write JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from .. import files
from ..console import print_table, progress_bar
from ..data.pairs import Pair, Query, read_documents, read_pairs, read_queries
from ..data.text import TextError, read_texts
from ..data.windows import MAX_UNKNOWN_RATE, cut_windows, unknown_rate
from .conversion import Fidelity, default_lengths, fidelity
from .encoder import Encoder, ProgressCallback
from .inspection import has_mlm_head, model_max_length
from .loading import load_encoder
from .masked import masked_accuracy_by_length, token_ids
from .passkey import passkey_by_mask, passkey_by_vector, passkeys
from .retrieval import CHUNK, Retrieval, difference, retrieve
from .similarity import pair_vectors, similarities, spearman_difference
from .statistics import rank_correlation


# Tokens of text that masked tokens are drawn from, for each length, and that passkeys are hidden in.
MASKED_TOKENS = 32_768
FILLER_TOKENS = 100_000


def check_writable(path: Path | None, flag: str = "--json") -> None:
    """
    Args:
        flag: that the path was given with.

    Raises:
        ValueError: for a file that could not be written, before time is spent on what it is to hold.
    """
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"{flag} {path}: a folder of that name exists, or its folder does not; give a file to write")
    try:
        files.check_writable(path)
    except OSError as error:
        raise ValueError(f"{flag} {path}: could not be written ({error.strerror}); give a file elsewhere") from error


def write_json(path: Path, content: Any) -> None:
    """Write a report to the file that --json names, atomically.

    Raises:
        ValueError: where it cannot be written.
    """
    try:
        files.write_json(path, content)
    except OSError as error:
        raise ValueError(f"--json {path}: could not be written ({error.strerror}); give a file elsewhere") from error


def warn_unknown(rate: float, console: Console) -> None:
    """Say so if a tokenizer does not know much of a text."""
    if rate > MAX_UNKNOWN_RATE:
        console.print(
            f"Warning: the tokenizer does not know {100 * rate:.0f} % of the tokens of the text. Is it in the "
            "language of the model?",
            style="yellow",
            markup=False,
        )


def some_text(source: str, field: str, tokenizer, tokens: int, console: Console) -> list[str]:
    """The first documents of a text, as many as surely hold that many tokens; warns of another language.

    Raises:
        TextError: for what cannot be read, and a text that is empty.
    """
    documents, letters = [], 0
    for document in read_texts(source, field):
        documents.append(document)
        letters += len(document)
        if letters > 12 * tokens:
            break
    if not documents:
        raise TextError(f"text = '{source}': holds no text; give another file")
    warn_unknown(unknown_rate(tokenizer, documents[:: max(1, len(documents) // 100)]), console)
    return documents


def windows_by_length(
    tokenizer, text: Sequence[str], field: str, lengths: Sequence[int], tokens: int, seed: int = 0
) -> tuple[dict[int, list[list[int]]], dict[int, str], float]:
    """Windows for each length, about `tokens` tokens of them but four at least.

    Returns:
        Windows by length; lengths that the text does not fill, with the reason; share of unknown tokens.

    Raises:
        TextError: for text that cannot be read, or fills none of the lengths.
    """
    found, skipped, unknown = {}, {}, 0.0
    for length in lengths:
        try:
            cut = cut_windows(tokenizer, read_texts(text, field), max(tokens, 4 * length), (length,), 0.0, seed)
        except TextError as error:
            if length == min(lengths):  # longer ones will not do either, or it cannot be read at all
                raise
            skipped[length] = str(error)
        else:
            found[length], unknown = cut.ids, max(unknown, cut.unknown_rate)
    return found, skipped, unknown


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _cosine(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def print_fidelity(measured: Fidelity, console: Console) -> None:
    """Tables by length, and what they leave open."""
    past = [entry for entry in measured.lengths if entry.reference != "teacher"]
    rows = []
    for entry in measured.lengths:
        ceiling = entry.ceiling
        cosines = [entry.token_cosine, entry.sentence_cosine]
        cosines += [ceiling and ceiling.token_cosine, ceiling and ceiling.sentence_cosine]
        name = f"{entry.length:,}" + (" *" if entry in past else "")
        rows.append((name, str(entry.windows), *map(_cosine, cosines)))
    columns = ("tokens", "windows", "token", "sentence", "ceiling: token", "sentence")
    print_table(console, "Cosine to the teacher", columns, rows)
    notes = ["ceiling: how far the teacher agrees with itself when its input moves by some positions"]
    if past:
        notes.append("* compared with what the teacher says of overlapping windows; ceiling: when these are others")
    notes += [f"{length:,} tokens not measured: {reason}" for length, reason in measured.skipped.items()]
    console.print("\n".join(notes), markup=False, highlight=False)
    if past:
        rows = [(f"{entry.length:,}", *map(_cosine, entry.token_cosine_by_quarter)) for entry in past]
        print_table(console, "Token cosine by quarter of the text", ("tokens", "1st", "2nd", "3rd", "4th"), rows)
    compared = [entry for entry in measured.lengths if entry.divergence]
    if compared:
        layers = [f"layer {layer}" for layer in range(len(compared[0].divergence))]
        rows = [(f"{entry.length:,}", *(f"{value:.3f}" for value in entry.divergence)) for entry in compared]
        print_table(console, "Attention: KL(teacher‖student), nats", ("tokens", *layers), rows)
    masked = [entry for entry in measured.lengths if entry.masked]
    if masked:
        rows = [
            (
                f"{entry.length:,}",
                f"{entry.masked.tokens:,}",
                _percent(entry.masked.agreement),
                _percent(entry.masked.teacher_accuracy),
                _percent(entry.masked.student_accuracy),
            )
            for entry in masked
        ]
        columns = ("tokens", "masked", "same prediction", "teacher right", "student right")
        print_table(console, "Masked tokens, %", columns, rows)


def compare_similarity(
    teacher: Encoder, student: Encoder, pairs: Sequence[Pair], progress: ProgressCallback | None = None
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
    text: Sequence[str],
    field: str = "text",
    lengths: Sequence[int] | None = None,
    sts: Sequence[Path] = (),
    columns: Sequence[str] = ("score", "sentence1", "sentence2"),
    pooling: str | None = None,
    tokenizer: str | None = None,
    tokens: int = 4096,
    out: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure how faithful a student is to its teacher, print it, and write it.

    Args:
        teacher: folder or Hub repository.
        student: likewise.
        text: files or Hub datasets that neither was fitted on, as `read_texts` takes them.
        field: key or column of the text in them.
        lengths: tokens per window; None for `default_lengths`.
        sts: files of scored sentence pairs.
        columns: their columns: score, first and second sentence.
        pooling: `mean` or `cls`; None for what the teacher's repository asks for, else `mean`.
        tokenizer: where the tokenizer is; None for beside the teacher.
        tokens: of text for each length, about.
        out: JSON file to write, or None.

    Returns:
        What is written to `out`.

    Raises:
        ValueError: for what cannot be read or compared.
    """
    console = console or Console()
    check_writable(out)
    if lengths and min(lengths) < 3:
        raise ValueError(f"--lengths {min(lengths)}: [CLS] and [SEP] take two tokens; give 3 or more")
    sets = {str(path): read_pairs(path, columns) for path in sts}
    one = load_encoder(teacher, tokenizer, pooling)
    other = load_encoder(student, tokenizer or teacher, one.pooling)
    wanted = sorted(set(lengths or default_lengths(model_max_length(one.model))))
    windows, skipped, unknown = windows_by_length(one.tokenizer, text, field, wanted, tokens)
    warn_unknown(unknown, console)
    with progress_bar(console) as progress:
        measured = fidelity(
            one.model, other.model, windows, one.pooling, one.tokenizer.mask_token_id, progress=progress
        )
        similarity = {name: compare_similarity(one, other, pairs, progress) for name, pairs in sets.items()}
    measured.skipped.update(skipped)
    found = {"teacher": teacher, "student": student, "text": list(text), "unknown": unknown, **measured.to_dict()}
    if similarity:
        found["similarity"] = similarity
    print_fidelity(measured, console)
    if similarity:
        rows = []
        for name, row in similarity.items():
            gap, near = row["difference"], row["sentence_cosine"]
            figures = [f"{row['teacher']:.2f}", f"{row['student']:.2f}"]
            figures += [f"{gap['mean']:+.2f} ({gap['low']:+.2f} to {gap['high']:+.2f})"]
            figures += [f"{near['mean']:.3f} ({near['min']:.3f})"]
            rows.append((Path(name).name, f"{row['pairs']:,}", *figures))
        columns = ("set", "pairs", "teacher", "student", "difference, 95 %", "cosine (least)")
        print_table(console, "Similarity: Spearman × 100", columns, rows)
    console.print(f"Verdict: {found['verdict']}.", markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        write_json(out, found)
    return found


def evaluate_retrieval(
    encoder: Encoder,
    documents: dict[str, str],
    queries: Sequence[Query],
    length: int = 2048,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Retrieval by each reader that the model can be, and what the others gain on `truncate`.

    Args:
        length: tokens that `chunks` and `full` read of a document; where the model cannot, there is no `full`.
    """
    limit = model_max_length(encoder.model)
    chunk = CHUNK if limit is None else min(CHUNK, limit)
    settings: dict[str, dict[str, Any]] = {
        "truncate": {"reader": "truncate", "chunk": chunk},
        "chunks": {"reader": "chunks", "length": length, "chunk": chunk},
    }
    if length > chunk and (limit is None or length <= limit):
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
    mlm: str | None = None,
    passkey: str | None = None,
    field: str = "text",
    lengths: Sequence[int] | None = None,
    max_length: int = 2048,
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
        field: key or column of these texts.
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
    limit = model_max_length(encoder.model)
    chosen = sorted(set(lengths or (n for n in default_lengths(limit) if n >= 64)))
    fitting = [length for length in chosen if limit is None or length <= limit]
    if mlm or passkey:
        if not fitting:
            given = ",".join(map(str, chosen)) if lengths else "not given, so from 64 on"
            raise ValueError(f"--lengths {given}: the model reads {limit} tokens; give shorter ones")
        for length in chosen if lengths else ():
            if length not in fitting:
                console.print(f"{length:,} tokens not measured: the model reads {limit} tokens", highlight=False)
    chosen = fitting
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
            text = some_text(mlm, field, encoder.tokenizer, max(MASKED_TOKENS, *chosen), console)
            rows = masked_accuracy_by_length(
                encoder.model, encoder.tokenizer, text, chosen, MASKED_TOKENS, progress=progress
            )
            found["masked"] = {str(length): row for length, row in rows.items()}
        if passkey:
            text = some_text(passkey, field, encoder.tokenizer, max(FILLER_TOKENS, *chosen), console)
            ids = token_ids(encoder.tokenizer, text)
            rows = {}
            for length in chosen:
                trials = passkeys(encoder.tokenizer, ids, length)
                rows[str(length)] = {"vector": passkey_by_vector(encoder, trials, progress)}
                if has_mlm_head(encoder.model):
                    trials = passkeys(encoder.tokenizer, ids, length, masked=True)
                    by_mask = passkey_by_mask(encoder.model, encoder.tokenizer, trials, progress)
                    rows[str(length)]["masked"] = by_mask
            found["passkey"] = rows
    _print_evaluation(found, console)
    if out is not None:
        write_json(out, found)
    return found


def _print_evaluation(found: dict[str, Any], console: Console) -> None:
    if "similarity" in found:
        rows = [(Path(n).name, f"{r['pairs']:,}", f"{r['spearman']:.2f}") for n, r in found["similarity"].items()]
        print_table(console, "Similarity", ("set", "pairs", "Spearman × 100"), rows)
    if "retrieval" in found:
        rows = []
        for name, row in found["retrieval"].items():
            gain = row.get("difference", {}).get("ndcg@10")
            shown = f"{gain['mean']:+.3f} ({gain['low']:+.3f} to {gain['high']:+.3f})" if gain else ""
            rows.append((name, _percent(row["accuracy@1"]), f"{row['mrr']:.3f}", f"{row['ndcg@10']:.3f}", shown))
        count = found["retrieval"]["truncate"]["queries"]
        columns = ("reader", "accuracy@1, %", "MRR", "nDCG@10", "nDCG on truncate, 95 %")
        print_table(console, f"Retrieval, {count:,} queries", columns, rows)
    if "masked" in found:
        rows = [
            (length, str(row["windows"]), f"{row['accuracy']:.2f}", f"{row['nll']:.3f}")
            for length, row in found["masked"].items()
        ]
        print_table(console, "Masked tokens", ("tokens", "windows", "accuracy, %", "nll, nats"), rows)
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
        print_table(console, "Passkey, %", ("tokens", "by", "found", "by depth", "chance"), rows)
