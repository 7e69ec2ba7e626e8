"""Classify documents that are longer than a segment with several reading strategies, at the same budget.

    python scripts/classify_documents.py --name reviews --train reviews.train.jsonl.xz --dev reviews.dev.jsonl.xz \\
        --source sentence-transformers/all-MiniLM-L6-v2 --calibration-text novels.txt wikidocs.docs.jsonl
    python scripts/classify_documents.py … --converted FOLDER --converted-long FOLDER    # conversions made before
    python scripts/classify_documents.py … --strategies truncate-512 long-4096 --train-layers all --rows 8

Documents are records of a label and a text, `--columns label,text` by default: JSON lines, tab- or comma-separated,
compressed or not. `--source` is a BERT with absolute positions. A strategy is a kind and a number of tokens:

    truncate-N    the source, the first N tokens
    tail-N        the source, the last N tokens
    chunks-N      the source, pieces of N tokens, each by itself
    segments-N    the converted model, the same pieces, each by itself
    memory-N      the converted model, the same pieces, with a memory of N tokens from piece to piece
    long-N        the model converted for long rows, the first N tokens at once, with `--window`

Every piece has [CLS] and [SEP], which N counts. The mean of all hidden states of a document is the input of the same
head: dropout, dense, tanh, dropout, dense. Embeddings and lower layers are frozen, as many as `--train-layers` leaves
(0 trains the head alone, `all` freezes nothing); their hidden states are computed once for each document and cached
in `--work`, which changes nothing but the time. Gradients flow within a piece, never into a memory.

Conversions are made by `--method calibrate` on `--calibration-text`, or taken from existing folders. Measured once, at
the end of training, on `--dev`, or, to choose settings, on `--held-out` documents of the training file. After every
run OUT/results.json and OUT/README.md are written; a run that is in the JSON already is not repeated, and a data set
that is there with other settings is refused unless `--again`. Text of README.md below the line `<!-- notes -->` is
kept.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from documents.card import card, section
from documents.frozen import StrategyModels, lower_states
from documents.models import DocumentClassifier, PieceDataset, collate, load_for_strategy, split_frozen
from documents.strategies import CONVERTED, DEFAULT_STRATEGIES, LONG, SOURCE, Strategy
from documents.task import LONG_DOCUMENT, Documents, DocumentTask
from experiments.arguments import (
    add_experiment_options,
    fingerprint,
    fraction,
    non_negative_int,
    positive_int,
    reproducing_command,
    settings_of,
)
from experiments.measuring import peak_memory, reset_peak_memory, run_worker
from experiments.results import Results, conditions
from experiments.training import QUIET, logged_losses
from transformers import PrinterCallback, Trainer, TrainingArguments, logging, set_seed


def train(models: StrategyModels, strategy: Strategy, seed: int) -> dict[str, Any]:
    """Train one classifier and measure it: percentages, sizes, and CPU seconds."""
    args, task = models.args, models.task
    set_seed(seed)
    lower, model = models.classifier(strategy)
    datasets, frozen_seconds = [], []
    for documents in (task.train, task.dev):
        pieces, seconds = models.pieces(strategy, lower, documents)
        datasets.append(PieceDataset(pieces, documents.labels))
        frozen_seconds.append(sum(map(sum, seconds)))
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
                **QUIET,
            ),
            train_dataset=datasets[0],
            data_collator=collate,
            optimizers=(torch.optim.AdamW(groups, weight_decay=args.weight_decay), None),
        )
        trainer.remove_callback(PrinterCallback)
        start = time.process_time()
        trainer.train()
        train_seconds = time.process_time() - start
        trainer.args.train_sampling_strategy = "random"  # group_by_length shuffles the documents to predict, too
        start = time.process_time()
        predicted = trainer.predict(datasets[1]).predictions.argmax(-1)
        predict_seconds = time.process_time() - start
    correct, long = predicted == np.array(task.dev.labels), task.is_long()
    return {
        "accuracy": 100 * float(correct.mean()),
        "accuracy_long": 100 * float(correct[long].mean()) if long.any() else None,
        "right": "".join(str(int(each)) for each in correct),
        "train_loss": logged_losses(trainer)[-1],
        "tokens": sum(len(piece) for ids in task.dev.ids for piece in task.pieces(strategy, ids)),
        "steps": trainer.state.global_step,
        "below_cpu_seconds": round(frozen_seconds[0], 1),
        "train_cpu_seconds": round(train_seconds, 1),
        "infer_cpu_seconds": round((frozen_seconds[1] + predict_seconds) / len(task.dev), 4),
    }


def memory_worker(request: dict[str, Any]) -> dict[str, float]:
    """Peak memory of one document beside the model, MB: in inference, and in training."""
    pieces = request["pieces"]
    model = load_for_strategy(Strategy.parse(request["strategy"]), request["folder"], "", 0, request["window"])
    lower, upper = split_frozen(model, request["train_layers"])
    del model
    classifier = DocumentClassifier(upper, 2, 0.1)

    def batch(rows: list[list[int]]) -> dict[str, Any]:
        states = [torch.tensor(row) for row in rows] if lower is None else lower_states(lower, rows)[0]
        return collate([{"pieces": states, "label": 0}])

    for module in (lower, classifier):
        if module is not None:
            module.eval()
    with torch.no_grad():
        classifier(**batch([pieces[0][:8]]))
        reset_peak_memory()  # loading takes more than the model
        before = peak_memory()
        classifier(**batch(pieces))
    read = peak_memory() - before
    classifier.train()
    classifier(**batch(pieces))["loss"].backward()
    return {"read_mb": round(read, 1), "train_mb": round(peak_memory() - before, 1)}


def measure_memory(models: StrategyModels, strategy: Strategy) -> dict[str, float]:
    """`memory_worker` in a fresh process, on the longest document.

    Raises:
        ValueError: when that process fails.
    """
    pieces = models.task.pieces(strategy, max(models.task.dev.ids, key=len))
    request = {
        "strategy": str(strategy),
        "folder": str(models.folder(strategy)),
        "train_layers": models.args.train_layers,
        "window": models.args.window,
        "pieces": pieces,
    }
    try:
        return {
            "tokens": sum(map(len, pieces)),
            **run_worker(sys.executable, __file__, "--worker", json.dumps(request)),
        }
    except RuntimeError as error:
        raise ValueError(f"the memory of {strategy} could not be measured: {error}") from None


def file_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Names and fingerprints in place of the paths among the settings."""
    folders = {key: getattr(args, key) and Path(getattr(args, key)).name for key in (SOURCE, CONVERTED, LONG)}
    texts = [path.name for path in args.calibration_text or []]
    files = {"train": fingerprint(args.train), "dev": args.dev and fingerprint(args.dev)}
    return {**folders, **files, "calibration_text": texts}


