"""Classify documents that are longer than a segment, in several ways of reading them, at the same budget.

    python scripts/classify_documents.py --name reviews --train reviews.train.jsonl.xz --dev reviews.dev.jsonl.xz \\
        --source sentence-transformers/all-MiniLM-L6-v2 --calibration-text novels.txt wikidocs.docs.jsonl
    python scripts/classify_documents.py … --converted FOLDER --converted-long FOLDER    # conversions made before
    python scripts/classify_documents.py … --readers truncate-512 long-4096 --train-layers all --rows 8

Documents are records of a label and a text, `--columns label,text` by default: JSON lines, tab- or comma-separated,
packed or not. `--source` is a BERT with absolute positions. A reader is a way of reading and a number of tokens:

    truncate-N    the source, the first N tokens
    tail-N        the source, the last N tokens
    chunks-N      the source, pieces of N tokens, each by itself
    segments-N    the converted model, the same pieces, each by itself
    memory-N      the converted model, the same pieces, with a memory of N tokens from piece to piece
    long-N        the model converted for long rows, the first N tokens at once, with `--window`

Every piece has [CLS] and [SEP], which N counts. A document is the mean of all its token states, on which stands one
and the same head: dropout, dense, tanh, dropout, dense. Embeddings and lower layers are frozen, as many as
`--train-layers` leaves (0 trains the head alone, `all` freezes nothing); their states are computed once for each
document and kept in `--work`, which changes nothing but the time. Gradients flow within a piece, never into a memory.

Conversions are made by `--method calibrate` on `--calibration-text`, or taken from folders that were made before.
Measured once, at the end of training, on `--dev`, or on `--held-out` documents of the training file, where settings
are to be chosen. OUT/results.json and OUT/README.md are written after every run; a run that is in the JSON already is
not repeated, and a data set that is there with other settings is refused unless `--again`. What stands below the line
`<!-- notes -->` of README.md is left as it is.
"""

import argparse
import copy
import hashlib
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from benchmarking import ask, environment, markdown_table, peak_mb
from experiments import (
    QUIETLY,
    add_options,
    by_arm,
    circumstances,
    command,
    count,
    fingerprint,
    natural,
    save,
    settings_of,
    share,
    spread,
    stored_in,
)
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments, logging, set_seed
from transformers.modeling_outputs import BaseModelOutput

from hf_relpos import convert
from hf_relpos.data.records import read_records
from hf_relpos.data.windows import special_tokens
from hf_relpos.evaluation.inspection import model_max_length
from hf_relpos.evaluation.loading import load_model, load_tokenizer
from hf_relpos.evaluation.statistics import paired_bootstrap


SHARD = 25  # documents whose states are kept in one file: what an interruption loses
LONGER = 512  # tokens of a document that counts as long
SOURCE, CONVERTED, LONG = "source", "converted", "converted_long"
# Which model reads, and how.
KINDS = {
    "truncate": (SOURCE, "the first {n} tokens"),
    "tail": (SOURCE, "the last {n} tokens"),
    "chunks": (SOURCE, "pieces of {n}, each by itself"),
    "segments": (CONVERTED, "pieces of {n}, each by itself"),
    "memory": (CONVERTED, "pieces of {n}, memory of {n}"),
    "long": (LONG, "{n} tokens at once"),
}
MODELS = {SOURCE: "source", CONVERTED: "converted", LONG: "converted for long rows"}
READERS = ["truncate-512", "chunks-512", "chunks-256", "segments-256", "memory-256", "long-2048"]
# Kinds to compare, with the same N where there are such, and what the difference tells.
CLAIMS = [
    ("chunks", "truncate", "what the rest of the document tells"),
    ("segments", "chunks", "what the conversion does"),
    ("memory", "segments", "what the memory does"),
    ("memory", "chunks", "memory, against the source in pieces"),
    ("long", "chunks", "all at once, against the source in pieces"),
    ("memory", "truncate", "memory, against truncation"),
    ("long", "truncate", "all at once, against truncation"),
]


