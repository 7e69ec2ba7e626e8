"""Fine-tune a relative or a stock BERT on extractive question answering, and measure exact match and F1 as SQuAD does.

    python scripts/examples/run_qa.py --model_name_or_path bert-relative --train_file train-v1.1.json \\
        --validation_file dev-v1.1.json --do_train --do_eval --output_dir answers
    python scripts/examples/run_qa.py --model_name_or_path bert-relative --dataset_name rajpurkar/squad_v2 \\
        --version_2_with_negative --do_train --do_eval --output_dir answers

Files are SQuAD's JSON, or JSON lines with `id`, `question`, `context` and `answers` ({"text": […], "answer_start":
[…]}), compressed or not. A context longer than --max_seq_length is read in pieces that overlap by --doc_stride tokens;
a relative model may read all of it at once. All flags of `TrainingArguments` apply. The answers are written to
eval_predictions.json, by the questions' ids, and with --do_predict those to --test_file, which may have none itself,
to predict_predictions.json.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from recipes.arguments import ModelArguments, PredictionArguments, check_least, launch, option
from recipes.data import check_suffix, check_texts, load_data, read_file, tokenized
from recipes.models import load_model, load_tokenizer, sequence_length
from recipes.running import OrderedTrainer, check_checkpoint, run, start, trainer_arguments
from torchmetrics.functional.text import squad
from transformers import AutoModelForQuestionAnswering, DataCollatorWithPadding, TrainingArguments

from hf_relpos.data.records import read_lines, text_suffix
from hf_relpos.files import write_json


COLUMNS = ("id", "question", "context")
ANSWERS = "answers"


@dataclass
class AnsweringArguments(PredictionArguments):
    """Data of question answering."""

    doc_stride: int = option("tokens that pieces of a long context have in common", 128)
    max_answer_length: int = option("tokens of an answer at most", 30)
    version_2_with_negative: bool = option("some questions have no answer, as in SQuAD 2.0", False)
    null_score_diff_threshold: float = option("no answer is given if it scores better than the best by so much", 0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("doc_stride", 0), ("max_answer_length", 1)):
            check_least(name, getattr(self, name), least)


def read_questions(path: str, columns: Sequence[str], optional: Sequence[str] = ()) -> Dataset:
    """Questions of SQuAD's JSON, or of JSON lines.

    Args:
        optional: columns that are read where the file has them.

    Raises:
        ValueError: for a file of another kind, or that cannot be read.
    """
    check_suffix(path, (".json", ".jsonl"))
    content = None
    if text_suffix(path) == ".json":
        with suppress(ValueError):  # of several records
            content = json.loads("\n".join(read_lines(path)))
    if not isinstance(content, dict) or "question" in content:
        return read_file(path, columns, optional)
    try:
        return Dataset.from_list(list(_questions(content["data"], answered=ANSWERS in columns)))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not SQuAD's JSON ({type(error).__name__}: {error}); give that or JSON lines"
        ) from error


def _questions(articles: Sequence[Mapping[str, Any]], answered: bool) -> Iterator[dict[str, Any]]:
    for paragraph in (paragraph for article in articles for paragraph in article["paragraphs"]):
        for each in paragraph["qas"]:
            found = each[ANSWERS] if answered else each.get(ANSWERS, [])
            answers = {
                "text": [str(answer["text"]) for answer in found],
                "answer_start": [int(answer["answer_start"]) for answer in found],
            }
            question = {"id": str(each["id"]), "question": each["question"], "context": paragraph["context"]}
            yield {**question, "answers": answers}


def check_answers(split: str, data: Dataset, negatives: bool) -> None:
    """
    Raises:
        ValueError: for answers that are not in the context where they say, and none unless there are `negatives`;
            ids that are not unique.
    """
    seen = set()
    for number, row in enumerate(data, 1):
        where = f"{split} data, record {number}"
        answers = row["answers"]
        if not isinstance(answers, dict) or not {"text", "answer_start"} <= set(answers):
            raise ValueError(f'{where}: answers is not {{"text": […], "answer_start": […]}}; write it so')
        if not answers["text"] and not negatives:
            raise ValueError(f"{where}: has no answer; give --version_2_with_negative")
        for text, begin in zip(answers["text"], answers["answer_start"], strict=True):
            if row["context"][begin : begin + len(text)] != text:
                raise ValueError(
                    f"{where}: the context has no {text[:40]!r} at character {begin}; correct answer_start"
                )
        if row["id"] in seen:
            raise ValueError(f"{where}: id {row['id']!r} was there before; make the ids unique")
        seen.add(row["id"])


def tokenize(tokenizer: Any, batch: Mapping[str, list[Any]], length: int, stride: int) -> dict[str, list[Any]]:
    """Pieces of the contexts, each after its question, with the tokens at which the first answer starts and ends.

    A piece without the answer has both at [CLS]. `offset_mapping` holds the characters of the context's tokens, and
    [-1, -1] at all others.
    """
    encoded = tokenizer(
        [question.strip() for question in batch["question"]],
        batch["context"],
        truncation="only_second",
        max_length=length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    found: dict[str, list[Any]] = {"example_id": [], "start_positions": [], "end_positions": []}
    for row, example in enumerate(encoded.pop("overflow_to_sample_mapping")):
        in_context = [part == 1 for part in encoded.sequence_ids(row)]
        offsets = [
            list(offset) if inside else [-1, -1]
            for offset, inside in zip(encoded["offset_mapping"][row], in_context, strict=True)
        ]
        encoded["offset_mapping"][row] = offsets
        start = end = 0
        answers = batch["answers"][example]
        if answers["text"]:
            first = answers["answer_start"][0]
            last = first + len(answers["text"][0])
            starts = [token for token, (begin, stop) in enumerate(offsets) if begin <= first < stop]
            ends = [token for token, (begin, stop) in enumerate(offsets) if begin < last <= stop]
            if starts and ends:
                start, end = starts[0], ends[-1]
        found["example_id"].append(batch["id"][example])
        found["start_positions"].append(start)
        found["end_positions"].append(end)
    return {**encoded, **found}


def best_span(
    start: np.ndarray, end: np.ndarray, in_context: np.ndarray, longest: int
) -> tuple[float, tuple[int, int]]:
    """The span of context tokens with the greatest sum of logits, start (L,) and end (L,), and that sum.

    Args:
        in_context: (L,) bool.
        longest: tokens at most.
    """
    scores = start[:, None] + end[None, :]
    allowed = np.triu(np.ones_like(scores, dtype=bool)) & ~np.triu(np.ones_like(scores, dtype=bool), longest)
    scores = np.where(allowed & in_context[:, None] & in_context[None, :], scores, -np.inf)
    first, last = np.unravel_index(scores.argmax(), scores.shape)
    return float(scores[first, last]), (int(first), int(last))


def answers_of(
    logits: tuple[np.ndarray, np.ndarray], features: Dataset, examples: Dataset, args: AnsweringArguments
) -> dict[str, str]:
    """The answer to each question, by its id: the best span of all pieces of its context.

    Args:
        logits: of start and end, (pieces, L) each, padded.
        features: the pieces, in the same order.
    """
    contexts = dict(zip(examples["id"], examples["context"], strict=True))
    best: dict[str, tuple[float, str]] = defaultdict(lambda: (-np.inf, ""))
    null: dict[str, float] = defaultdict(lambda: np.inf)
    pieces = zip(*logits, features["offset_mapping"], features["example_id"], strict=True)
    for starts, ends, offsets, example in pieces:
        starts, ends, characters = starts[: len(offsets)], ends[: len(offsets)], np.array(offsets)
        score, (first, last) = best_span(starts, ends, characters[:, 0] >= 0, args.max_answer_length)
        null[example] = min(null[example], float(starts[0] + ends[0]))
        if score > best[example][0]:
            best[example] = score, contexts[example][characters[first, 0] : characters[last, 1]]
    if args.version_2_with_negative:
        threshold = args.null_score_diff_threshold
        return {name: "" if null[name] - score > threshold else text for name, (score, text) in best.items()}
    return {name: text for name, (_, text) in best.items()}


def squad_scores(answers: Mapping[str, str], examples: Dataset) -> dict[str, float]:
    """Exact match and F1 of words in percent, by torchmetrics; the right answer to a question without one is none."""
    targets = [
        {"id": name, "answers": {"text": truth["text"] or [""], "answer_start": truth["answer_start"] or [0]}}
        for name, truth in zip(examples["id"], examples["answers"], strict=True)
    ]
    found = [{"id": name, "prediction_text": text} for name, text in answers.items()]
    return {name: float(value) for name, value in squad(found, targets).items()}


class AnsweringTrainer(OrderedTrainer):
    """A Trainer that measures answers rather than single tokens."""

    examples: Dataset
    answering: AnsweringArguments

    def answer(
        self, features: Dataset, examples: Dataset, prefix: str, ignore_keys: list[str] | None = None
    ) -> dict[str, float]:
        """Write the answers by the questions' ids, and measure them as if the right ones were known.

        Args:
            features: the pieces of the examples.
        """
        output = self.predict(features, ignore_keys, prefix)
        answers = answers_of(output.predictions[:2], features, examples, self.answering)
        if self.is_world_process_zero():
            write_json(Path(self.args.output_dir, f"{prefix}_predictions.json"), answers)
        scores = {f"{prefix}_{name}": value for name, value in squad_scores(answers, examples).items()}
        return scores | output.metrics

    def evaluate(
        self, eval_dataset: Dataset | None = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        features = self.eval_dataset if eval_dataset is None else eval_dataset
        metrics = self.answer(features, self.examples, metric_key_prefix, ignore_keys)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def finetune(model_args: ModelArguments, args: AnsweringArguments, training: TrainingArguments) -> dict[str, Any]:
    """Train, measure, and return the figures.

    Raises:
        ValueError: for flags, data and models that cannot be used, before anything is written.
    """
    checkpoint = start(training, predicts=True)
    tokenizer = load_tokenizer(model_args)
    sets = load_data(args, model_args, training, COLUMNS, [ANSWERS], read_questions)
    check_texts(sets, ("question", "context"))
    if "test" in sets and ANSWERS not in sets["test"].column_names:
        sets["test"] = sets["test"].add_column(ANSWERS, [{"text": [], "answer_start": []}] * len(sets["test"]))
    for split, data in sets.items():
        check_answers(split, data, args.version_2_with_negative or split == "test")
    model = load_model(AutoModelForQuestionAnswering, model_args, tokenizer, training.do_train)
    check_checkpoint(checkpoint, model)
    length = sequence_length(args.max_seq_length, model, 384)
    questions = [question for data in sets.values() for question in data["question"]]
    longest = max(map(len, tokenizer(questions, add_special_tokens=False)["input_ids"]))
    if longest + tokenizer.num_special_tokens_to_add(pair=True) + args.doc_stride >= length:
        raise ValueError(
            f"--max_seq_length {length}: no room for {longest} tokens of a question and --doc_stride; give more"
        )
    features = tokenized(sets, lambda batch: tokenize(tokenizer, batch, length, args.doc_stride), args, training)
    trainer = AnsweringTrainer(
        **trainer_arguments(model, training, features, tokenizer, DataCollatorWithPadding(tokenizer))
    )
    trainer.examples, trainer.answering = sets.get("validation"), args

    def predict() -> dict[str, float]:
        metrics = trainer.answer(features["test"], sets["test"], "predict")
        if any(answers["text"] for answers in sets["test"][ANSWERS]):
            return metrics
        unknown = ("loss", "f1", "exact_match")
        return {name: value for name, value in metrics.items() if name.removeprefix("predict_") not in unknown}

    return run(trainer, checkpoint, predict)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The recipe with these arguments, or those of the command line."""
    return launch(finetune, (ModelArguments, AnsweringArguments, TrainingArguments), __doc__, arguments)


if __name__ == "__main__":
    main()
