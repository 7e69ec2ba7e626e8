"""Train a relative or a stock BERT as a sentence encoder with sentence-transformers, also on long documents.

    python scripts/examples/run_embedding.py --model_name_or_path minilm-relative --train_file pairs.jsonl \\
        --text_column_names query positive --documents_file docs.jsonl --queries_file queries.jsonl \\
        --max_seq_length 2048 --attention_window 256 --freeze_layers 4 --do_train --do_eval --output_dir encoder

Pairs, or triples with a hard negative, are trained with MultipleNegativesRankingLoss, and with --mini_batch_size
with its GradCache version, whose memory does not grow with the batch. Pairs with a score (--score_column_name) are
trained with CoSENT's loss, or that of --loss. Files are .csv or .tsv with a header, or .jsonl. All flags of
`SentenceTransformerTrainingArguments` apply.

Measured, where there are files: Spearman's and Pearson's correlation on scored pairs (--sts_file), and retrieval of
the one document that each query is about (--documents_file with `id` and `text`, --queries_file with `query`, `doc`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from recipes.arguments import DataArguments, ModelArguments, check_least, launch, option
from recipes.data import check_texts, load_data, numbers
from recipes.models import check_scheme, check_window, freeze, load_config, load_tokenizer, sequence_length
from recipes.running import check_checkpoint, run, start
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
)

from hf_relpos import optimize, patch_transformers
from hf_relpos.data.records import iterate_records, text_field
from hf_relpos.evaluation.loading import loading_errors
from hf_relpos.files import write_json


# For pairs or triples, and for pairs with a score.
RANKING = {"multiple_negatives_ranking": losses.MultipleNegativesRankingLoss}
SCORED = {"cosent": losses.CoSENTLoss, "cosine_similarity": losses.CosineSimilarityLoss}


@dataclass
class EmbeddingArguments(DataArguments):
    """Data of a sentence encoder."""

    text_column_names: list[str] = option(
        "columns of a query and its positive (and a hard negative)", ["query", "positive"]
    )
    score_column_name: str | None = option("column of the similarity of a pair; then there is no negative")
    score_scale: float = option("what scores are divided by, so that they are 0 to 1: 5 for STS", 1.0)
    loss: str | None = option("multiple_negatives_ranking; for scored pairs cosent (default) or cosine_similarity")
    mini_batch_size: int | None = option("texts encoded at once: GradCache, for large batches in little memory")
    sts_file: str | None = option("scored pairs to measure: score, sentence1, sentence2")
    documents_file: str | None = option("documents to find: id, text")
    queries_file: str | None = option("queries: query, doc (the id of its document)")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("mini_batch_size", self.mini_batch_size, 1)
        known = SCORED if self.score_column_name else RANKING
        columns = (2,) if self.score_column_name else (2, 3)
        if len(self.text_column_names) not in columns:
            raise ValueError(
                f"--text_column_names {' '.join(self.text_column_names)}: name {' or '.join(map(str, columns))}"
            )
        if self.loss is not None and self.loss not in known:
            with_score = "with" if self.score_column_name else "without"
            raise ValueError(f"--loss {self.loss}: {with_score} --score_column_name give {' or '.join(known)}")
        if self.mini_batch_size and self.score_column_name:
            raise ValueError("--mini_batch_size: of multiple_negatives_ranking only; leave it out")
        if not self.score_scale > 0:
            raise ValueError(f"--score_scale {self.score_scale}: give a positive number")
        if bool(self.documents_file) != bool(self.queries_file):
            raise ValueError("--documents_file and --queries_file belong together; give both or neither")
        if self.validation_file:
            raise ValueError("--validation_file: give --sts_file, or --documents_file with --queries_file")


def load_encoder(model_args: ModelArguments, max_length: int | None) -> SentenceTransformer:
    """The encoder of a folder or repository; mean pooling around a plain model.

    Raises:
        ValueError: for one that is not there, cannot read texts so long, or has another scheme than the flags say.
    """
    name = model_args.model_name_or_path
    if name is None:
        raise ValueError("--model_name_or_path: give a checkpoint; sentence encoders are not trained from new weights")
    load_tokenizer(model_args)
    changes = {} if model_args.attention_window is None else {"attention_window": model_args.attention_window}
    backend = {"attn_implementation": model_args.attn_implementation} if model_args.attn_implementation else {}
    check_window(model_args, load_config(model_args).model_type)
    hub = {"cache_folder": model_args.cache_dir, "revision": model_args.model_revision, "token": model_args.token}
    with loading_errors(name), patch_transformers():
        model = SentenceTransformer(name, **hub, config_kwargs=changes, model_kwargs=backend)
    inner = model.transformers_model
    check_scheme(model_args, inner.config)
    model.max_seq_length = sequence_length(max_length, inner, model.max_seq_length or 512)
    freeze(inner, model_args.freeze_layers)
    if model_args.optimize:
        optimize(model)
    return model


def read_columns(path: str, *columns: str) -> list[list[str]]:
    """The columns of all records of a file; integers are ids.

    Raises:
        ValueError: for files that `iterate_records` rejects, and values that are neither text nor integers.
    """
    return [
        [
            text_field(path, number, each, str(value) if isinstance(value, int) else value)
            for each, value in row.items()
        ]
        for number, row in enumerate(iterate_records(path, columns), 1)
    ]


def evaluators(args: EmbeddingArguments, batch_size: int) -> list[Any]:
    """What measures the encoder.

    Raises:
        ValueError: for files that cannot be read, and a query about a document that is not there.
    """
    found: list[Any] = []
    settings = {"batch_size": batch_size, "write_csv": False}
    if args.sts_file:
        one, other = map(list, zip(*read_columns(args.sts_file, "sentence1", "sentence2"), strict=True))
        scores = numbers("sts", [row["score"] for row in iterate_records(args.sts_file, ["score"])])
        found.append(EmbeddingSimilarityEvaluator(one, other, scores, name="sts", **settings))
    if args.documents_file and args.queries_file:
        documents = dict(read_columns(args.documents_file, "id", "text"))
        queries = read_columns(args.queries_file, "query", "doc")[: args.max_eval_samples]
        for number, (_, document) in enumerate(queries, 1):
            if document not in documents:
                where = f"{args.queries_file}, record {number}"
                raise ValueError(f"{where}: doc = {document!r} is not in {args.documents_file}; add the document")
        asked = {str(number): query for number, (query, _) in enumerate(queries)}
        relevant = {str(number): {document} for number, (_, document) in enumerate(queries)}
        found.append(InformationRetrievalEvaluator(asked, documents, relevant, name="retrieval", **settings))
    return found


def make_loss(args: EmbeddingArguments, model: SentenceTransformer) -> Any:
    """The loss of the flags."""
    if args.score_column_name:
        return SCORED[args.loss or "cosent"](model)
    if args.mini_batch_size:
        return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=args.mini_batch_size)
    return RANKING[args.loss or "multiple_negatives_ranking"](model)


class EmbeddingTrainer(SentenceTransformerTrainer):
    """A Trainer whose models are loaded with the length they were trained with, rather than that of their config."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        file = Path(output_dir or self.args.output_dir, "sentence_bert_config.json")
        write_json(file, {**json.loads(file.read_text("utf-8")), "max_seq_length": self.model.max_seq_length})


