"""Does each scheme learn what it claims? Small encoders, trained from scratch on rows of 8 to 32 tokens.

    python scripts/probe_schemes.py                                  # every scheme, 3 seeds; prints the table
    python scripts/probe_schemes.py --schemes shaw,none --seeds 1    # a quick look
    python scripts/probe_schemes.py --out docs/results/probes/results.json --card docs/results/probes/README.md

Rows are [CLS] x … x [SEP] of random letters, with one A and one B among them. One model learns four tasks at once:

- back: the token k = 3 positions to the left; the padding token where there is none.
- reverse: the token at the mirrored position, L − 1 − i.
- first: whether a letter has no copy to its left; the mean of the accuracies on the two classes.
- order: at A and at B, whether A comes before B.

They are tested on fresh rows of 32, 64 and 128 tokens. `--out` is written after every run; runs that it holds with the
same settings are not repeated. Text of `--card` below the line `<!-- notes -->` is kept.
"""

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch
from experiments.measuring import utc_now
from experiments.reports import markdown_table, with_notes
from experiments.results import conditions
from torch import nn
from transformers import logging

from hf_relpos import SCHEMES, RelPosBertConfig, RelPosBertForTokenClassification
from hf_relpos.data.masking import IGNORE_INDEX
from hf_relpos.files import write_json, write_text


PAD, CLS, SEP, A, B = range(5)
LETTERS = 16
VOCABULARY = B + 1 + LETTERS
BACK = 3
CLASSES = {"back": VOCABULARY, "reverse": VOCABULARY, "first": 2, "order": 2}
SHORTEST, TRAINED = 8, 32
LENGTHS = (32, 64, 128)
TEST_TOKENS = 16384  # of each length
# What is probed besides the schemes with their default options: position_embedding_type and position_options.
VARIANTS = {
    "none": ("t5", {}),  # with its table frozen at zero
    "absolute": ("absolute", {"out_of_range": "clip"}),
    "alibi (asymmetric)": ("alibi", {"variant": "asymmetric"}),
    "t5 (max_distance 32)": ("t5", {"max_distance": TRAINED}),
}
SETTINGS = ("tasks", "steps", "batch", "hidden", "layers", "heads", "lr", "init")
GOOD = 0.9  # mean accuracy from which a task counts as solved
# Claims about the variants; about a scheme with its default options, its `extrapolation_claim`.
VARIANT_CLAIMS = {
    "none": "control: no positions at all",
    "alibi (asymmetric)": "a variant for encoders; the paper is about causal models",
    "t5 (max_distance 32)": "as `t5`, but every bucket is trained",
}
CARD = """# Probes: what each scheme learns, and what is left of it on longer rows

Written by `{command}` on {date};
{versions}; {machine}.
All {count} runs took {minutes:.1f} CPU minutes; seeds 0 … {last_seed}. Every run: [results.json](results.json).

- **Model**: `RelPosBertForTokenClassification`, {layers} layers, hidden size {hidden}, {heads} heads, P = 32, default
  options unless the table says otherwise; `absolute` has `out_of_range="clip"`, so that longer rows run.
- **Training**: {steps} batches of {batch} rows, every other batch of 32 tokens, the others of 8 to 32; AdamW, rate
  {lr}; all four tasks at once.
- **Rows**: [CLS], random letters out of 16 with one A and one B among them, [SEP].
- **back**: the token 3 positions to the left. **reverse**: the token at the mirrored position. **first**: has this
  letter no copy to its left (mean of the accuracies on the two classes). **order**: does A come before B.
- **Test**: fresh rows of 32, 64 and 128 tokens, the same for all. `none` is the control: a T5 table frozen at zero.

Percent right, mean ± standard deviation over {seeds} seeds:

{table}
## What holds, and what the papers say

A task counts as solved from a mean of {good} % on. Papers in one line each; most of them measure language models,
which is not what is measured here.

{verdicts}"""


def known() -> dict[str, tuple[str, dict]]:
    """The models that can be probed: every scheme that needs only tokens, and the variants."""
    plain = {name: (name, {}) for name in sorted(SCHEMES) if not SCHEMES[name].required_inputs}
    return {"none": VARIANTS["none"], **plain, **VARIANTS}


def claim(name: str) -> str:
    """What the paper of a probed model says about longer inputs."""
    return VARIANT_CLAIMS.get(name) or SCHEMES[known()[name][0]].extrapolation_claim


