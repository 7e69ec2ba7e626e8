"""Train small character language models, with and without a memory of segments, and compare them: Transformer-XL's.

    python scripts/train_lm.py --name shakespeare --train train.txt --valid valid.txt
    python scripts/train_lm.py --name … --train … --valid … --variants absolute t5 t5+memory shaw+memory --seeds 3
    python scripts/train_lm.py --name novels --text novels.txt.xz --split 20000000 200000 200000

A variant is a position scheme, with `+memory` one whose segments attend to the `--memory` tokens before them as well
(Dai et al., arXiv 1901.02860, §3.2). All variants have the same batches in the same order, the same steps and the same
number of parameters: the feed-forward layers of the smaller ones are widened to the size of the largest one.

Text is read from files, plain or compressed (.xz, .gz, .bz2), as bytes or, with `--unit character`, as the characters
that occur in the training text. Measured once, after training, on the validation text (and a test text, if there is
one): bits per byte or character, also by its position in the segment, which shows what the memory is good for; with
memories of other lengths (`--eval-memory`); and, of a model without memory, with windows that overlap by half, so that
each prediction has half a segment before it, at twice the cost. OUT/results.json, OUT/README.md and OUT/<name>.png are
written after every run; a run that is in the JSON already is not repeated, an interrupted one resumes from its last
checkpoint in `--work`. Text of README.md below the line `<!-- notes -->` is kept. Needs the extra `plot`.

The recipe of Transformer-XL's 12 layers on enwik8 (unpack enwik8.zip first; the paper took 4 GPUs for days), for one
process and for four; all other fields of TrainingArguments are set by `--training`:

    python scripts/train_lm.py --name enwik8 --text enwik8 --split 90000000 5000000 5000000 --layers 12 --hidden 512 \\
        --heads 8 --intermediate 2048 --dropout 0.1 --segment 512 --memory 512 --eval-memory 0 512 2100 --batch 22 \\
        --lr 2.5e-4 --warmup 0 --steps 400000 --training bf16=true max_grad_norm=0.25
    accelerate launch --num_processes 4 --use_fsdp scripts/train_lm.py … --batch 6

`--batch` is the number of rows of each process.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from experiments.arguments import (
    add_experiment_options,
    fingerprint,
    fraction,
    key_value,
    non_negative_int,
    positive_int,
    reproducing_command,
    settings_of,
)
from experiments.results import Results, conditions
from experiments.training import logged_losses
from language_modeling.card import card, plot, section
from language_modeling.texts import Segments, Texts, Windows
from language_modeling.variants import MEMORY, config_of, configs_of, has_memory, scheme_of, size_of
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainingArguments, logging, set_seed

from hf_relpos import SCHEMES, RelPosBertConfig, RelPosBertLMHeadModel
from hf_relpos.data.masking import IGNORE_INDEX
from hf_relpos.training.checkpoints import last_checkpoint
from hf_relpos.training.stream import StreamTrainer


FILES = ("train", "valid", "test", "text")


class SequentialTrainer(Trainer):
    """Trains on segments in order, as a StreamTrainer does."""

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


def training_arguments(args: argparse.Namespace, folder: Path, seed: int) -> TrainingArguments:
    """
    Raises:
        ValueError: for fields of `--training` that TrainingArguments does not have, or refuses.
    """
    defaults = {
        "output_dir": str(folder),
        "max_steps": args.steps,
        "per_device_train_batch_size": args.batch,
        "per_device_eval_batch_size": args.eval_batch,
        "learning_rate": args.lr,
        "warmup_steps": round(args.warmup * args.steps),
        "lr_scheduler_type": "cosine",
        "weight_decay": args.weight_decay,
        "logging_steps": max(1, args.steps // 40),
        "save_steps": max(1, args.steps // 8),
        "save_total_limit": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": torch.cuda.is_available(),
        "remove_unused_columns": False,
        "seed": seed,
    }
    try:
        return TrainingArguments(**{**defaults, **args.training})
    except (TypeError, ValueError) as error:
        raise ValueError(f"--training: {error}") from None


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of every token in nats, (B, L), from logits (B, L, vocabulary); 0 for labels IGNORE_INDEX."""
    return cross_entropy(logits.float().transpose(1, 2), labels, reduction="none", ignore_index=IGNORE_INDEX)