# Documents ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """A way of reading, and the tokens that it reads at once."""

    kind: str
    length: int

    @classmethod
    def of(cls, name: str) -> "Reader":
        """
        Raises:
            ValueError: for a name that is none.
        """
        kind, _, length = name.rpartition("-")
        if kind not in KINDS or not re.fullmatch(r"[1-9]\d*", length):
            raise ValueError(f"{name!r} is no reader; give one of {', '.join(KINDS)} and its tokens, as in memory-256")
        return cls(kind, int(length))

    def __str__(self) -> str:
        return f"{self.kind}-{self.length}"

    @property
    def model(self) -> str:
        """Which model reads: a key of MODELS."""
        return KINDS[self.kind][0]

    @property
    def memory(self) -> int:
        """Tokens of its memory."""
        return self.length if self.kind == "memory" else 0

    def cut(self, ids: Sequence[int], before: Sequence[int], after: Sequence[int]) -> list[list[int]]:
        """The pieces of a document, in their order.

        Args:
            ids: its tokens, without special ones.
            before: special tokens that begin every piece.
            after: those that end it.
        """
        room = self.length - len(before) - len(after)
        if self.kind in ("truncate", "long"):
            ids = ids[:room]
        elif self.kind == "tail":
            ids = ids[-room:]
        return [[*before, *ids[at : at + room], *after] for at in range(0, len(ids), room)]


@dataclass
class Documents:
    """Tokens, without special ones, and the number of the label of each."""

    ids: list[list[int]]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.ids)


def read_documents(path: Path, columns: Sequence[str]) -> list[tuple[int, str, str]]:
    """(number from 1 on, label, text) of every record.

    Raises:
        ValueError: for a file without records or with one that has no label or no text.
    """
    found = []
    for number, record in enumerate(read_records(path, columns), 1):
        label, text = (record[column] for column in columns)
        if label is None or not str(label).strip():
            raise ValueError(f"{path}: document {number} has no {columns[0]!r}; label it, or leave it out")
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{path}: document {number} is empty: {columns[1]!r} = {text!r}; leave it out")
        found.append((number, str(label), text))
    return found


def to_tokens(path: Path, records: Sequence[tuple[int, str, str]], names: Sequence[str], tokenizer) -> Documents:
    """
    Raises:
        ValueError: for a label that is none of `names`, and a text of which the tokenizer leaves nothing.
    """
    number = {name: n for n, name in enumerate(names)}
    for at, label, _ in records:
        if label not in number:
            known = ", ".join(names[:8])
            raise ValueError(f"{path}: document {at} has the label {label!r}; the training documents have {known}")
    ids = tokenizer([text for *_, text in records], add_special_tokens=False, verbose=False)["input_ids"]
    for (at, *_), row in zip(records, ids, strict=True):
        if not row:
            raise ValueError(f"{path}: document {at} is empty: the tokenizer finds no token in it; leave it out")
    return Documents(ids, [number[label] for _, label, _ in records])


class Task:
    """Both sets of documents, their labels and the tokenizer.

    Raises:
        ValueError: for files that cannot be read, hold empty documents, or too few.
    """

    def __init__(self, args: argparse.Namespace):
        self.tokenizer = load_tokenizer(args.source)
        self.special = special_tokens(self.tokenizer)
        columns = args.columns.split(",")
        if len(columns) != 2 or not all(columns):
            raise ValueError(f"--columns {args.columns}: name the label and the text, with a comma between them")
        records = read_documents(args.train, columns)
        random.Random(0).shuffle(records)  # files are often sorted by label
        held = args.held_out or 0
        wanted = args.train_documents or len(records) - held
        if wanted < 1 or wanted + held > len(records):
            raise ValueError(
                f"--train-documents {wanted} and --held-out {held}: {args.train} has {len(records)} documents; ask "
                "for fewer"
            )
        train, rest = records[:wanted], records[len(records) - held :]
        if args.held_out:
            path, dev = args.train, rest
        else:
            path, dev = args.dev, read_documents(args.dev, columns)[: args.dev_documents]
        self.names = sorted({label for _, label, _ in train})
        if len(self.names) < 2:
            raise ValueError(
                f"{args.train}: all {len(train)} training documents have the label {self.names[0]!r}; give some with "
                "another"
            )
        self.train = to_tokens(args.train, train, self.names, self.tokenizer)
        self.dev = to_tokens(path, dev, self.names, self.tokenizer)

    def pieces(self, reader: Reader, ids: Sequence[int]) -> list[list[int]]:
        return reader.cut(ids, *self.special)


# Models -------------------------------------------------------------------------------------------------------------


class Through(nn.Module):
    """In place of the embeddings: what is given are states already."""

    def forward(self, inputs_embeds: torch.Tensor, **_) -> torch.Tensor:
        return inputs_embeds


