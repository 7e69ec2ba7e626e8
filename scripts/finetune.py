"""Fine-tune a relative or a stock BERT on a task and measure it: classification of texts or pairs, named entities.

    python scripts/finetune.py classification MODEL --train train.tsv --dev dev.tsv --columns label,text
    python scripts/finetune.py classification MODEL --train train.tsv.xz --dev dev.tsv --columns label,one,other
    python scripts/finetune.py ner MODEL --train train.conll --dev dev.conll --json results.json

Classification reads tab-separated files or JSON lines, packed (.xz, .gz) or not; `--columns` names the label and one
or two texts. Named entities come in CoNLL files: one token per line with its IOB2 tag last, a blank line between
sentences. Printed, and written by `--json`: accuracy, or precision, recall and F1 of entities on the development file,
which is measured once, at the end. MODEL is a folder or a Hub repository.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_relpos import patch_transformers
from hf_relpos.data.conll import read_conll, tag_names
from hf_relpos.data.records import read_records
from hf_relpos.evaluation.loading import load_tokenizer
from hf_relpos.files import write_json


IGNORE = -100


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """(type, first token, one past the last) of the entities in a sentence.

    B- begins one, I- goes on with it. I- after O or after another type begins one too, as in the CoNLL-2000 scorer.
    """
    found, start, kind = set(), None, None
    for place, tag in enumerate([*tags, "O"]):
        mark, _, own = tag.partition("-")
        if start is not None and (mark != "I" or own != kind):
            found.add((kind, start, place))
            start = None
        if start is None and mark in ("B", "I"):
            start, kind = place, own
    return found


def entity_scores(truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Precision, recall and F1 of entities, exact in type and both ends, in percent; 0 where nothing was found."""
    right = wanted = given = 0
    for one, other in zip(truth, predicted, strict=True):
        gold, guess = entities(one), entities(other)
        right, wanted, given = right + len(gold & guess), wanted + len(gold), given + len(guess)
    precision, recall = right / max(given, 1), right / max(wanted, 1)
    f1 = 2 * right / max(wanted + given, 1)
    return {"precision": 100 * precision, "recall": 100 * recall, "f1": 100 * f1, "entities": wanted}


class Rows(torch.utils.data.Dataset):
    """A list of examples as the Trainer takes them."""

    def __init__(self, rows: list[dict]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return self.rows[index]


def check_labels(names: list[str], used: Sequence[str], path: Path) -> None:
    """
    Raises:
        ValueError: for a label that the training file does not have.
    """
    strange = sorted(set(used) - set(names))
    if strange:
        raise ValueError(f"{path}: label {strange[0]!r} is not in the training file, which has {', '.join(names[:8])}")


def classification(args, tokenizer):
    """Examples, label names, head, collator and measure for texts or pairs with a label."""
    columns = args.columns.split(",")
    if len(columns) not in (2, 3):
        raise ValueError(f"--columns {args.columns}: name the label and one or two texts")
    files = [read_records(path, columns)[: args.limit] for path in (args.train, args.dev)]
    labels = [[str(record[columns[0]]) for record in records] for records in files]
    names = sorted(set(labels[0]))
    check_labels(names, labels[1], args.dev)
    number = {name: n for n, name in enumerate(names)}
    sets = []
    for records, own in zip(files, labels, strict=True):
        texts = [[str(record[column]) for record in records] for column in columns[1:]]
        ids = tokenizer(*texts, truncation=True, max_length=args.max_length)
        sets.append(
            Rows([{**{key: ids[key][n] for key in ids}, "labels": number[label]} for n, label in enumerate(own)])
        )

    def measure(predicted):
        right = [int(guess == row["labels"]) for guess, row in zip(predicted, sets[1].rows, strict=True)]
        return {"accuracy": 100 * sum(right) / len(right), "examples": len(right)}

    return *sets, names, AutoModelForSequenceClassification, DataCollatorWithPadding(tokenizer), measure


def ner(args, tokenizer):
    """Examples, tag names, head, collator and measure for named entities; a word's tag is at its first token."""
    files = [read_conll(path)[: args.limit] for path in (args.train, args.dev)]
    names = tag_names(files[0])
    check_labels(names, [tag for _, tags in files[1] for tag in tags], args.dev)
    number = {name: n for n, name in enumerate(names)}
    sets, places = [], []
    for sentences in files:
        rows = []
        for words, tags in sentences:
            ids = tokenizer(words, is_split_into_words=True, truncation=True, max_length=args.max_length)
            of_token = ids.word_ids()
            first = {word: at for at, word in reversed(list(enumerate(of_token))) if word is not None}
            labels = [IGNORE] * len(of_token)
            for word, at in first.items():
                labels[at] = number[tags[word]]
            rows.append({**ids, "labels": labels})
            places.append(first)
        sets.append(Rows(rows))
    places = places[len(files[0]) :]

    def measure(predicted):
        guesses = [
            # a word that was cut off has no prediction
            [names[guess[first[word]]] if word in first else "O" for word in range(len(words))]
            for guess, first, (words, _) in zip(predicted, places, files[1], strict=True)
        ]
        return entity_scores([tags for _, tags in files[1]], guesses)

    return *sets, names, AutoModelForTokenClassification, DataCollatorForTokenClassification(tokenizer), measure


def finetune(args: argparse.Namespace) -> dict:
    """Train, measure, and return the figures.

    Raises:
        ValueError: for files that cannot be read, and a folder to save to that exists.
    """
    if args.save and args.save.exists():
        raise ValueError(f"--save {args.save} exists; choose another folder")
    set_seed(args.seed)
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    train, dev, names, auto, collator, measure = {"classification": classification, "ner": ner}[args.task](
        args, tokenizer
    )
    numbers = {name: n for n, name in enumerate(names)}
    with patch_transformers():  # for relative BERTs of Transformers ≤ 4.57
        model = auto.from_pretrained(args.model, id2label=dict(enumerate(names)), label2id=numbers)
    # written aside, and renamed when it is whole
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
            train_dataset=train,
            eval_dataset=dev,
            data_collator=collator,
            processing_class=tokenizer,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        )
        trainer.train()
        predicted = trainer.predict(dev).predictions
        found = {
            "model": args.model,
            "task": args.task,
            "train": str(args.train),
            "dev": str(args.dev),
            "seed": args.seed,
            "steps": trainer.state.global_step,
            **measure(predicted.tolist()),
        }
        if args.save:
            trainer.save_model(f"{folder}/model")
            Path(folder, "model").rename(args.save)
        return found


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
        found = finetune(args)
    except ValueError as error:
        sys.exit(f"Error: {error}")
    print(json.dumps(found, indent=1))
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
