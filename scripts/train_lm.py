"""Train small character language models, with and without a memory of segments, and compare them: Transformer-XL's.

    python scripts/train_lm.py --name shakespeare --train train.txt --valid valid.txt
    python scripts/train_lm.py --name … --train … --valid … --arms absolute t5 t5+memory shaw+memory --seeds 3
    python scripts/train_lm.py --name novels --text novels.txt.xz --split 20000000 200000 200000

An arm is a position scheme, with `+memory` one whose segments attend to the `--memory` tokens before them as well
(Dai et al., arXiv 1901.02860, §3.2). All arms read the same batches in the same order, for as many steps, and have as
many parameters: the feed-forward layers of the smaller ones are widened until they are as large as the largest one.

Text is read from files, plain or packed (.xz, .gz, .bz2), as bytes or, with `--unit character`, as the characters that
occur in the training text. Measured once, after training, on the validation text (and a test text, if there is one):
bits per byte or character, also by its place in the segment, which shows what the memory is good for; with memories of
other lengths (`--eval-memory`); and, of a model without memory, with windows that overlap by half, so that each
prediction has half a segment before it, at twice the cost. OUT/results.json, OUT/README.md and OUT/<name>.png are
written after every run; a run that is in the JSON already is not repeated, one that was interrupted goes on from its
last checkpoint in `--work`. What stands below the line `<!-- notes -->` of README.md is left as it is. Needs the
extra `plot`.

The recipe of Transformer-XL's 12 layers on enwik8 (unpack enwik8.zip first; the paper took 4 GPUs for days), for one
process and for four; everything that is not an option here is a field of TrainingArguments and given by `--training`:

    python scripts/train_lm.py --name enwik8 --text enwik8 --split 90000000 5000000 5000000 --layers 12 --hidden 512 \\
        --heads 8 --intermediate 2048 --dropout 0.1 --segment 512 --memory 512 --eval-memory 0 512 2100 --batch 22 \\
        --lr 2.5e-4 --warmup 0 --steps 400000 --training bf16=true max_grad_norm=0.25
    accelerate launch --num_processes 4 --use_fsdp scripts/train_lm.py … --batch 6

`--batch` rows are read by each process.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from benchmarking import markdown_table
from experiments import (
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
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainingArguments, logging, set_seed
from transformers.trainer_utils import get_last_checkpoint

from hf_relpos import SCHEMES, RelPosBertConfig, RelPosBertLMHeadModel
from hf_relpos.data.records import OPENERS
from hf_relpos.training.stream import IGNORED, SegmentDataset, StreamTrainer


MEMORY = "+memory"
UNKNOWN = "�"


# Data ---------------------------------------------------------------------------------------------------------------


def read_text(path: Path, unit: str) -> bytes | str:
    """A whole file, unpacked by its ending.

    Raises:
        ValueError: for a file that is not there, cannot be unpacked, is no UTF-8 (as characters), or is empty.
    """
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as file:
            found = file.read()
        found = found.decode("utf-8") if unit == "character" else found
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as {unit}s ({error}); give a text file") from None
    if not found:
        raise ValueError(f"{path}: is empty; give a file with text")
    return found


class Texts:
    """The texts as numbers.

    Attributes:
        parts: {"train", "valid" and perhaps "test": ids, (N,)}.
        vocabulary: number of different ids.
        unknown: of each part, the share of characters that the training text does not have.
    """

    def __init__(self, args: argparse.Namespace):
        """
        Raises:
            ValueError: for files that `read_text` refuses, and a split of more than there is.
        """
        if args.text:
            whole = read_text(args.text, args.unit)
            if sum(args.split) > len(whole):
                raise ValueError(
                    f"--split {' '.join(map(str, args.split))}: {sum(args.split):,} {args.unit}s, and {args.text} has "
                    f"{len(whole):,}; give smaller parts"
                )
            ends = np.cumsum([0, *args.split])
            names = ["train", "valid", "test"][: len(args.split)]
            texts = {name: whole[a:b] for name, a, b in zip(names, ends, ends[1:], strict=False)}
        else:
            paths = {"train": args.train, "valid": args.valid, "test": args.test}
            texts = {name: read_text(path, args.unit) for name, path in paths.items() if path}
        if args.unit == "byte":
            arrays = {name: np.frombuffer(text, np.uint8).astype(np.int64) for name, text in texts.items()}
            self.vocabulary, self.unknown = 256, dict.fromkeys(texts, 0.0)
        else:
            points = {name: np.frombuffer(text.encode("utf-32-le"), np.uint32) for name, text in texts.items()}
            known = np.unique(points["train"])
            at = {name: np.searchsorted(known, each) for name, each in points.items()}
            arrays = {
                name: np.where(known[each.clip(max=len(known) - 1)] == points[name], each, len(known))
                for name, each in at.items()
            }
            self.vocabulary = len(known) + 1
            self.unknown = {name: float((each == len(known)).mean()) for name, each in arrays.items()}
        self.parts = {name: torch.from_numpy(each) for name, each in arrays.items()}


class Segments(SegmentDataset):
    """Segments of one text, all of the same length, as batches of `rows` continue each other.

    With `apart` every segment is a document of its own, so that no memory reaches into it.
    """

    def __init__(self, text: torch.Tensor, rows: int, length: int, apart: bool, name: str):
        """
        Raises:
            ValueError: for a text too short for one segment in each row.
        """
        steps = (len(text) - 1) // (rows * length)
        if not steps:
            raise ValueError(
                f"the {name} text has {len(text):,} tokens, too few for a segment of {length} in each of {rows} rows; "
                "give more text, or a smaller --batch, --eval-batch or --segment"
            )
        used = text[: steps * rows * length + 1]
        super().__init__([used[:-1].tolist()], rows, length)
        self.targets = used[1:]  # of the last token, too
        self.apart = apart

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = super().__getitem__(index)
        if self.apart:
            item["position_ids"] = torch.arange(len(item["input_ids"]))
        return item


class Windows(Dataset):
    """Windows that overlap by half; but for the first one, what is scored is their second half."""

    def __init__(self, text: torch.Tensor, length: int):
        self.text, self.length, self.step = text, length, max(1, length // 2)

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1 - self.length) // self.step + 1)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin = index * self.step
        labels = self.text[begin + 1 : begin + 1 + self.length].clone()
        if index:
            labels[: self.length - self.step] = IGNORED
        ids = self.text[begin : begin + self.length]
        return {"input_ids": ids, "position_ids": torch.arange(self.length), "labels": labels, "shift_labels": labels}


class InOrder(Trainer):
    """Reads the training text in order, as a StreamTrainer does."""

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


# Runs ---------------------------------------------------------------------------------------------------------------


def has_memory(arm: str) -> bool:
    return arm.endswith(MEMORY)


def config_of(args: argparse.Namespace, vocabulary: int, arm: str, wider: int = 0) -> RelPosBertConfig:
    """The configuration of an arm, its feed-forward layers `wider` than asked for.

    Raises:
        ValueError: for sizes, options or memories that the scheme refuses.
    """
    scheme = arm.removesuffix(MEMORY)
    known = SCHEMES[scheme].options
    return RelPosBertConfig(
        vocab_size=vocabulary,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=args.intermediate + wider,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.attention_dropout,
        initializer_range=args.init,
        max_position_embeddings=args.segment,
        type_vocab_size=1,
        pad_token_id=None,
        position_embedding_type=scheme,
        position_options={key: value for key, value in args.options.items() if key in known},
        memory_length=args.memory if has_memory(arm) else 0,
        is_decoder=True,
        use_cache=False,
    )


def size_of(config: RelPosBertConfig) -> int:
    """Number of parameters."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in RelPosBertLMHeadModel(config).parameters())