class Nothing(nn.Module):
    """In place of an encoder all of which is frozen: what is given are its outputs already."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, inputs_embeds: torch.Tensor, **_) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=inputs_embeds)


def halves(model: PreTrainedModel, below: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The embeddings with the first layers, and the other layers, which take states as `inputs_embeds`."""
    lower, upper = copy.deepcopy(model), copy.deepcopy(model)
    lower.encoder.layer, upper.encoder.layer = lower.encoder.layer[:below], upper.encoder.layer[below:]
    upper.embeddings = Through()
    if not below and hasattr(lower.config, "memory_length"):
        lower.config.memory_length = 0  # without layers it has nothing to remember
    for half in (lower, upper):
        half.config.num_hidden_layers = len(half.encoder.layer)
        for number, layer in enumerate(half.encoder.layer):
            layer.attention.self.layer_idx = number  # by which it finds its part of the memory
    return lower, upper


def split(model: PreTrainedModel, train_layers: int | str) -> tuple[PreTrainedModel | None, nn.Module]:
    """What is frozen of a model, if anything, and what is trained."""
    if train_layers == "all":
        return None, model
    if train_layers == 0:
        config = copy.deepcopy(model.config)
        config.memory_length = 0
        return model, Nothing(config)
    return halves(model, len(model.encoder.layer) - train_layers)


def load_reader(reader: Reader, folder: str | Path, flag: str, least: int, window: int = 0) -> PreTrainedModel:
    """The model of a reader, without pooler, told how much to remember.

    Args:
        flag: the option that names the folder.
        least: special tokens of a piece.
        window: attention_window of a model for long rows that has none; 0 for none.

    Raises:
        ValueError: for a model that is not there or not like BERT, cannot read as many tokens, or cannot remember.
    """
    model = load_model(folder, masked=False).base_model
    if not hasattr(model, "encoder") or not hasattr(model.encoder, "layer"):
        raise ValueError(f"{flag} {folder}: a {type(model).__name__} has no encoder.layer as BERT has; give a BERT")
    model.pooler = None
    if reader.length <= least:
        raise ValueError(f"--readers {reader}: {least} of its tokens are special ones; give a larger number")
    limit = model_max_length(model)
    if limit is not None and reader.length > limit:
        raise ValueError(
            f"--readers {reader}: {flag} {folder} reads {limit} tokens at most; give {reader.kind}-{limit}, or read "
            "with a model that is converted to relative positions"
        )
    if reader.memory:
        if not hasattr(model.config, "memory_length"):
            raise ValueError(
                f"--readers {reader}: {flag} {folder} is a stock {type(model).__name__} without a memory; give the "
                "folder of a conversion"
            )
        model.config.memory_length = reader.memory
        try:
            model.config.validate_memory()
        except ValueError as error:
            raise ValueError(f"--readers {reader}: {flag} {folder}: {error}") from None
    elif hasattr(model.config, "memory_length"):
        model.config.memory_length = 0
        if reader.model == LONG and window and model.config.attention_window is None:
            model.config.attention_window = window
    return model


class DocumentClassifier(nn.Module):
    """An encoder that reads a document piece by piece, the mean of all token states, and a head."""

    def __init__(self, encoder: PreTrainedModel, labels: int, dropout: float):
        super().__init__()
        self.encoder = encoder
        self.remembers = bool(getattr(encoder.config, "memory_length", 0))
        size = encoder.config.hidden_size
        self.head = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(size, size), nn.Tanh(), nn.Dropout(dropout), nn.Linear(size, labels)
        )

    def forward(self, labels: torch.Tensor, order: torch.Tensor, steps: list[dict]) -> dict[str, torch.Tensor]:
        """Loss and logits (B, labels).

        Args:
            labels: (B,).
            order: (B,), row of each document in the steps.
            steps: the pieces, documents with more of them first: `input_ids` (R, L) or `inputs_embeds` (R, L, D),
                and `attention_mask` (R, L) where some are shorter. R falls as documents end.
        """
        total, count, memory = 0.0, 0, None
        for step in steps:
            more = {}
            rows = next(iter(step.values())).shape[0]
            if memory is not None:
                more["memory"] = memory if len(memory.mask) == rows else memory.select(torch.arange(rows))
            outputs = self.encoder(**step, **more)
            memory = outputs.memory if self.remembers else None
            states, mask = outputs.last_hidden_state, step.get("attention_mask")
            mask = states.new_ones(states.shape[:2]) if mask is None else mask.to(states.dtype)
            missing = len(labels) - rows
            total = total + nn.functional.pad((states * mask[..., None]).sum(1), (0, 0, 0, missing))
            count = count + nn.functional.pad(mask.sum(1), (0, missing))
        logits = self.head(total / count[:, None])[order]
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Pieces(torch.utils.data.Dataset):
    """Documents as the Trainer takes them: pieces of token ids (L,), or of states (L, D)."""

    def __init__(self, pieces: list[list[torch.Tensor]], labels: list[int]):
        self.pieces, self.labels = pieces, labels

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict:
        # `input_ids` is what the Trainer takes lengths from
        return {
            "input_ids": range(sum(map(len, self.pieces[index]))),
            "pieces": self.pieces[index],
            "label": self.labels[index],
        }


