"""Does each scheme learn what it claims? Small encoders, trained from scratch on rows of 8 to 32 tokens.

    python scripts/probe_schemes.py                                  # every scheme, 3 seeds; prints the table
    python scripts/probe_schemes.py --schemes shaw,none --seeds 1    # a quick look
    python scripts/probe_schemes.py --out model_cards/probes/results.json --card model_cards/probes/README.md

Rows are [CLS] x … x [SEP] of random letters, with one A and one B among them. One model learns four tasks at once:

- back: which token stands k = 3 places to the left; the padding token where there is none.
- reverse: which token stands in the mirrored place, L − 1 − i.
- first: whether a letter has no copy to its left; the mean of the accuracies on the two classes.
- order: at A and at B, whether A comes before B.

They are tested on fresh rows of 32, 64 and 128 tokens. `--out` is written after every run; runs that it holds from the
same settings are not repeated.
"""

import argparse
import datetime
import json
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from torch import nn

from hf_relpos import SCHEMES, RelPosBertConfig, RelPosBertForTokenClassification, __version__


PAD, CLS, SEP, A, B = range(5)
LETTERS = 16
VOCABULARY = B + 1 + LETTERS
BACK = 3
CLASSES = {"back": VOCABULARY, "reverse": VOCABULARY, "first": 2, "order": 2}
SHORTEST, TRAINED = 8, 32
LENGTHS = (32, 64, 128)
TEST_TOKENS = 16384  # of each length
IGNORE = -100
# What is probed besides the schemes with their default options: name, then position_embedding_type and its options.
VARIANTS = {
    "none": ("t5", {}),  # with its table frozen at zero
    "absolute": ("absolute", {"beyond": "clip"}),
    "alibi (asymmetric)": ("alibi", {"variant": "asymmetric"}),
}


def known() -> dict[str, tuple[str, dict]]:
    """The models that can be probed: every scheme that needs only tokens, and the variants."""
    plain = {name: (name, {}) for name in sorted(SCHEMES) if not SCHEMES[name].requires}
    return {"none": VARIANTS["none"], **plain, **VARIANTS}


