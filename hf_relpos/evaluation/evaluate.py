"""Measurements of `hf-relpos evaluate`: one model on the tasks for which data are given."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..console import ProgressCallback, split_progress
from ..data.batching import Row
from ..data.pairs import PAIR_COLUMNS, Pair, Query, read_documents, read_pairs, read_queries
from ..data.text import TextError, pair_fields, read_texts
from ..data.windows import unknown_rate, warn_of_unknown_tokens
from .encoder import Encoder, expected_work, text_work
from .inspection import has_mlm_head, model_max_length, set_attention_window
from .loading import load_encoder
from .masked import masked_accuracy_by_length, token_ids
from .model_fidelity import default_lengths
from .passkey import TEXTS, passkey_by_mask, passkey_by_vector, passkeys
from .retrieval import CHUNK, difference, retrieval_work, retrieve
from .similarity import pair_vectors, similarities
from .statistics import rank_correlation


# Tokens of text for each length of the masked-token task, and for passkeys.
MASKED_TOKENS = 32_768
FILLER_TOKENS = 100_000


@dataclass(frozen=True)
class EvaluateSettings:
    """Settings of `evaluate_model`; tasks without data are skipped.

    Attributes:
        model: folder or Hub repository.
        sts: files of scored sentence pairs.
        columns: columns of these files: score, first and second sentence.
        retrieval: files of documents (id, text) and of queries (query, doc).
        mlm: text whose masked tokens are predicted.
        passkey: text in which keys are hidden.
        field: key or column of `mlm` and `passkey`; one for both, or one for each.
        lengths: tokens per window or text, for `mlm` and `passkey`; None for several up to the model's maximum length.
        max_length: tokens read of a document in retrieval.
        pooling: `mean` or `cls`; None for that of the model's repository, or `mean` if it has none.
        tokenizer: folder or Hub repository of the tokenizer; None for the model's.
        attention_window: `attention_window` of the model, 0 for none; None for its own. Texts past its
            `max_position_embeddings` are then also measured with its own.

    Raises:
        ValueError: when there is nothing to measure, and for a different number of fields than texts.
    """

    model: str
    sts: Sequence[Path] = ()
    columns: Sequence[str] = PAIR_COLUMNS
    retrieval: tuple[Path, Path] | None = None
    mlm: str | None = None
    passkey: str | None = None
    field: str | Sequence[str] = "text"
    lengths: Sequence[int] | None = None
    max_length: int = 2048
    pooling: str | None = None
    tokenizer: str | None = None
    attention_window: int | None = None

    def __post_init__(self) -> None:
        if not (self.sts or self.retrieval or self.mlm or self.passkey):
            raise ValueError("nothing to measure: give --sts, --retrieval, --mlm or --passkey")
        if self.field != "text":
            self.fields()

    def fields(self) -> dict[str, str]:
        """The field for each given text of `mlm` and `passkey`.

        Raises:
            ValueError: for a different number of fields than texts.
        """
        given = {name: text for name, text in (("mlm", self.mlm), ("passkey", self.passkey)) if text}
        return {name: field for name, (_, field) in zip(given, pair_fields(given.values(), self.field), strict=True)}


def evaluate_model(settings: EvaluateSettings, progress: ProgressCallback | None = None) -> dict[str, Any]:
    """Measure one model; warns about lengths past its maximum and text with many unknown tokens.

    Returns:
        The content of the JSON file.

    Raises:
        ValueError: for files that cannot be read, and if all lengths are past the model's maximum.
    """
    pairs_by_file = {str(path): read_pairs(path, settings.columns) for path in settings.sts}
    documents = read_documents(settings.retrieval[0]) if settings.retrieval else {}
    queries = read_queries(settings.retrieval[1]) if settings.retrieval else []
    encoder = load_encoder(settings.model, settings.tokenizer, settings.pooling, masked=True if settings.mlm else None)
    window = settings.attention_window
    own = None if window is None else set_attention_window(encoder.model, window)
    lengths = _lengths(settings, model_max_length(encoder.model)) if settings.mlm or settings.passkey else []
    results: dict[str, Any] = {
        "model": settings.model,
        "attention_window": getattr(encoder.model.config, "attention_window", None),
    }
    has_own = own is not None and own != window
    trained = encoder.model.config.max_position_embeddings if has_own else 0
    again_lengths = [length for length in lengths if length > trained] if has_own else []
    strategies = _strategies(encoder, settings.max_length) if settings.retrieval else {}
    reads_again = has_own and "full" in strategies and settings.max_length > trained
    work = {
        ("similarity", name): text_work(
            encoder.model, [text for pair in pairs for text in (pair.sentence1, pair.sentence2)]
        )
        for name, pairs in pairs_by_file.items()
    }
    for name, arguments in strategies.items():
        work["retrieval", name] = sum(retrieval_work(encoder, documents, queries, name, **arguments).values())
    work["lengths", "given"] = sum(_length_work(settings, encoder, lengths).values())
    work["lengths", "own"] = sum(_length_work(settings, encoder, again_lengths).values())
    work["retrieval", "own"] = work.get(("retrieval", "full"), 0.0) if reads_again else 0.0
    parts = split_progress(progress, work)
    if pairs_by_file:
        results["similarity"] = {
            name: evaluate_similarity(encoder, pairs, parts["similarity", name])
            for name, pairs in pairs_by_file.items()
        }
    if settings.retrieval:
        of_strategies = {name: parts["retrieval", name] for name in strategies}
        results["retrieval"] = evaluate_retrieval(encoder, documents, queries, settings.max_length, of_strategies)
    results |= _by_length(settings, encoder, lengths, parts["lengths", "given"])
    if own is not None and has_own:
        set_attention_window(encoder.model, own)
        again = _by_length(settings, encoder, again_lengths, parts["lengths", "own"])
        if reads_again:
            found = retrieve(
                encoder, documents, queries, "full", length=settings.max_length, progress=parts["retrieval", "own"]
            )
            again["retrieval"] = {"full": found.to_dict()}
        if again:
            results["as_it_is"] = {"attention_window": own or None, **again}
    return results


def _length_work(settings: EvaluateSettings, encoder: Encoder, lengths: Sequence[int]) -> dict[tuple[str, int], float]:
    """Expected work of masked tokens and passkeys at each length, as far as they are asked for."""
    texts = TEXTS * (2 if has_mlm_head(encoder.model) else 1)
    tokens = {
        **({("masked", length): max(MASKED_TOKENS, length) for length in lengths} if settings.mlm else {}),
        **({("passkey", length): texts * length for length in lengths} if settings.passkey else {}),
    }
    return {key: expected_work(encoder.model, count, key[1]) for key, count in tokens.items()}


def _by_length(
    settings: EvaluateSettings, encoder: Encoder, lengths: Sequence[int], progress: ProgressCallback | None
) -> dict[str, Any]:
    """Masked tokens and passkeys, as far as they are asked for, at each length."""
    results: dict[str, Any] = {}
    parts = split_progress(progress, _length_work(settings, encoder, lengths))
    if settings.mlm and lengths:
        text = _documents(settings.mlm, settings.fields()["mlm"], encoder.tokenizer, max(MASKED_TOKENS, *lengths))
        results["masked"] = {}
        for length in lengths:
            part = parts["masked", length]
            by_length = masked_accuracy_by_length(
                encoder.model, encoder.tokenizer, text, [length], MASKED_TOKENS, progress=part
            )
            results["masked"][str(length)] = by_length[length]
    if settings.passkey and lengths:
        text = _documents(
            settings.passkey, settings.fields()["passkey"], encoder.tokenizer, max(FILLER_TOKENS, *lengths)
        )
        filler = token_ids(encoder.tokenizer, text)
        results["passkey"] = {
            str(length): evaluate_passkeys(encoder, filler, length, parts["passkey", length]) for length in lengths
        }
    return results


def _lengths(settings: EvaluateSettings, limit: int | None) -> list[int]:
    """The lengths that the model can read, ascending.

    Raises:
        ValueError: if it can read none of them.
    """
    lengths = sorted(set(settings.lengths or (length for length in default_lengths(limit) if length >= 64)))
    fitting = [length for length in lengths if limit is None or length <= limit]
    if not fitting:
        value = ",".join(map(str, lengths)) if settings.lengths else "not given, so from 64 on"
        raise ValueError(f"--lengths {value}: the model reads {limit} tokens; give shorter ones")
    if settings.lengths:
        for length in lengths[len(fitting) :]:
            warnings.warn(f"{length:,} tokens not measured: the model reads {limit} tokens", stacklevel=3)
    return fitting


def _documents(source: str, field: str, tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[str]:
    """The first documents of a text, enough for that many tokens; warns about many unknown tokens.

    Raises:
        TextError: for text that cannot be read, and an empty text.
    """
    documents: list[str] = []
    characters = 12 * tokens  # no text has more characters per token
    for document in read_texts(source, field):
        documents.append(document[:characters])
        characters -= len(documents[-1])
        if not characters:
            break
    if not documents:
        raise TextError(f"text = '{source}': holds no text; give another file")
    warn_of_unknown_tokens(unknown_rate(tokenizer, documents[:: max(1, len(documents) // 100)]))
    return documents


def evaluate_similarity(
    encoder: Encoder, pairs: Sequence[Pair], progress: ProgressCallback | None = None
) -> dict[str, Any]:
    """Number of pairs, and Spearman's ρ × 100.

    Raises:
        ValueError: for cosines that are all the same.
    """
    cosines = similarities(pair_vectors(encoder, pairs, progress))
    if (cosines == cosines[0]).all():
        raise ValueError(f"cosine = {cosines[0]:g} of all {len(pairs)} pairs, which cannot be ranked; give others")
    scores = np.array([pair.score for pair in pairs])
    return {"pairs": len(pairs), "spearman": 100 * rank_correlation(cosines, scores)}


def _strategies(encoder: Encoder, length: int) -> dict[str, dict[str, int]]:
    """The arguments of `retrieve` for each strategy that the model allows."""
    limit = model_max_length(encoder.model)
    chunk = CHUNK if limit is None else min(CHUNK, limit)
    arguments = {"truncate": {"chunk": chunk}, "chunks": {"length": length, "chunk": chunk}}
    if length > chunk and (limit is None or length <= limit):
        arguments["full"] = {"length": length}
    return arguments


def evaluate_retrieval(
    encoder: Encoder,
    documents: Mapping[str, str],
    queries: Sequence[Query],
    length: int = 2048,
    progress: Mapping[str, ProgressCallback | None] | None = None,
) -> dict[str, Any]:
    """Retrieval with each strategy that the model allows, and the gain of each over `truncate`.

    Args:
        length: tokens that `chunks` and `full` read of a document; past the model's maximum, `full` is skipped.
        progress: by strategy; None for none.
    """
    retrievals = {
        strategy: retrieve(encoder, documents, queries, strategy, progress=(progress or {}).get(strategy), **arguments)
        for strategy, arguments in _strategies(encoder, length).items()
    }
    results = {strategy: retrieval.to_dict() for strategy, retrieval in retrievals.items()}
    for strategy in results.keys() - {"truncate"}:
        gains = difference(retrievals["truncate"], retrievals[strategy])
        results[strategy]["difference"] = {measure: asdict(gain) for measure, gain in gains.items()}
    return results


def evaluate_passkeys(
    encoder: Encoder, filler: Row, length: int, progress: ProgressCallback | None = None
) -> dict[str, dict[str, float]]:
    """Passkey accuracy by text vectors and, for a model with a masked-token head, at masked tokens."""
    parts = split_progress(progress, {"vector": 1.0, **({"masked": 1.0} if has_mlm_head(encoder.model) else {})})
    results = {"vector": passkey_by_vector(encoder, passkeys(encoder.tokenizer, filler, length), parts["vector"])}
    if has_mlm_head(encoder.model):
        trials = passkeys(encoder.tokenizer, filler, length, masked=True)
        results["masked"] = passkey_by_mask(encoder.model, encoder.tokenizer, trials, parts["masked"])
    return results