def collate(documents: list[dict]) -> dict:
    """The arguments of a DocumentClassifier."""
    order = sorted(range(len(documents)), key=lambda number: -len(documents[number]["pieces"]))
    rows = [documents[number]["pieces"] for number in order]
    steps = []
    for at in range(len(rows[0])):
        pieces = [row[at] for row in rows if len(row) > at]
        key = "inputs_embeds" if pieces[0].is_floating_point() else "input_ids"
        step = {key: pad_sequence(pieces, batch_first=True)}
        if len({len(piece) for piece in pieces}) > 1:
            ones = [torch.ones(len(piece), dtype=torch.long) for piece in pieces]
            step["attention_mask"] = pad_sequence(ones, batch_first=True)
        steps.append(step)
    return {
        "labels": torch.tensor([document["label"] for document in documents]),
        "order": torch.tensor(order).argsort(),
        "steps": steps,
    }


# Runs ---------------------------------------------------------------------------------------------------------------


def digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


@torch.no_grad()
def lower_states(lower: PreTrainedModel, pieces: list[list[int]]) -> tuple[list[torch.Tensor], list[float]]:
    """States (L, D) of each piece of a document, and the CPU seconds that it took."""
    memory, states, seconds = None, [], []
    remembers = bool(getattr(lower.config, "memory_length", 0))
    for piece in pieces:
        began = time.thread_time()
        outputs = lower(torch.tensor([piece]), **({} if memory is None else {"memory": memory}))
        memory = outputs.memory if remembers else None
        states.append(outputs.last_hidden_state[0])
        seconds.append(time.thread_time() - began)
    return states, seconds


def frozen_states(
    lower: PreTrainedModel, kept_at: Path, rows: list[list[list[int]]]
) -> tuple[list[list[torch.Tensor]], list[list[float]]]:
    """`lower_states` of all documents, kept in a file."""
    if not kept_at.is_file():
        found = [lower_states(lower, pieces) for pieces in rows]
        tensors = {
            "states": torch.cat([state for states, _ in found for state in states]),
            "seconds": torch.tensor([second for _, seconds in found for second in seconds]),
        }
        kept_at.parent.mkdir(parents=True, exist_ok=True)
        aside = kept_at.with_name(kept_at.name + ".tmp")
        save_file(tensors, aside)
        aside.replace(kept_at)
    tensors = load_file(kept_at)
    states = tensors["states"].split([len(piece) for pieces in rows for piece in pieces])
    counts = [len(pieces) for pieces in rows]
    ends = np.cumsum(counts).tolist()
    return (
        [list(states[end - count : end]) for count, end in zip(counts, ends, strict=True)],
        [seconds.tolist() for seconds in tensors["seconds"].split(counts)],
    )