def configs_of(args: argparse.Namespace, vocabulary: int, trained: int = 0) -> dict[str, RelPosBertConfig]:
    """The configurations of all arms, equally large but for half a feed-forward unit in each layer.

    Args:
        trained: parameters of the arms that were trained before; 0 if there are none.

    Raises:
        ValueError: for an arm larger than those.
    """
    sizes = {arm: size_of(config_of(args, vocabulary, arm)) for arm in args.arms}
    unit = args.layers * (2 * args.hidden + 1)  # what one feed-forward unit adds in all layers
    largest = max(sizes, key=sizes.__getitem__)
    if trained and sizes[largest] > trained + unit:
        raise ValueError(
            f"--arms {largest}: has {sizes[largest]:,} parameters, and the arms that were trained before {trained:,}; "
            "train all of them anew with --again, or under another --name"
        )
    whole = trained or sizes[largest]
    return {arm: config_of(args, vocabulary, arm, round((whole - size) / unit)) for arm, size in sizes.items()}


def training_arguments(args: argparse.Namespace, folder: Path, seed: int) -> TrainingArguments:
    """
    Raises:
        ValueError: for fields of `--training` that TrainingArguments does not have, or refuses.
    """
    mine = {
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
        return TrainingArguments(**{**mine, **args.training})
    except (TypeError, ValueError) as error:
        raise ValueError(f"--training: {error}") from None


def score(trainer: Trainer, dataset: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits of every token, and which count, both (segments, L)."""
    found = trainer.predict(dataset)
    return torch.from_numpy(found.predictions) / math.log(2), torch.from_numpy(found.label_ids) != IGNORED


def losses_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Nats of every token, (B, L), from logits (B, L, vocabulary); 0 where labels say IGNORED."""
    return cross_entropy(logits.float().transpose(1, 2), labels, reduction="none", ignore_index=IGNORED)


def measure(trainer: Trainer, args: argparse.Namespace, text: torch.Tensor, name: str, memory: bool) -> dict:
    """Bits per token of a text, read in several ways."""
    rows = args.eval_batch * trainer.args.world_size
    config = trainer.model.config
    apart, _ = score(trainer, Segments(text, rows, args.segment, True, name))
    found = {"apart": float(apart.mean()), "tokens": apart.numel()}
    if not memory:
        began = time.process_time()
        windows, counted = score(trainer, Windows(text, args.segment))
        found |= {"windows": float(windows[counted].mean()), "windows_seconds": time.process_time() - began}
        return {**found, "bits": found["apart"], "by_place": apart.mean(0).tolist()}
    by_length = {0: found["apart"]}
    for length in sorted({args.memory, *args.eval_memory} - {0}):
        config.memory_length = length
        bits, _ = score(trainer, Segments(text, rows, args.segment, False, name))
        by_length[length] = float(bits.mean())
        if length == args.memory:
            found |= {"bits": by_length[length], "by_place": bits.mean(0).tolist()}
    config.memory_length = args.memory
    return {**found, "by_memory": by_length, "by_place_apart": apart.mean(0).tolist()}


def run(texts: Texts, args: argparse.Namespace, config: RelPosBertConfig, arm: str, seed: int) -> dict:
    """Train one model, and measure it."""
    began, clock = time.process_time(), time.perf_counter()
    folder = args.work / args.name / arm / str(seed)
    settings = training_arguments(args, folder, seed)
    set_seed(seed)
    model = RelPosBertLMHeadModel(config)
    rows, memory = args.batch * settings.world_size, has_memory(arm)
    trainer = (StreamTrainer if memory else InOrder)(
        model=model,
        args=settings,
        train_dataset=Segments(texts.parts["train"], rows, args.segment, not memory, "training"),
        preprocess_logits_for_metrics=losses_of,
    )
    last = get_last_checkpoint(folder) if folder.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    trained, seconds = time.process_time() - began, time.perf_counter() - clock
    trainer.save_model(str(folder / "model"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "parameters": size_of(config),
        "intermediate": config.intermediate_size,
        "steps": trainer.state.global_step,
        "processes": settings.world_size,
        "resumed": last is not None,
        "train_bits": statistics.mean(losses[-max(1, len(losses) // 10) :]) / math.log(2),
        "curve": [round(loss / math.log(2), 4) for loss in losses],
        "train_cpu_seconds": round(trained, 1),
        "train_seconds": round(seconds, 1),
    }
    for name, text in texts.parts.items():
        if name != "train":
            result[name] = measure(trainer, args, text, name, memory)
    return json.loads(json.dumps(result), parse_float=lambda number: round(float(number), 5))


# Card ---------------------------------------------------------------------------------------------------------------


def mean(results: Sequence[dict], part: str, figure: str) -> np.ndarray:
    """Mean over seeds of a figure, or of a list of figures."""
    return np.mean([result[part][figure] for result in results], axis=0)


def section(name: str, found: dict) -> str:
    """What the card says of one data set."""
    about, arms = found["about"], by_arm(found["runs"])
    unit, segment = found["settings"]["unit"], found["settings"]["segment"]
    edge = max(1, segment // 8)
    lines = [f"## {name}\n", *(f"- {key}: {value}" for key, value in about.items()), ""]
    for part in ("valid", "test"):
        if not all(part in result for results in arms.values() for result in results):
            continue
        rows = []
        for arm, results in arms.items():
            by_place = mean(results, part, "by_place")
            memory = has_memory(arm)
            rows.append(
                [
                    f"`{arm}`",
                    spread([result[part]["bits"] for result in results], 3),
                    f"{by_place[:edge].mean():.3f}",
                    f"{by_place[-edge:].mean():.3f}",
                    f"{mean(results, part, 'apart'):.3f}",
                    "" if memory else f"{mean(results, part, 'windows'):.3f}",
                    f"{np.mean([result['train_bits'] for result in results]):.3f}",
                    f"{results[0]['parameters']:,}",
                    f"{np.mean([result['train_cpu_seconds'] for result in results]) / 60:.1f}",
                    str(len(results)),
                ]
            )
        head = [
            "arm",
            f"bits per {unit}, {part}",
            f"first {edge} of a segment",
            f"last {edge}",
            "segments apart",
            "windows half over",
            "training",
            "parameters",
            "CPU min",
            "seeds",
        ]
        lines += [markdown_table(head, rows)]
        lengths = {arm: results[0][part]["by_memory"] for arm, results in arms.items() if has_memory(arm)}
        if lengths:
            columns = sorted({int(length) for each in lengths.values() for length in each})
            rows = [
                [f"`{arm}`", *(f"{np.mean([r[part]['by_memory'][str(n)] for r in arms[arm]]):.3f}" for n in columns)]
                for arm in lengths
            ]
            lines += [
                f"Bits per {unit} by the length of the memory that is read:\n",
                markdown_table(["arm", *map(str, columns)], rows),
            ]
    return "\n".join([*lines, f"![bits by place in the segment]({name}.png)\n"])


def card(content: dict) -> str:
    """README.md: every data set."""
    intro = (
        "# Language models of characters: what a memory of segments is good for\n\n"
        "Written by `scripts/train_lm.py`; every run is in [results.json](results.json). All arms of a table have the "
        "same batches, steps and number of parameters. An arm with `+memory` carries the layer inputs of the last "
        "segments along; the others begin every segment anew. `segments apart`: the same model, reading without a "
        "memory. `windows half over`: a model without memory in windows that overlap by half, at twice the cost. "
        "Training: the last tenth of the steps. Mean ± standard deviation over seeds.\n\n"
    )
    return intro + "\n".join(section(name, found) for name, found in content.items())


def plot(name: str, found: dict, path: Path) -> None:
    """Bits by place in the segment, means of sixteenths of it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings = found["settings"]
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    width = max(1, settings["segment"] // 16)
    centres = np.arange(width / 2, settings["segment"] - settings["segment"] % width, width)

    def curve(values: np.ndarray, label: str, **style) -> None:
        axes.plot(centres, values[: len(centres) * width].reshape(-1, width).mean(1), label=label, **style)

    for number, (arm, results) in enumerate(by_arm(found["runs"]).items()):
        style = {"color": f"C{number}", "marker": ".", "linewidth": 1.5}
        curve(mean(results, "valid", "by_place"), arm, **style)
        if has_memory(arm):
            curve(mean(results, "valid", "by_place_apart"), f"{arm}, read without", **style, linestyle=":")
    unit = settings["unit"]
    axes.set(xlabel=f"place in the segment, {unit}s", ylabel=f"bits per {unit}", title=f"{name}, validation text")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    figure.savefig(unfinished, dpi=110, format="png", metadata={"Software": None})
    unfinished.replace(path)
    pyplot.close(figure)


# Command line -------------------------------------------------------------------------------------------------------


def about(args: argparse.Namespace, texts: Texts, configs: dict, arguments: Sequence[str]) -> dict[str, str]:
    """Where, when and how this was measured."""

    def size(name: str) -> str:
        strange = f", {texts.unknown[name]:.2%} of them unknown" if texts.unknown[name] else ""
        return f"{len(texts.parts[name]):,} {args.unit}s{strange}"

    rows = args.batch * PartialState().num_processes
    tokens = args.steps * rows * args.segment
    inner = ", ".join(f"{config.intermediate_size} ({arm})" for arm, config in configs.items())
    return {
        "command": f"`{command('train_lm.py', arguments)}`",
        "text": "; ".join(f"{name} {size(name)}" for name in texts.parts) + f"; vocabulary {texts.vocabulary}",
        "model": f"{args.layers} layers, {args.hidden} wide, {args.heads} heads, feed-forward {inner}, LayerNorm "
        f"after the residual sum; dropout {args.dropout}, of attention {args.attention_dropout}; initial weights N(0, "
        f"{args.init}²)",
        "budget": f"{args.steps:,} steps of {rows} segments of {args.segment}, "
        f"{tokens / len(texts.parts['train']):.1f} times through the text; memory {args.memory}; AdamW, rate "
        f"{args.lr} after a warm-up of {args.warmup:.0%}, falling to 0 by a cosine, weight decay {args.weight_decay}",
        **circumstances(),
    }


def pair(text: str) -> tuple[str, object]:
    """KEY=VALUE, the value as JSON or else as it stands."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: write KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "train_lm", "lm", 1, "for checkpoints and models")
    parser.add_argument("--train", type=Path, help="training text")
    parser.add_argument("--valid", type=Path, help="validation text")
    parser.add_argument("--test", type=Path, help="test text, if wanted")
    parser.add_argument("--text", type=Path, help="one file for all of them, to be split")
    parser.add_argument(
        "--split", type=count, nargs="+", help="sizes of its training, validation and perhaps test part"
    )
    parser.add_argument("--unit", choices=("byte", "character"), default="byte")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=["absolute", "transformer_xl", f"transformer_xl{MEMORY}"],
        help=f"schemes, with {MEMORY} those with a memory",
    )
    parser.add_argument("--layers", type=count, default=4)
    parser.add_argument("--hidden", type=count, default=192)
    parser.add_argument("--heads", type=count, default=4)
    parser.add_argument("--intermediate", type=count, default=768)
    parser.add_argument("--dropout", type=share, default=0.0)
    parser.add_argument("--attention-dropout", type=share, default=0.0)
    parser.add_argument("--init", type=float, default=0.05, help="standard deviation of the initial weights")
    parser.add_argument("--options", type=pair, nargs="+", default=[], metavar="KEY=VALUE", help="of the schemes")
    parser.add_argument("--segment", type=count, default=128, help="tokens of a segment")
    parser.add_argument("--memory", type=count, default=128, help="tokens of the memory, in training")
    parser.add_argument("--eval-memory", type=natural, nargs="+", default=[], help="other lengths to measure with")
    parser.add_argument("--steps", type=count, default=2000)
    parser.add_argument("--batch", type=count, default=16, help="segments in a step of each process")
    parser.add_argument("--eval-batch", type=count, default=4, help="segments side by side in measuring, likewise")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=share, default=0.1, help="share of the steps")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument(
        "--training", type=pair, nargs="+", default=[], metavar="KEY=VALUE", help="more fields of TrainingArguments"
    )
    args = parser.parse_args(arguments)
    args.arms = list(dict.fromkeys(args.arms))
    args.options, args.training = dict(args.options), dict(args.training)
    for arm in args.arms:
        if arm.removesuffix(MEMORY) not in SCHEMES:
            parser.error(f"--arms {arm}: no such scheme; known: {', '.join(SCHEMES)}, each also with {MEMORY}")
    known = {key for arm in args.arms for key in SCHEMES[arm.removesuffix(MEMORY)].options}
    for key in args.options:
        if key not in known:
            parser.error(f"--options {key}: no arm has it; they have {', '.join(sorted(known)) or 'none'}")
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


def prepare(args: argparse.Namespace) -> tuple[Texts, dict[str, RelPosBertConfig], dict, dict]:
    """All that can be wrong, before anything is written: texts, configurations, settings, and what was stored.

    Raises:
        ValueError: with what is.
    """
    texts = Texts(args)
    processes = PartialState().num_processes
    for name, text in texts.parts.items():
        batch = args.batch if name == "train" else args.eval_batch
        Segments(text, batch * processes, args.segment, True, name)
    for arm in args.arms:
        config_of(args, texts.vocabulary, arm)
    training_arguments(args, args.work, 0)
    files = {
        key: path and fingerprint(path)
        for key, path in vars(args).items()
        if key in ("train", "valid", "test", "text")
    }
    settings = settings_of(args, ["arms"], **files, processes=processes)
    content = stored_in(args.out / "results.json", args.name, settings, args.again)
    runs = content.get(args.name, {"runs": {}})["runs"].values()
    trained = max((run["result"]["parameters"] for run in runs), default=0)
    return texts, configs_of(args, texts.vocabulary, trained), settings, content


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    try:
        texts, configs, settings, content = prepare(args)
    except ValueError as error:
        sys.exit(f"Error: {error}")
    state = PartialState()
    found = content.setdefault(args.name, {"settings": settings, "about": {}, "runs": {}})
    found["about"] = about(args, texts, configs, given)
    for seed in range(args.seeds):
        for arm in args.arms:
            key = f"{arm}/{seed}"
            if key in found["runs"]:
                if state.is_main_process:
                    print(f"{key}: there already")
                continue
            result = run(texts, args, configs[arm], arm, seed)
            found["runs"][key] = {"date": found["about"]["date"], "result": result}
            if state.is_main_process:
                save(args.out, content, card(content))
                plot(args.name, found, args.out / f"{args.name}.png")
                print(f"{key}: {result['valid']['bits']:.3f} bits per {args.unit}", flush=True)
    if state.is_main_process:
        save(args.out, content, card(content))
        plot(args.name, found, args.out / f"{args.name}.png")
        print(section(args.name, found))


if __name__ == "__main__":
    main()