def bits_per_token(trainer: Trainer, dataset: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits of every token, and which of them are scored, both (segments, L)."""
    output = trainer.predict(dataset)
    return torch.from_numpy(output.predictions) / math.log(2), torch.from_numpy(output.label_ids) != IGNORE_INDEX


def measure(trainer: Trainer, args: argparse.Namespace, text: torch.Tensor, name: str, memory: bool) -> dict[str, Any]:
    """Bits per token of a text: in separate segments, and with memories or in overlapping windows."""
    rows = args.eval_batch * trainer.args.world_size
    config = trainer.model.config
    separate, _ = bits_per_token(trainer, Segments(text, rows, args.segment, True, name))
    result: dict[str, Any] = {"apart": float(separate.mean()), "tokens": separate.numel()}
    if not memory:
        start = time.process_time()
        windows, scored = bits_per_token(trainer, Windows(text, args.segment))
        result |= {"windows": float(windows[scored].mean()), "windows_seconds": time.process_time() - start}
        return {**result, "bits": result["apart"], "by_place": separate.mean(0).tolist()}
    by_memory = {0: result["apart"]}
    for length in sorted({args.memory, *args.eval_memory} - {0}):
        config.memory_length = length
        bits, _ = bits_per_token(trainer, Segments(text, rows, args.segment, False, name))
        by_memory[length] = float(bits.mean())
        if length == args.memory:
            result |= {"bits": by_memory[length], "by_place": bits.mean(0).tolist()}
    config.memory_length = args.memory
    return {**result, "by_memory": by_memory, "by_place_apart": separate.mean(0).tolist()}


def run(texts: Texts, args: argparse.Namespace, config: RelPosBertConfig, variant: str, seed: int) -> dict[str, Any]:
    """Train one model, and measure it."""
    cpu_start, start = time.process_time(), time.perf_counter()
    folder = args.work / args.name / variant / str(seed)
    settings = training_arguments(args, folder, seed)
    set_seed(seed)
    model = RelPosBertLMHeadModel(config)
    rows, memory = args.batch * settings.world_size, has_memory(variant)
    trainer = (StreamTrainer if memory else SequentialTrainer)(
        model=model,
        args=settings,
        train_dataset=Segments(texts.parts["train"], rows, args.segment, not memory, "training"),
        preprocess_logits_for_metrics=token_losses,
    )
    checkpoint = last_checkpoint(folder)
    trainer.train(resume_from_checkpoint=checkpoint)
    cpu_seconds, seconds = time.process_time() - cpu_start, time.perf_counter() - start
    trainer.save_model(str(folder / "model"))
    losses = logged_losses(trainer)
    result = {
        "parameters": size_of(config),
        "intermediate": config.intermediate_size,
        "steps": trainer.state.global_step,
        "processes": settings.world_size,
        "resumed": checkpoint is not None,
        "train_bits": statistics.mean(losses[-max(1, len(losses) // 10) :]) / math.log(2),
        "curve": [round(loss / math.log(2), 4) for loss in losses],
        "train_cpu_seconds": round(cpu_seconds, 1),
        "train_seconds": round(seconds, 1),
    }
    for name, text in texts.parts.items():
        if name != "train":
            result[name] = measure(trainer, args, text, name, memory)
    return json.loads(json.dumps(result), parse_float=lambda number: round(float(number), 5))


def about(
    args: argparse.Namespace, texts: Texts, configs: dict[str, RelPosBertConfig], arguments: Sequence[str]
) -> dict[str, str]:
    """Where, when and how this was measured."""

    def size(name: str) -> str:
        unknown = f", {texts.unknown[name]:.2%} of them unknown" if texts.unknown[name] else ""
        return f"{len(texts.parts[name]):,} {args.unit}s{unknown}"

    rows = args.batch * PartialState().num_processes
    tokens = args.steps * rows * args.segment
    inner = ", ".join(f"{config.intermediate_size} ({variant})" for variant, config in configs.items())
    return {
        "command": f"`{reproducing_command('train_lm.py', arguments)}`",
        "text": "; ".join(f"{name} {size(name)}" for name in texts.parts) + f"; vocabulary {texts.vocabulary}",
        "model": f"{args.layers} layers, {args.hidden} wide, {args.heads} heads, feed-forward {inner}, LayerNorm "
        f"after the residual sum; dropout {args.dropout}, of attention {args.attention_dropout}; initial weights N(0, "
        f"{args.init}²)",
        "budget": f"{args.steps:,} steps of {rows} segments of {args.segment}, "
        f"{tokens / len(texts.parts['train']):.1f} times through the text; memory {args.memory}; AdamW, rate "
        f"{args.lr} after a warm-up of {args.warmup:.0%}, falling to 0 by a cosine, weight decay {args.weight_decay}",
        **conditions(),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_experiment_options(parser, "train_lm", "lm", 1, "for checkpoints and models")
    parser.add_argument("--train", type=Path, help="training text")
    parser.add_argument("--valid", type=Path, help="validation text")
    parser.add_argument("--test", type=Path, help="test text, optional")
    parser.add_argument("--text", type=Path, help="one file to split into all of them")
    parser.add_argument(
        "--split", type=positive_int, nargs="+", help="sizes of its training, validation and perhaps test part"
    )
    parser.add_argument("--unit", choices=("byte", "character"), default="byte")
    parser.add_argument(
        "--variants",
        "--arms",  # as in the commands of stored results
        nargs="+",
        default=["absolute", "transformer_xl", f"transformer_xl{MEMORY}"],
        help=f"schemes, with {MEMORY} those with a memory",
    )
    parser.add_argument("--layers", type=positive_int, default=4)
    parser.add_argument("--hidden", type=positive_int, default=192)
    parser.add_argument("--heads", type=positive_int, default=4)
    parser.add_argument("--intermediate", type=positive_int, default=768)
    parser.add_argument("--dropout", type=fraction, default=0.0)
    parser.add_argument("--attention-dropout", type=fraction, default=0.0)
    parser.add_argument("--init", type=float, default=0.05, help="standard deviation of the initial weights")
    parser.add_argument("--options", type=key_value, nargs="+", default=[], metavar="KEY=VALUE", help="of the schemes")
    parser.add_argument("--segment", type=positive_int, default=128, help="tokens of a segment")
    parser.add_argument("--memory", type=positive_int, default=128, help="tokens of the memory in training")
    parser.add_argument(
        "--eval-memory", type=non_negative_int, nargs="+", default=[], help="other lengths in evaluation"
    )
    parser.add_argument("--steps", type=positive_int, default=2000)
    parser.add_argument("--batch", type=positive_int, default=16, help="segments in a training step, of each process")
    parser.add_argument(
        "--eval-batch", type=positive_int, default=4, help="segments in an evaluation step, of each process"
    )
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=fraction, default=0.1, help="fraction of the steps")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument(
        "--training",
        type=key_value,
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="more fields of TrainingArguments",
    )
    args = parser.parse_args(arguments)
    args.variants = list(dict.fromkeys(args.variants))
    args.options, args.training = dict(args.options), dict(args.training)
    for variant in args.variants:
        if scheme_of(variant) not in SCHEMES:
            parser.error(f"--variants {variant}: no such scheme; known: {', '.join(SCHEMES)}, each also with {MEMORY}")
    options = {key for variant in args.variants for key in SCHEMES[scheme_of(variant)].options}
    for key in args.options:
        if key not in options:
            parser.error(f"--options {key}: no variant has it; they have {', '.join(sorted(options)) or 'none'}")
    if args.text:
        if args.train or args.valid or args.test:
            parser.error("--text: is split; leave out --train, --valid and --test")
        if not args.split or len(args.split) not in (2, 3):
            parser.error("--text: give the sizes of two or three parts with --split")
    elif not (args.train and args.valid):
        parser.error("what to read? Give --train and --valid, or --text and --split")
    elif args.split:
        parser.error("--split: is for --text; --train and --valid are files of their own")
    return args


def check(args: argparse.Namespace) -> tuple[Texts, dict[str, RelPosBertConfig], Results]:
    """Check everything that can be wrong, before anything is written.

    Returns:
        Texts, configurations of the variants, and the stored results.

    Raises:
        ValueError: for texts, sizes, options or stored results that do not fit.
    """
    texts = Texts(args)
    processes = PartialState().num_processes
    for name, text in texts.parts.items():
        batch = args.batch if name == "train" else args.eval_batch
        Segments(text, batch * processes, args.segment, True, name)
    for variant in args.variants:
        config_of(args, texts.vocabulary, variant)
    training_arguments(args, args.work, 0)
    files = {key: path and fingerprint(path) for key, path in vars(args).items() if key in FILES}
    settings = settings_of(args, ["variants"], **files, processes=processes)
    results = Results(args.out, args.name, settings, card, args.again)
    trained = max((run["result"]["parameters"] for run in results.runs.values()), default=0)
    return texts, configs_of(args, texts.vocabulary, trained), results


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    try:
        texts, configs, results = check(args)
    except ValueError as error:
        sys.exit(f"Error: {error}")
    results.entry["about"] = about(args, texts, configs, sys.argv[1:] if arguments is None else arguments)
    is_main_process = PartialState().is_main_process

    def save() -> None:
        results.save()
        plot(args.name, results.entry, args.out / f"{args.name}.png")

    for variant, seed in results.pending(args.variants, args.seeds, quiet=not is_main_process):
        result = run(texts, args, configs[variant], variant, seed)
        results.add(variant, seed, result)
        if is_main_process:
            save()
            print(f"{variant}/{seed}: {result['valid']['bits']:.3f} bits per {args.unit}", flush=True)
    if is_main_process:
        save()
        print(section(args.name, results.entry))


if __name__ == "__main__":
    main()