class Workshop:
    """Models by reader, and the states that they have below the layers that are trained."""

    def __init__(self, args: argparse.Namespace, task: Task):
        """
        Raises:
            ValueError: for a reader that its model cannot serve.
        """
        self.args, self.task = args, task
        # all that can be wrong is, before anything is computed
        needs = {reader.model for reader in args.readers}
        if needs - {SOURCE} and not args.converted and not args.calibration_text:
            reader = next(reader for reader in args.readers if reader.model != SOURCE)
            raise ValueError(
                f"--readers {reader}: give --calibration-text to convert {args.source} on, or --converted FOLDER"
            )
        for text in args.calibration_text or []:
            if not text.exists():
                raise ValueError(f"--calibration-text {text}: no such file; check the path")
        for reader in args.readers:
            if self.folder(reader) is not None:
                model = self.load(reader)
                if args.train_layers != "all" and args.train_layers > len(model.encoder.layer):
                    raise ValueError(
                        f"--train-layers {args.train_layers}: {self.folder(reader)} has {len(model.encoder.layer)} "
                        "layers; give fewer, or all"
                    )

    def options(self, model: str) -> dict:
        """`method_options` of the conversion for pieces, or of that for long rows."""
        options = {"tokens": self.args.calibration_tokens}
        if model == LONG:
            options["length"] = max(reader.length for reader in self.args.readers if reader.model == LONG)
            if self.args.window:
                options["window"] = self.args.window
        return options

    def folder(self, reader: Reader) -> str | Path | None:
        """Where the model of a reader is; None for one that is still to be made."""
        if reader.model == SOURCE:
            return self.args.source
        given = self.args.converted
        if reader.model == LONG and self.args.converted_long:
            given = self.args.converted_long
        if given:
            return given
        made = self.made(reader.model)
        return made if made.is_dir() else None

    def made(self, model: str) -> Path:
        """Where a conversion of our own is, or will be."""
        texts = [fingerprint(path) if path.is_file() else str(path) for path in self.args.calibration_text]
        return self.args.work / f"{model}-{digest(str(self.args.source), texts, self.options(model))}"

    def prepare(self) -> None:
        """Make the conversions that are not there.

        Raises:
            ValueError: where that cannot be done.
        """
        for reader in self.args.readers:
            if self.folder(reader) is None:
                out = self.made(reader.model)
                out.parent.mkdir(parents=True, exist_ok=True)
                print(f"converting {self.args.source} for {reader} into {out}", flush=True)
                convert(
                    self.args.source,
                    out,
                    position_embedding_type="tables",
                    method="calibrate",
                    method_options=self.options(reader.model),
                    texts=list(self.args.calibration_text),
                )

    def load(self, reader: Reader) -> PreTrainedModel:
        flag = "--converted-long" if reader.model == LONG and self.args.converted_long else "--converted"
        flag = "--source" if reader.model == SOURCE else flag
        return load_reader(reader, self.folder(reader), flag, sum(map(len, self.task.special)), self.args.window)

    def classifier(self, reader: Reader) -> tuple[PreTrainedModel | None, DocumentClassifier]:
        """The frozen half, if there is one, and what is trained."""
        lower, upper = split(self.load(reader), self.args.train_layers)
        return lower, DocumentClassifier(upper, len(self.task.names), self.args.dropout)

    def pieces(self, reader: Reader, lower: PreTrainedModel | None, documents: Documents):
        """Pieces as the classifier takes them, and the CPU seconds that each took below it."""
        if lower is None:
            ids = [[torch.tensor(piece) for piece in self.task.pieces(reader, row)] for row in documents.ids]
            return ids, [[0.0] * len(row) for row in ids]
        # the first tokens are the first piece of all
        whole = Reader("chunks", reader.length)
        cut = whole if reader.kind == "truncate" and whole in self.args.readers else reader
        rows = [self.task.pieces(cut, ids) for ids in documents.ids]
        state = hashlib.sha256()
        for name, tensor in sorted(lower.state_dict().items()):
            state.update(name.encode() + tensor.contiguous().numpy().tobytes())
        model = digest(state.hexdigest(), lower.config.to_json_string(use_diff=False))
        states, seconds = [], []
        for at in range(0, len(rows), SHARD):
            shard = rows[at : at + SHARD]
            found = frozen_states(lower, self.args.work / f"states-{digest(model, shard)}.safetensors", shard)
            states, seconds = states + found[0], seconds + found[1]
        if cut is not reader:
            states, seconds = ([row[:1] for row in found] for found in (states, seconds))
        if self.args.train_layers == 0:  # the mean is all that the head sees
            states = [[torch.cat(row).mean(0, keepdim=True)] for row in states]
        return states, seconds