def about(args: argparse.Namespace, task: DocumentTask, arguments: Sequence[str]) -> dict[str, str]:
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
    long = int(task.is_long().sum())
    measured = f"the last {args.held_out} of {args.train.name}, shuffled" if args.held_out else args.dev.name
    return {
        "command": f"`{reproducing_command('classify_documents.py', arguments)}`",
        "training": f"{args.train.name}, shuffled, {size(task.train)}",
        "measured on": f"{measured}, {size(task.dev)}; {long} of more than {LONG_DOCUMENT} tokens",
        "source": Path(args.source).name,
        "long-N": f"attention_window {args.window}" if args.window else "no attention_window",
        "trained": trained,
        "budget": f"{args.epochs} epochs of batches of {args.batch} documents, AdamW, rate {rates} after a warm-up of "
        f"{args.warmup:.0%}, falling to 0, weight decay {args.weight_decay}, dropout of the head {args.dropout}",
        **conditions(),
    }


def layer_count(text: str) -> int | str:
    """An integer ≥ 0 or `all`, for argparse."""
    return text if text == "all" else non_negative_int(text)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_experiment_options(parser, "classify_documents", "documents", 3, "for conversions and states of frozen layers")
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--dev", type=Path, help="documents to measure on")
    parser.add_argument(
        "--held-out", type=positive_int, help="measure on that many documents of the training file instead"
    )
    parser.add_argument("--columns", default="label,text", help="names of the label and the text")
    parser.add_argument("--train-documents", type=positive_int, help="only that many, drawn at random")
    parser.add_argument("--dev-documents", type=positive_int, help="only the first ones")
    parser.add_argument("--source", required=True, help="folder or Hub repository of a BERT with absolute positions")
    parser.add_argument("--converted", help="folder of its conversion, for segments-N and memory-N; and for long-N")
    parser.add_argument("--converted-long", help="folder of another conversion, for long-N")
    parser.add_argument("--calibration-text", type=Path, nargs="+", help="text to convert on, without --converted")
    parser.add_argument("--calibration-tokens", type=positive_int, default=40_000)
    parser.add_argument("--window", type=non_negative_int, default=256, help="attention_window of long-N; 0 for none")
    parser.add_argument(
        "--strategies",
        "--readers",  # as in the commands of stored results
        nargs="+",
        default=DEFAULT_STRATEGIES,
        help=" ".join(DEFAULT_STRATEGIES),
    )
    parser.add_argument(
        "--train-layers", type=layer_count, default=1, help="how many of the upper layers, 0 or more, or all"
    )
    parser.add_argument("--epochs", type=positive_int, default=4)
    parser.add_argument("--batch", type=positive_int, default=8, help="documents of a training step")
    parser.add_argument(
        "--rows", type=positive_int, default=1, help="documents of a forward pass, a divisor of --batch"
    )
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--head-lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=fraction, default=0.1, help="fraction of the steps")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--dropout", type=fraction, default=0.1, help="of the head")
    args = parser.parse_args(arguments)
    try:
        args.strategies = list(dict.fromkeys(Strategy.parse(name) for name in args.strategies))
    except ValueError as error:
        parser.error(f"--strategies: {error}")
    if (args.dev is None) == (args.held_out is None):
        parser.error("what to measure on? Give one of --dev FILE and --held-out COUNT")
    if args.batch % args.rows:
        parser.error(f"--rows {args.rows}: --batch {args.batch} is no multiple of it")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if arguments[:1] == ["--worker"]:
        print(json.dumps(memory_worker(json.loads(arguments[1]))))
        return
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    try:
        task = DocumentTask(args)
        models = StrategyModels(args, task)
        settings = settings_of(args, ["strategies"], **file_settings(args))
        results = Results(args.out, args.name, settings, card, args.again)
        models.convert()
        results.entry["about"] = about(args, task, arguments)
        memory = results.entry.setdefault("memory", {})
        for strategy, seed in results.pending(args.strategies, args.seeds):
            if str(strategy) not in memory:
                memory[str(strategy)] = measure_memory(models, strategy)
            result = train(models, strategy, seed)
            results.add(strategy, seed, result)
            results.save()
            shown = {name: value for name, value in result.items() if name != "right"}
            print(f"{strategy}/{seed}: {shown}", flush=True)
    except ValueError as error:
        sys.exit(f"Error: {error}")
    results.save()
    print(section(args.name, results.entry))


if __name__ == "__main__":
    main()
