"""Train small taggers from scratch, one for each position scheme and seed, and compare them: TENER's experiment.

    python scripts/train_ner.py --name wnut17 --train wnut17.train.conll --dev wnut17.dev.conll
    python scripts/train_ner.py --name weibo --train weibo.train --dev weibo.dev --unit character    # Chinese
    python scripts/train_ner.py --name … --train … --dev … --schemes tener alibi deberta --seeds 5
    python scripts/train_ner.py --name … --train … --dev … --tokenizer CHECKPOINT --vectors

Needs the extra `ner`. Files are CoNLL-like, in IOB1, IOB2, BIOES, BMES or BILOU; columns are detected, or given by
`--columns`. Every scheme gets the same model, budget and seeds. Measured once, at the end of training, on the
development file: precision, recall and F1 of entities by seqeval. OUT/results.json and OUT/README.md are written after
every run; a run that is in the JSON already is not repeated, and a data set that is there with other settings is
refused unless `--again`. Text of README.md below the line `<!-- notes -->` is kept.

Words are cut into WordPieces, trained on the training file (cased), and tagged at their first one; `--unit word` and
`--unit character` have whole words or single characters as tokens, those that occur twice in the training file. The
shape of a word (capitals, digits, other scripts) is its token type. TENER has a network over characters instead, and
GloVe's word vectors: `--tokenizer CHECKPOINT --vectors` takes a BERT's tokenizer and word vectors for them, which are
frozen. Without `--vectors` only the tokenizer is taken.

There is no CRF, which TENER puts on top: no well-kept library for PyTorch has one (pytorch-crf was last released in
2019, TorchCRF in 2020; pyt-crf began in 2026). Tags are chosen one by one, and I- without a B- begins an entity.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from experiments.arguments import (
    add_experiment_options,
    fingerprint,
    fraction,
    positive_int,
    reproducing_command,
    settings_of,
)
from experiments.results import Results, conditions
from experiments.training import QUIET, logged_losses
from tagging.card import card, section
from tagging.data import SHAPES, TaggingTask, UnknownTokenCollator
from tagging.scores import count_entities, entity_scores
from tagging.variants import VARIANTS
from transformers import Trainer, TrainingArguments, logging, set_seed

from hf_relpos import SCHEMES, RelPosBertConfig, RelPosBertForTokenClassification
from hf_relpos.data.conll import Sentence


def build(task: TaggingTask, args: argparse.Namespace, variant: str) -> RelPosBertForTokenClassification:
    """A new model of that variant.

    Raises:
        ValueError: for sizes that the configuration refuses.
    """
    scheme, options = VARIANTS.get(variant, (variant, {}))
    options = {key: args.init if value == "{init}" else value for key, value in options.items()}
    config = RelPosBertConfig(
        vocab_size=len(task.tokenizer),
        embedding_size=None if task.vectors is None else task.vectors.shape[1],
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=args.intermediate,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.attention_dropout,
        initializer_range=args.init,
        max_position_embeddings=args.max_length,
        type_vocab_size=len(SHAPES),
        pad_token_id=task.tokenizer.pad_token_id,
        position_embedding_type=scheme,
        position_options=options,
        id2label=dict(enumerate(task.names)),
        label2id={name: number for number, name in enumerate(task.names)},
    )
    model = RelPosBertForTokenClassification(config)
    if task.vectors is not None:
        table = model.get_input_embeddings().weight
        table.data.copy_(task.vectors)
        table.requires_grad_(False)
    if variant == "none":
        for name, parameter in model.named_parameters():
            if ".distance_embedding." in name:
                parameter.data.zero_()
                parameter.requires_grad_(False)
    return model


def train(task: TaggingTask, args: argparse.Namespace, variant: str, seed: int) -> dict[str, float]:
    """Train one model and measure it: percentages, the training loss of the last epoch, sizes and seconds."""
    cpu_start, start = time.process_time(), time.perf_counter()
    set_seed(seed)
    model = build(task, args, variant)
    steps = math.ceil(len(task.train) / args.batch) * args.epochs
    collator = UnknownTokenCollator(task.tokenizer)
    collator.unknown = args.unknown
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                num_train_epochs=args.epochs,
                per_device_train_batch_size=args.batch,
                per_device_eval_batch_size=2 * args.batch,
                train_sampling_strategy="group_by_length",
                learning_rate=args.lr,
                warmup_steps=round(args.warmup * steps),
                weight_decay=args.weight_decay,
                seed=seed,
                **QUIET,
            ),
            train_dataset=task.train,
            data_collator=collator,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        )
        trainer.train()
        collator.unknown = 0.0
        trainer.args.train_sampling_strategy = "random"  # group_by_length shuffles the rows to predict, too
        predicted = trainer.predict(task.dev).predictions
    truth = [tags for _, tags in task.sentences[1]]
    return {
        **entity_scores(truth, task.dev.tags(predicted.tolist(), task.names, task.sentences[1])),
        "train_loss": logged_losses(trainer)[-1],
        "parameters": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        "steps": trainer.state.global_step,
        "cpu_seconds": round(time.process_time() - cpu_start, 1),
        "seconds": round(time.perf_counter() - start, 1),
    }


def about(args: argparse.Namespace, task: TaggingTask, arguments: Sequence[str]) -> dict[str, str]:
    """Where, when and how this was measured."""

    def size(sentences: Sequence[Sentence]) -> str:
        return f"{len(sentences):,} sentences, {count_entities([tags for _, tags in sentences]):,} entities"

    words = sum(len(words) for words, _ in task.sentences[0])
    tokens = sum(len(row["input_ids"]) for row in task.train.rows)
    unit = f"tokenizer of {Path(args.tokenizer).name}" if args.tokenizer else f"unit {args.unit}"
    vectors = f"; its word vectors ({task.vectors.shape[1]} wide), frozen" if task.vectors is not None else ""
    return {
        "command": f"`{reproducing_command('train_ner.py', arguments)}`",
        "training": f"{args.train.name}, {size(task.sentences[0])}"
        + (" (the first ones of the file)" if args.train_sentences else ""),
        "measured on": f"{args.dev.name}, {size(task.sentences[1])}"
        + (" (the first ones of the file)" if args.dev_sentences else ""),
        "tokens": f"{unit}, vocabulary {len(task.tokenizer):,}, {tokens / words:.2f} tokens a word{vectors}; "
        "shapes of words as token types",
        "model": f"{args.layers} layers, {args.hidden} wide, {args.heads} heads, feed-forward {args.intermediate}, "
        f"LayerNorm after the residual sum; dropout {args.dropout}, of attention {args.attention_dropout}, "
        f"tokens to [UNK] {args.unknown}; initial weights N(0, {args.init}²)",
        "budget": f"{args.epochs} epochs of batches of {args.batch} sentences, AdamW, rate {args.lr} after a warm-up "
        f"of {args.warmup:.0%}, falling to 0, weight decay {args.weight_decay}",
        **conditions(),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_experiment_options(parser, "train_ner", "ner", 3, "for the tokenizers")
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--dev", type=Path, required=True)
    parser.add_argument(
        "--columns", type=positive_int, nargs=2, metavar=("TOKEN", "TAG"), help="counted from 1; detected by default"
    )
    parser.add_argument("--train-sentences", type=positive_int, help="only the first ones")
    parser.add_argument("--dev-sentences", type=positive_int, help="only the first ones")
    parser.add_argument("--unit", choices=("wordpiece", "word", "character"), default="wordpiece")
    parser.add_argument("--vocab", type=positive_int, default=4000, help="maximum size of the vocabulary")
    parser.add_argument("--tokenizer", help="folder or Hub repository of a BERT, to use its tokenizer")
    parser.add_argument("--vectors", action="store_true", help="use its word vectors too, frozen")
    parser.add_argument("--schemes", nargs="+", default=list(VARIANTS), help=f"{', '.join(VARIANTS)}, or any scheme")
    parser.add_argument("--layers", type=positive_int, default=2)
    parser.add_argument("--hidden", type=positive_int, default=128)
    parser.add_argument("--heads", type=positive_int, default=4)
    parser.add_argument("--intermediate", type=positive_int, default=256)
    parser.add_argument("--dropout", type=fraction, default=0.2)
    parser.add_argument("--attention-dropout", type=fraction, default=0.1)
    parser.add_argument(
        "--unknown", type=fraction, default=0.0, help="fraction of the training tokens replaced by [UNK]"
    )
    parser.add_argument("--init", type=float, default=0.05, help="standard deviation of the initial weights")
    parser.add_argument(
        "--max-length", type=positive_int, default=128, help="tokens of a row; longer sentences are split"
    )
    parser.add_argument("--pieces", type=positive_int, default=8, help="maximum number of tokens in a word")
    parser.add_argument("--epochs", type=positive_int, default=10)
    parser.add_argument("--batch", type=positive_int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=fraction, default=0.1, help="fraction of the steps")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    args = parser.parse_args(arguments)
    args.schemes = list(dict.fromkeys(args.schemes))
    unknown = [name for name in args.schemes if name not in VARIANTS and name not in SCHEMES]
    if unknown:
        known = ", ".join(dict.fromkeys([*VARIANTS, *SCHEMES]))
        parser.error(f"--schemes {unknown[0]}: no such scheme; known: {known}")
    if args.vectors and not args.tokenizer:
        parser.error("--vectors: whose? Name the checkpoint with --tokenizer")
    if args.pieces > args.max_length:
        parser.error(f"--pieces {args.pieces}: a word does not fit into a row of --max-length {args.max_length}")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    try:
        # everything that can be wrong is checked before anything is written
        task = TaggingTask(args)
        for variant in args.schemes:
            with torch.device("meta"):
                build(task, args, variant)
        files = {"train": fingerprint(args.train), "dev": fingerprint(args.dev)}
        files["tokenizer"] = args.tokenizer and Path(args.tokenizer).name
        results = Results(args.out, args.name, settings_of(args, ["schemes"], **files), card, args.again)
    except ValueError as error:
        sys.exit(f"Error: {error}")
    task.save_tokenizer()
    results.entry["about"] = about(args, task, sys.argv[1:] if arguments is None else arguments)
    for variant, seed in results.pending(args.schemes, args.seeds):
        result = train(task, args, variant, seed)
        results.add(variant, seed, result)
        results.save()
        rounded = {name: round(value, 3) for name, value in result.items()}
        print(f"{variant}/{seed}: {rounded}", flush=True)
    results.save()
    print(section(args.name, results.entry))


if __name__ == "__main__":
    main()