def train(shop: Workshop, reader: Reader, seed: int) -> dict:
    """Train one classifier and measure it: percentages, sizes, and CPU seconds."""
    args, task = shop.args, shop.task
    set_seed(seed)
    lower, model = shop.classifier(reader)
    sets, below = [], []
    for documents in (task.train, task.dev):
        pieces, seconds = shop.pieces(reader, lower, documents)
        sets.append(Pieces(pieces, documents.labels))
        below.append(sum(map(sum, seconds)))
    del lower
    groups = [
        {"params": list(part.parameters()), "lr": rate}
        for part, rate in ((model.encoder, args.lr), (model.head, args.head_lr))
        if any(True for _ in part.parameters())
    ]
    steps = -(-len(task.train) // args.batch) * args.epochs
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                num_train_epochs=args.epochs,
                per_device_train_batch_size=args.rows,
                gradient_accumulation_steps=args.batch // args.rows,
                per_device_eval_batch_size=args.rows,
                train_sampling_strategy="random" if args.rows == 1 else "group_by_length",
                warmup_steps=round(args.warmup * steps),
                label_names=["labels"],
                seed=seed,
                **QUIETLY,
            ),
            train_dataset=sets[0],
            data_collator=collate,
            optimizers=(torch.optim.AdamW(groups, weight_decay=args.weight_decay), None),
        )
        trainer.remove_callback(PrinterCallback)
        began = time.process_time()
        trainer.train()
        trained = time.process_time() - began
        trainer.args.train_sampling_strategy = "random"  # else documents to predict are shuffled, too
        began = time.process_time()
        predicted = trainer.predict(sets[1]).predictions.argmax(-1)
        measured = time.process_time() - began
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    right = predicted == np.array(task.dev.labels)
    long = of_long(task)
    tokens = sum(len(piece) for ids in task.dev.ids for piece in task.pieces(reader, ids))
    return {
        "accuracy": 100 * float(right.mean()),
        "accuracy_long": 100 * float(right[long].mean()) if long.any() else None,
        "right": "".join(str(int(each)) for each in right),
        "train_loss": losses[-1],
        "tokens": tokens,
        "steps": trainer.state.global_step,
        "below_cpu_seconds": round(below[0], 1),
        "train_cpu_seconds": round(trained, 1),
        "infer_cpu_seconds": round((below[1] + measured) / len(task.dev), 4),
    }


def of_long(task: Task) -> np.ndarray:
    """Which development documents have more than LONGER tokens, special ones included."""
    special = sum(map(len, task.special))
    return np.array([len(ids) + special > LONGER for ids in task.dev.ids])


def worker(request: dict) -> dict[str, float]:
    """Largest memory that one document takes beside the model, MB: to read it, and to train on it, too."""
    pieces, layers = request["pieces"], request["train_layers"]
    model = load_reader(Reader.of(request["reader"]), request["folder"], "", 0, request["window"])
    lower, upper = split(model, layers)
    del model
    classifier = DocumentClassifier(upper, 2, 0.1)

    def batch(rows: list[list[int]]) -> dict:
        states = [torch.tensor(row) for row in rows] if lower is None else lower_states(lower, rows)[0]
        return collate([{"pieces": states, "label": 0}])

    for module in (lower, classifier):
        if module is not None:
            module.eval()
    with torch.no_grad():
        classifier(**batch([pieces[0][:8]]))
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak of loading does not count
        before = peak_mb()
        classifier(**batch(pieces))
    reading = peak_mb() - before
    classifier.train()
    classifier(**batch(pieces))["loss"].backward()
    return {"read_mb": round(reading, 1), "train_mb": round(peak_mb() - before, 1)}


def memory_of(shop: Workshop, reader: Reader) -> dict:
    """`worker` in a fresh process, on the longest document."""
    ids = max(shop.task.dev.ids, key=len)
    pieces = shop.task.pieces(reader, ids)
    request = {
        "reader": str(reader),
        "folder": str(shop.folder(reader)),
        "train_layers": shop.args.train_layers,
        "window": shop.args.window,
        "pieces": pieces,
    }
    try:
        return {"tokens": sum(map(len, pieces)), **ask(sys.executable, __file__, "--worker", json.dumps(request))}
    except RuntimeError as error:
        raise ValueError(f"the memory of {reader} could not be measured: {error}") from None


# Card ---------------------------------------------------------------------------------------------------------------


def rights(results: Sequence[dict]) -> np.ndarray:
    """Share of the seeds that got each document right, (documents,)."""
    return np.array([[int(each) for each in result["right"]] for result in results]).mean(0)


def comparison(better: Sequence[dict], worse: Sequence[dict]) -> str:
    """The difference of two readers on the same documents, and the range that resampling the documents gives."""
    one, other = rights(better), rights(worse)
    found = paired_bootstrap(lambda drawn: 100 * float((one - other)[drawn].mean()), len(one))
    word = "too small to tell" if found.low <= 0 <= found.high else "**more**" if found.mean > 0 else "**less**"
    changed = f"{int((one > other).sum())} documents better, {int((one < other).sum())} worse"
    return f"{word}: {found.mean:+.1f} ({found.low:+.1f} to {found.high:+.1f}; {changed})"