def rows(count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Random inputs, (count, length)."""
    ids = torch.randint(B + 1, VOCABULARY, (count, length), generator=generator)
    ids[:, 0], ids[:, -1] = CLS, SEP
    positions = 1 + torch.rand(count, length - 2, generator=generator).argsort(-1)[:, :2]
    ids.scatter_(1, positions, torch.tensor([[A, B]]).expand(count, 2))
    return ids


def labels(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Labels of each task, (B, L); IGNORE_INDEX at tokens without one."""
    inside = (ids != CLS) & (ids != SEP)
    letter = ids > B
    position = torch.arange(ids.shape[1])
    copies = (ids[:, :, None] == ids[:, None, :]) & (position[:, None] > position[None, :])
    a_first = (ids == A).int().argmax(-1) < (ids == B).int().argmax(-1)
    tasks = {
        "back": (nn.functional.pad(ids, (BACK, 0), value=PAD)[:, : ids.shape[1]], inside),
        "reverse": (ids.flip(-1), inside),
        "first": ((~copies.any(-1)).long(), letter),
        "order": (a_first.long()[:, None].expand_as(ids), (ids == A) | (ids == B)),
    }
    return {task: label.masked_fill(~labelled, IGNORE_INDEX) for task, (label, labelled) in tasks.items()}


def build(name: str, args: argparse.Namespace) -> RelPosBertForTokenClassification:
    """A fresh model; its labels are those of all tasks, one after the other."""
    scheme, options = known()[name]
    config = RelPosBertConfig(
        position_embedding_type=scheme,
        position_options=options,
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=2 * args.hidden,
        max_position_embeddings=TRAINED,
        initializer_range=args.init,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=sum(CLASSES.values()),
        attn_implementation="eager",
    )
    model = RelPosBertForTokenClassification(config)
    if name == "none":
        table = model.bert.encoder.distance_embedding.relative_attention_bias.weight
        table.requires_grad_(False).zero_()
    return model


def scores(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The logits of each task, (B, L, classes)."""
    return dict(zip(CLASSES, model(input_ids=ids).logits.split(list(CLASSES.values()), dim=-1), strict=True))


def train(name: str, seed: int, tasks: list[str], args: argparse.Namespace) -> nn.Module:
    """A model trained on `args.steps` batches; rows of a batch are equally long, those of every other batch 32."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = build(name, args).train()
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.lr, weight_decay=0.01, betas=(0.9, 0.98), fused=True)
    warmup = max(1, args.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (args.steps - step) / max(1, args.steps - warmup))
    )
    for step in range(args.steps):
        length = int(torch.randint(SHORTEST, TRAINED + 1, (), generator=generator)) if step % 2 else TRAINED
        ids = rows(args.batch, length, generator)
        logits, target = scores(model, ids), labels(ids)
        loss = sum(
            nn.functional.cross_entropy(logits[task].flatten(0, 1), target[task].flatten(), ignore_index=IGNORE_INDEX)
            for task in tasks
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def accuracy(task: str, predicted: torch.Tensor, target: torch.Tensor) -> float:
    """Fraction of correct labels; for `first` the mean of the fractions on its two classes."""
    classes = [target == 0, target == 1] if task == "first" else [target != IGNORE_INDEX]
    return sum((predicted[where] == target[where]).float().mean().item() for where in classes) / len(classes)


@torch.no_grad()
def test(model: nn.Module, tasks: list[str]) -> dict[str, dict[str, float]]:
    """Accuracy by task and length, on rows that are the same for every model."""
    accuracies: dict[str, dict[str, float]] = {task: {} for task in tasks}
    for length in LENGTHS:
        generator = torch.Generator().manual_seed(10_000 + length)
        predicted: dict[str, list[torch.Tensor]] = {task: [] for task in tasks}
        targets: dict[str, list[torch.Tensor]] = {task: [] for task in tasks}
        for _ in range(4):
            ids = rows(TEST_TOKENS // length // 4, length, generator)
            logits, target = scores(model, ids), labels(ids)
            for task in tasks:
                predicted[task].append(logits[task].argmax(-1))
                targets[task].append(target[task])
        for task in tasks:
            accuracies[task][str(length)] = accuracy(task, torch.cat(predicted[task]), torch.cat(targets[task]))
    return accuracies


def summary(runs: list[dict], name: str, task: str, length: int) -> tuple[float, float] | None:
    """Mean and standard deviation over the seeds (0 for a single one), or None without runs."""
    values = [run["accuracy"][task][str(length)] for run in runs if run["scheme"] == name]
    return (statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0) if values else None


def probed(runs: list[dict]) -> list[str]:
    """Names in the order of the tables, the control first."""
    return sorted({run["scheme"] for run in runs}, key=lambda name: (name != "none", name))


def table(runs: list[dict], tasks: list[str]) -> str:
    """Markdown: one line per scheme, percent correct at each length, mean ± standard deviation."""
    lines = []
    for name in probed(runs):
        cells = [summary(runs, name, task, length) for task in tasks for length in LENGTHS]
        lines.append([f"`{name}`", *(f"{100 * mean:.0f} ± {100 * deviation:.0f}" for mean, deviation in cells)])
    return markdown_table(["scheme", *(f"{task} {length}" for task in tasks for length in LENGTHS)], lines)


def solved(runs: list[dict], name: str, task: str, length: int) -> bool:
    """Whether the mean accuracy reaches GOOD."""
    measured = summary(runs, name, task, length)
    return measured is not None and measured[0] >= GOOD


def verdicts(runs: list[dict], tasks: list[str]) -> str:
    """Markdown: what each scheme solves at 32, what is left of it at 64 and 128, and the claim of its paper."""
    lines = []
    for name in probed(runs):
        learned = [task for task in tasks if solved(runs, name, task, TRAINED)]
        kept = [[task for task in learned if solved(runs, name, task, length)] for length in LENGTHS]
        lines.append([f"`{name}`", *(", ".join(tasks) or "–" for tasks in kept), claim(name)])
    columns = ["scheme", "solved at 32", "of these at 64", "of these at 128", "what its paper says"]
    return markdown_table(columns, lines)


def card(stored: dict) -> str:
    """The Markdown file, without its notes: how it was measured, and the tables."""
    runs, settings = stored["runs"], stored["settings"]
    seeds = len({run["seed"] for run in runs})
    return CARD.format(
        **stored | settings,
        seeds=seeds,
        last_seed=seeds - 1,
        count=len(runs),
        minutes=sum(run["seconds"] for run in runs) / 60,
        good=round(100 * GOOD),
        table=table(runs, settings["tasks"]),
        verdicts=verdicts(runs, settings["tasks"]),
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemes", default="all", help=f"comma separated, of: {', '.join(known())}")
    parser.add_argument("--tasks", default=",".join(CLASSES), help="comma separated; they are learned together")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=48)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--init", type=float, default=0.1, help="initializer_range")
    parser.add_argument("--minutes", type=float, default=19.0, help="no run is started after this time")
    parser.add_argument("--out", type=Path, help="JSON with every run")
    parser.add_argument("--card", type=Path, help="Markdown with the tables, and notes")
    args = parser.parse_args(arguments)
    args.schemes = list(known()) if args.schemes == "all" else args.schemes.split(",")
    args.tasks = args.tasks.split(",")
    for names, possible in ((args.schemes, known()), (args.tasks, CLASSES)):
        for name in names:
            if name not in possible:
                parser.error(f"{name!r} is unknown; known: {', '.join(possible)}")
    return args


def main(arguments: list[str] | None = None) -> list[dict]:
    """Train and test; returns the runs."""
    args = parse(arguments)
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    settings = {key: getattr(args, key) for key in SETTINGS}
    arguments = sys.argv[1:] if arguments is None else arguments
    stored = {
        "date": utc_now().partition(" ")[0],
        "command": shlex.join(["python", "scripts/probe_schemes.py", *arguments]),
        "machine": f"{platform.system()} {platform.machine()}, one CPU thread",
        "versions": conditions()["versions"],
        "settings": settings,
        "runs": [],
    }
    if args.out and args.out.exists():
        before = json.loads(args.out.read_text(encoding="utf-8"))
        if before["settings"] == settings:
            stored["runs"] = before["runs"]
    runs = stored["runs"]
    done = {(run["scheme"], run["seed"]) for run in runs}
    start = time.monotonic()
    for seed in range(args.seeds):
        for name in args.schemes:
            if (name, seed) in done or time.monotonic() - start > 60 * args.minutes:
                continue
            cpu_start = time.process_time()
            accuracies = test(train(name, seed, args.tasks, args), args.tasks)
            seconds = round(time.process_time() - cpu_start, 1)
            runs.append({"scheme": name, "seed": seed, "seconds": seconds, "accuracy": accuracies})
            shown = "  ".join(
                task + "".join(f"{100 * value:6.1f}" for value in by_length.values())
                for task, by_length in accuracies.items()
            )
            print(f"{name:20} seed {seed} {seconds:5.1f} s  {shown}", file=sys.stderr, flush=True)
            if args.out:
                write_json(args.out, stored)
    if args.out:  # also when there was nothing left to run
        write_json(args.out, stored)
    print(table(runs, args.tasks))
    if args.card:
        write_text(args.card, with_notes(card(stored), args.card))
    return runs


if __name__ == "__main__":
    main()