def load_pairs(
    args: EmbeddingArguments, model_args: ModelArguments, training: SentenceTransformerTrainingArguments
) -> Dataset | None:
    """The training set, its texts in their order, and then the scores.

    Raises:
        ValueError: for data that cannot be read.
    """
    texts, score = args.text_column_names, args.score_column_name
    data = load_data(args, model_args, training, [*texts, score] if score else texts, validates=False).get("train")
    if data is None:
        return None
    check_texts({"train": data}, texts)
    pairs = data.select_columns(texts)
    if score:
        scores = [value / args.score_scale for value in numbers("train", data[score])]
        pairs = pairs.add_column("score", scores)
    return pairs


def train_encoder(
    model_args: ModelArguments, args: EmbeddingArguments, training: SentenceTransformerTrainingArguments
) -> dict[str, Any]:
    """Train, measure, and return the figures.

    Raises:
        ValueError: for flags, data and models that cannot be used, before anything is written.
    """
    checkpoint = start(training)
    measures = evaluators(args, training.per_device_eval_batch_size)
    if (training.do_eval or training.eval_strategy != "no") and not measures:
        raise ValueError("--do_eval: has nothing to measure; give --sts_file, or --documents_file with --queries_file")
    pairs = load_pairs(args, model_args, training)
    model = load_encoder(model_args, args.max_seq_length)
    check_checkpoint(checkpoint, model.transformers_model)
    trainer = EmbeddingTrainer(
        model, training, train_dataset=pairs, loss=make_loss(args, model), evaluator=measures or None
    )
    return run(trainer, checkpoint)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The recipe with these arguments, or those of the command line."""
    kinds = (ModelArguments, EmbeddingArguments, SentenceTransformerTrainingArguments)
    return launch(train_encoder, kinds, __doc__, arguments)


if __name__ == "__main__":
    main()