def section(name: str, found: dict) -> str:
    """What the card says of one data set."""
    results, settings = by_arm(found["runs"]), found["settings"]
    # a reader of long rows takes the other conversion where there is none of its own
    models = {**MODELS, LONG: MODELS[CONVERTED if settings[CONVERTED] and not settings[LONG] else LONG]}
    rows, count = [], len(next(iter(results.values()))[0]["right"])
    for key, seeds in results.items():
        reader = Reader.of(key)
        size = found["memory"].get(key)
        long = [result["accuracy_long"] for result in seeds]
        rows.append(
            [
                f"`{key}`",
                f"{models[reader.model]}: {KINDS[reader.kind][1].format(n=reader.length)}",
                spread([result["accuracy"] for result in seeds]),
                "–" if None in long else spread(long),
                f"{statistics.mean(result['train_loss'] for result in seeds):.3f}",
                f"{seeds[0]['tokens'] / count:.0f}",
                f"{statistics.mean(result['infer_cpu_seconds'] for result in seeds):.2f}",
                f"{seeds[0]['below_cpu_seconds']:.0f} + {statistics.mean(r['train_cpu_seconds'] for r in seeds):.0f}",
                "–" if size is None else f"{size['read_mb']:.0f}",
                "–" if size is None else f"{size['train_mb']:.0f}",
                str(len(seeds)),
            ]
        )
    head = ["reader", "what it reads", "accuracy", f"over {LONGER}", "training loss", "tokens a document"]
    head += ["CPU s a document", "CPU s of training", "MB reading", "MB training", "seeds"]
    lines = []
    for one, other, words in CLAIMS:
        pairs = [(a, b) for a in results for b in results if (Reader.of(a).kind, Reader.of(b).kind) == (one, other)]
        same = [(a, b) for a, b in pairs if Reader.of(a).length == Reader.of(b).length]
        for first, second in same or pairs:
            lines.append(f"- {words}: `{first}` − `{second}`: {comparison(results[first], results[second])}")
    shares = [rights(seeds).mean() for seeds in results.values()]
    errors = [100 * float((share * (1 - share) / count) ** 0.5) for share in shares]
    lines.append(
        f"- standard error of one accuracy alone, over {count} documents: {min(errors):.1f} to {max(errors):.1f}"
    )
    about = [f"- {key}: {value}" for key, value in found["about"].items()]
    return "\n".join([f"## {name}\n", *about, "", markdown_table(head, rows), *lines, ""])


def card(content: dict) -> str:
    """README.md: every data set."""
    intro = (
        "# Documents longer than a segment\n\n"
        "Written by `scripts/classify_documents.py`, which says what the readers are; every run is in "
        "[results.json](results.json). All have the same documents, head, optimiser, epochs and seeds. Accuracy in "
        "percent, mean ± standard deviation over seeds, measured once at the end of training, on all documents and on "
        f"those of more than {LONGER} tokens. Readers are compared document by document below the table, with the "
        "95 % range of resampled documents (1,000 draws); a difference whose range holds 0 is called too small to "
        "tell. Training loss: of the last epoch, with dropout. CPU s a document: to read and classify it, frozen "
        "layers included. CPU s of training: frozen layers once for all seeds + all epochs of one seed. MB: the "
        "longest development document's, beside the model, in a fresh process; training includes reading.\n\n"
    )
    return intro + "\n".join(section(name, found) for name, found in content.items())


# Command line -------------------------------------------------------------------------------------------------------


def files_of(args: argparse.Namespace) -> dict:
    """What stands for paths among the settings."""
    folders = {key: getattr(args, key) and Path(getattr(args, key)).name for key in (SOURCE, CONVERTED, LONG)}
    texts = [path.name for path in args.calibration_text or []]
    files = {"train": fingerprint(args.train), "dev": args.dev and fingerprint(args.dev)}
    return {**folders, **files, "calibration_text": texts}