def rows(count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Random inputs, (count, length)."""
    ids = torch.randint(B + 1, VOCABULARY, (count, length), generator=generator)
    ids[:, 0], ids[:, -1] = CLS, SEP
    places = 1 + torch.rand(count, length - 2, generator=generator).argsort(-1)[:, :2]
    ids.scatter_(1, places, torch.tensor([[A, B]]).expand(count, 2))
    return ids


def labels(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What each task wants, each (B, L); IGNORE where it wants nothing."""
    inside = (ids != CLS) & (ids != SEP)
    letter = ids > B
    place = torch.arange(ids.shape[1])
    copies = (ids[:, :, None] == ids[:, None, :]) & (place[:, None] > place[None, :])
    a_first = (ids == A).int().argmax(-1) < (ids == B).int().argmax(-1)
    wanted = {
        "back": (nn.functional.pad(ids, (BACK, 0), value=PAD)[:, : ids.shape[1]], inside),
        "reverse": (ids.flip(-1), inside),
        "first": ((~copies.any(-1)).long(), letter),
        "order": (a_first.long()[:, None].expand_as(ids), (ids == A) | (ids == B)),
    }
    return {task: label.masked_fill(~where, IGNORE) for task, (label, where) in wanted.items()}


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
    """A model trained on `args.steps` batches; all rows of a batch have the same length."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = build(name, args).train()
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.lr, weight_decay=0.01, betas=(0.9, 0.98), fused=True)
    warmup = max(1, args.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (args.steps - step) / max(1, args.steps - warmup))
    )
    for _ in range(args.steps):
        length = int(torch.randint(SHORTEST, TRAINED + 1, (), generator=generator))
        ids = rows(args.batch, length, generator)
        logits, wanted = scores(model, ids), labels(ids)
        loss = sum(
            nn.functional.cross_entropy(logits[task].flatten(0, 1), wanted[task].flatten(), ignore_index=IGNORE)
            for task in tasks
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def accuracy(task: str, predicted: torch.Tensor, wanted: torch.Tensor) -> float:
    """Share of right answers; for `first` the mean of the shares on its two classes."""
    classes = [wanted == 0, wanted == 1] if task == "first" else [wanted != IGNORE]
    return sum((predicted[where] == wanted[where]).float().mean().item() for where in classes) / len(classes)


@torch.no_grad()
def test(model: nn.Module, tasks: list[str]) -> dict[str, dict[str, float]]:
    """Accuracy by task and length, on rows that are the same for every model."""
    found = {task: {} for task in tasks}
    for length in LENGTHS:
        generator = torch.Generator().manual_seed(10_000 + length)
        hits = {task: ([], []) for task in tasks}
        for _ in range(4):
            ids = rows(TEST_TOKENS // length // 4, length, generator)
            logits, wanted = scores(model, ids), labels(ids)
            for task in tasks:
                hits[task][0].append(logits[task].argmax(-1))
                hits[task][1].append(wanted[task])
        for task, (predicted, wanted) in hits.items():
            found[task][str(length)] = accuracy(task, torch.cat(predicted), torch.cat(wanted))
    return found


def summary(runs: list[dict], name: str, task: str, length: int) -> tuple[float, float] | None:
    """Mean and standard deviation over the seeds (0 for a single one), or None without runs."""
    values = [run["accuracy"][task][str(length)] for run in runs if run["scheme"] == name]
    return (statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0) if values else None


def table(runs: list[dict], tasks: list[str]) -> str:
    """Markdown: one line per scheme, percent right at each length, mean ± standard deviation."""
    names = list(dict.fromkeys(run["scheme"] for run in runs))
    names.sort(key=lambda name: (name != "none", name))
    head = ["scheme", *(f"{task} {length}" for task in tasks for length in LENGTHS)]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---|" * (len(head) - 1)]
    for name in names:
        cells = [summary(runs, name, task, length) for task in tasks for length in LENGTHS]
        lines.append(f"| `{name}` | " + " | ".join(f"{100 * m:.0f} ± {100 * s:.0f}" for m, s in cells) + " |")
    return "\n".join(lines) + "\n"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemes", default="all", help=f"comma separated, of: {', '.join(known())}")
    parser.add_argument("--tasks", default=",".join(CLASSES), help="comma separated; they are learned together")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--init", type=float, default=0.1, help="initializer_range")
    parser.add_argument("--minutes", type=float, default=19.0, help="no run is begun after this time")
    parser.add_argument("--out", type=Path, help="JSON with every run")
    parser.add_argument("--card", type=Path, help="Markdown with the table and what it shows")
    args = parser.parse_args(arguments)
    args.schemes = list(known()) if args.schemes == "all" else args.schemes.split(",")
    args.tasks = args.tasks.split(",")
    for given, possible in ((args.schemes, known()), (args.tasks, CLASSES)):
        for name in given:
            if name not in possible:
                parser.error(f"{name!r} is unknown; known: {', '.join(possible)}")
    return args


def main(arguments: list[str] | None = None) -> list[dict]:
    """Train and test; returns the runs."""
    args = parse(arguments)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    same = {key: getattr(args, key) for key in ("tasks", "steps", "batch", "hidden", "layers", "heads", "lr", "init")}
    runs = []
    if args.out and args.out.exists():
        stored = json.loads(args.out.read_text(encoding="utf-8"))
        runs = stored["runs"] if stored["settings"] == same else []
    done = {(run["scheme"], run["seed"]) for run in runs}
    start = time.monotonic()
    for seed in range(args.seeds):
        for name in args.schemes:
            if (name, seed) in done or time.monotonic() - start > 60 * args.minutes:
                continue
            began = time.process_time()
            found = test(train(name, seed, args.tasks, args), args.tasks)
            took = round(time.process_time() - began, 1)
            runs.append({"scheme": name, "seed": seed, "seconds": took, "accuracy": found})
            shown = "  ".join(task + "".join(f"{100 * v:6.1f}" for v in found[task].values()) for task in args.tasks)
            print(f"{name:20} seed {seed} {took:5.1f} s  {shown}", file=sys.stderr, flush=True)
            if args.out:
                about = {
                    "date": datetime.date.today().isoformat(),
                    "command": shlex.join(["python", "scripts/probe_schemes.py", *(arguments or sys.argv[1:])]),
                    "machine": f"{platform.system()} {platform.machine()}, 1 CPU thread",
                    "versions": f"hf_relpos {__version__}, torch {torch.__version__}, "
                    f"transformers {transformers.__version__}, Python {platform.python_version()}",
                }
                args.out.write_text(json.dumps({**about, "settings": same, "runs": runs}, indent=1) + "\n")
    print(table(runs, args.tasks))
    return runs


if __name__ == "__main__":
    main()
