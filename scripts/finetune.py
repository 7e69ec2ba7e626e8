"""Fine-tune a relative or a stock BERT on a task and measure it: classification of texts or pairs, named entities.

    python scripts/finetune.py classification MODEL --train train.tsv --dev dev.tsv --columns label,text
    python scripts/finetune.py classification MODEL --train train.tsv.xz --dev dev.tsv --columns label,one,other
    python scripts/finetune.py ner MODEL --train train.conll --dev dev.conll --json results.json

Classification reads tab-separated files or JSON lines, compressed (.xz, .gz) or not; `--columns` names the label and
one or two texts. Named entities come in CoNLL files: one token per line with its IOB2 tag last, a blank line between
sentences; they need the extra `ner`. Printed, and written by `--json`: accuracy, or precision, recall and F1 of
entities (seqeval) on the development file, measured once, at the end. MODEL is a folder or a Hub repository.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_relpos import patch_transformers
from hf_relpos.data.conll import read_conll, tag_names
from hf_relpos.data.masking import IGNORE_INDEX
from hf_relpos.data.records import read_records
from hf_relpos.evaluation.loading import load_tokenizer
from hf_relpos.files import write_json


class Task(NamedTuple):
    """Examples of a task, and what depends on the task.

    Attributes:
        train: examples, as the Trainer takes them.
        dev: likewise.
        names: of the labels.
        auto: class of the model.
        collator: pads.
        measure: figures of the predictions for `dev`.
    """

    train: list[dict[str, Any]]
    dev: list[dict[str, Any]]
    names: list[str]
    auto: type
    collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]
    measure: Callable[[list[Any]], dict[str, float]]


def check_labels(names: Sequence[str], labels: Sequence[str], path: Path) -> None:
    """
    Raises:
        ValueError: for a label that the training file does not have.
    """
    unknown = sorted(set(labels) - set(names))
    if unknown:
        raise ValueError(f"{path}: label {unknown[0]!r} is not in the training file, which has {', '.join(names[:8])}")


def classification(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Task:
    """Texts or pairs of texts with a label."""
    columns = args.columns.split(",")
    if len(columns) not in (2, 3):
        raise ValueError(f"--columns {args.columns}: name the label and one or two texts")
    files = [read_records(path, columns)[: args.limit] for path in (args.train, args.dev)]
    labels = [[str(record[columns[0]]) for record in records] for records in files]
    names = sorted(set(labels[0]))
    check_labels(names, labels[1], args.dev)
    index = {name: n for n, name in enumerate(names)}
    train, dev = [], []
    for records, file_labels, examples in zip(files, labels, (train, dev), strict=True):
        texts = [[str(record[column]) for record in records] for column in columns[1:]]
        ids = tokenizer(*texts, truncation=True, max_length=args.max_length)
        examples += [
            {**{key: ids[key][n] for key in ids}, "labels": index[label]} for n, label in enumerate(file_labels)
        ]

    def measure(predicted: list[int]) -> dict[str, float]:
        correct = sum(label == example["labels"] for label, example in zip(predicted, dev, strict=True))
        return {"accuracy": 100 * correct / len(dev), "examples": len(dev)}

    return Task(train, dev, names, AutoModelForSequenceClassification, DataCollatorWithPadding(tokenizer), measure)


def ner(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Task:
    """Named entities; the tag of a word is the label of its first token.

    Raises:
        ValueError: for files that cannot be read, and without the extra `ner`.
    """
    try:
        from tagging.scores import count_entities, entity_scores
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}; install the extra `ner`: pip install 'hf-relpos[ner]'") from None

    files = [read_conll(path)[: args.limit] for path in (args.train, args.dev)]
    names = tag_names(files[0])
    check_labels(names, [tag for _, tags in files[1] for tag in tags], args.dev)
    index = {name: n for n, name in enumerate(names)}
    train, dev = [], []
    first_tokens: list[dict[int, int]] = []  # of the words in each development sentence
    for sentences, examples in zip(files, (train, dev), strict=True):
        for words, tags in sentences:
            ids = tokenizer(words, is_split_into_words=True, truncation=True, max_length=args.max_length)
            word_ids = ids.word_ids()
            first = {word: token for token, word in reversed(list(enumerate(word_ids))) if word is not None}
            labels = [IGNORE_INDEX] * len(word_ids)
            for word, token in first.items():
                labels[token] = index[tags[word]]
            examples.append({**ids, "labels": labels})
            if examples is dev:
                first_tokens.append(first)

    def measure(predicted: list[list[int]]) -> dict[str, float]:
        truth = [tags for _, tags in files[1]]
        tags = [
            # a word beyond max_length has no prediction
            [names[labels[first[word]]] if word in first else "O" for word in range(len(words))]
            for labels, first, (words, _) in zip(predicted, first_tokens, files[1], strict=True)
        ]
        return {**entity_scores(truth, tags), "entities": count_entities(truth)}

    collator = DataCollatorForTokenClassification(tokenizer)
    return Task(train, dev, names, AutoModelForTokenClassification, collator, measure)


def finetune(args: argparse.Namespace) -> dict[str, Any]:
    """Train, measure, and return the figures.

    Raises:
        ValueError: for files that cannot be read, and a folder to save to that exists.
    """
    if args.save and args.save.exists():
        raise ValueError(f"--save {args.save} exists; choose another folder")
    set_seed(args.seed)
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    task = {"classification": classification, "ner": ner}[args.task](args, tokenizer)
    labels = {name: index for index, name in enumerate(task.names)}
    with patch_transformers():  # for relative BERTs of Transformers ≤ 4.57
        model = task.auto.from_pretrained(args.model, id2label=dict(enumerate(task.names)), label2id=labels)
    # --save is written to a temporary folder beside it, and renamed when it is complete
    with tempfile.TemporaryDirectory(dir=args.save and args.save.absolute().parent) as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch,
            per_device_eval_batch_size=2 * args.batch,
            learning_rate=args.lr,
            warmup_steps=args.warmup,
            weight_decay=0.01,
            save_strategy="no",
            logging_steps=50,
            report_to="none",
            dataloader_pin_memory=False,
            seed=args.seed,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=task.train,
            eval_dataset=task.dev,
            data_collator=task.collator,
            processing_class=tokenizer,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        )
        trainer.train()
        predicted = trainer.predict(task.dev).predictions
        figures = {
            "model": args.model,
            "task": args.task,
            "train": str(args.train),
            "dev": str(args.dev),
            "seed": args.seed,
            "steps": trainer.state.global_step,
            **task.measure(predicted.tolist()),
        }
        if args.save:
            trainer.save_model(f"{folder}/model")
            Path(folder, "model").rename(args.save)
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("classification", "ner"))
    parser.add_argument("model", help="folder or Hub repository")
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--dev", type=Path, required=True)
    parser.add_argument("--columns", default="label,text", help="of classification: the label and one or two texts")
    parser.add_argument("--tokenizer", help="where the tokenizer is, if not beside the model")
    parser.add_argument("--max-length", type=int, default=128, help="tokens read of a text")
    parser.add_argument("--limit", type=int, help="examples at most, the first ones of each file")
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=-1, help="training steps; overrules --epochs")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--warmup", type=int, default=50, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="folder for the fine-tuned model")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    try:
        figures = finetune(args)
    except ValueError as error:
        sys.exit(f"Error: {error}")
    print(json.dumps(figures, indent=1))
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