def about(args: argparse.Namespace, task: Task, arguments: Sequence[str]) -> dict[str, str]:
    """Where, when and how this was measured."""

    def size(documents: Documents) -> str:
        lengths = [len(ids) for ids in documents.ids]
        shares = [f"{documents.labels.count(n)} {name}" for n, name in enumerate(task.names)]
        return (
            f"{len(documents):,} documents ({', '.join(shares)}), of {min(lengths):,} to {max(lengths):,} tokens, "
            f"median {statistics.median(lengths):,.0f}"
        )

    trained = {"all": "everything", 0: "the head alone; embeddings and layers are frozen"}.get(
        args.train_layers, f"the head and the upper layers, {args.train_layers}; the others and embeddings are frozen"
    )
    rates = f"{args.lr} and {args.head_lr} for the head" if args.train_layers else f"{args.head_lr}"
    long = of_long(task)
    measured = f"the last {args.held_out} of {args.train.name}, shuffled" if args.held_out else args.dev.name
    return {
        "command": f"`{command('classify_documents.py', arguments)}`",
        "training": f"{args.train.name}, shuffled, {size(task.train)}",
        "measured on": f"{measured}, {size(task.dev)}; {int(long.sum())} of more than {LONGER} tokens",
        "source": Path(args.source).name,
        "long-N": f"attention_window {args.window}" if args.window else "no attention_window",
        "trained": trained,
        "budget": f"{args.epochs} epochs of batches of {args.batch} documents, AdamW, rate {rates} after a warm-up of "
        f"{args.warmup:.0%}, falling to 0, weight decay {args.weight_decay}, dropout of the head {args.dropout}",
        **circumstances(),
    }


def layers(text: str) -> int | str:
    return text if text == "all" else natural(text)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "classify_documents", "documents", 3, "for states of models")
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--dev", type=Path, help="documents to measure on")
    parser.add_argument("--held-out", type=count, help="measure on so many training documents instead")
    parser.add_argument("--columns", default="label,text", help="names of the label and the text")
    parser.add_argument("--train-documents", type=count, help="only so many, drawn at random")
    parser.add_argument("--dev-documents", type=count, help="only the first ones")
    parser.add_argument("--source", required=True, help="folder or Hub repository of a BERT with absolute positions")
    parser.add_argument("--converted", help="folder of its conversion, for segments-N and memory-N; and for long-N")
    parser.add_argument("--converted-long", help="folder of another conversion, for long-N")
    parser.add_argument("--calibration-text", type=Path, nargs="+", help="text to convert on, where nothing is given")
    parser.add_argument("--calibration-tokens", type=count, default=40_000)
    parser.add_argument("--window", type=natural, default=256, help="attention_window of long-N; 0 for none")
    parser.add_argument("--readers", nargs="+", default=READERS, help=" ".join(READERS))
    parser.add_argument(
        "--train-layers", type=layers, default=1, help="how many of the upper layers, 0 or more, or all"
    )
    parser.add_argument("--epochs", type=count, default=4)
    parser.add_argument("--batch", type=count, default=8, help="documents of a step")
    parser.add_argument(
        "--rows", type=count, default=1, help="documents that are read side by side, a divisor of that"
    )
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--head-lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=share, default=0.1, help="share of the steps")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--dropout", type=share, default=0.1, help="of the head")
    args = parser.parse_args(arguments)
    try:
        args.readers = list(dict.fromkeys(Reader.of(name) for name in args.readers))
    except ValueError as error:
        parser.error(f"--readers: {error}")
    if (args.dev is None) == (args.held_out is None):
        parser.error("what to measure on? Give one of --dev FILE and --held-out COUNT")
    if args.batch % args.rows:
        parser.error(f"--rows {args.rows}: --batch {args.batch} is no multiple of it")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else list(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if given[:1] == ["--worker"]:
        print(json.dumps(worker(json.loads(given[1]))))
        return
    args = parse(given)
    torch.set_num_threads(args.threads)
    path = args.out / "results.json"
    try:
        task = Task(args)
        shop = Workshop(args, task)
        settings = settings_of(args, ["readers"], **files_of(args))
        content = stored_in(path, args.name, settings, args.again)
        shop.prepare()
        found = content.setdefault(args.name, {"settings": settings, "about": {}, "memory": {}, "runs": {}})
        found["about"] = about(args, task, given)
        for seed in range(args.seeds):
            for reader in args.readers:
                key = f"{reader}/{seed}"
                if key in found["runs"]:
                    print(f"{key}: there already")
                    continue
                if str(reader) not in found["memory"]:
                    found["memory"][str(reader)] = memory_of(shop, reader)
                result = train(shop, reader, seed)
                found["runs"][key] = {"date": environment()["date"], "result": result}
                save(args.out, content, card(content))
                shown = {name: value for name, value in result.items() if name != "right"}
                print(f"{key}: {shown}", flush=True)
    except ValueError as error:
        sys.exit(f"Error: {error}")
    save(args.out, content, card(content))
    print(section(args.name, found))


if __name__ == "__main__":
    main()
