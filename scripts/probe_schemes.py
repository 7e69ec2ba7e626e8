"""Does each scheme learn what it claims? Small encoders, trained from scratch on rows of 8 to 32 tokens.

    python scripts/probe_schemes.py                                  # every scheme, 3 seeds; prints the table
    python scripts/probe_schemes.py --schemes shaw,none --seeds 1    # a quick look
    python scripts/probe_schemes.py --out docs/results/probes/results.json --card docs/results/probes/README.md

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
    "absolute": ("absolute", {"out_of_range": "clip"}),
    "alibi (asymmetric)": ("alibi", {"variant": "asymmetric"}),
    "t5 (max_distance 32)": ("t5", {"max_distance": TRAINED}),
}


GOOD = 0.9  # mean accuracy from which a task counts as solved
# What is said of the variants; of a scheme with its default options, its `extrapolation_claim`.
VARIANT_CLAIMS = {
    "none": "control: no positions at all",
    "alibi (asymmetric)": "a variant for encoders; the paper is about causal models",
    "t5 (max_distance 32)": "as `t5`, but every bucket is trained",
}


CARD = """# Probes: what each scheme learns, and what is left of it on longer rows

Written by `{command}` on {date};
{versions}; {machine}.
All {count} runs took {took:.1f} CPU minutes; seeds 0 … {last_seed}. Every run: [results.json](results.json).

- **Model**: `RelPosBertForTokenClassification`, {layers} layers, hidden size {hidden}, {heads} heads, P = 32, default
  options unless the table says otherwise; `absolute` has `out_of_range="clip"`, so that longer rows run.
- **Training**: {steps} batches of {batch} rows, every other batch of 32 tokens, the others of 8 to 32; AdamW, rate
  {lr}; all four tasks at once.
- **Rows**: [CLS], random letters out of 16 with one A and one B among them, [SEP].
- **back**: the token 3 places to the left. **reverse**: the token in the mirrored place. **first**: has this letter no
  copy to its left (mean of the accuracies on the two classes). **order**: does A come before B.
- **Test**: fresh rows of 32, 64 and 128 tokens, the same for all. `none` is the control: a T5 table frozen at zero.

Percent right, mean ± standard deviation over {seeds} seeds:

{table}
## What holds, and what the papers say

A task counts as solved from a mean of {good} % on. Papers in one line each; most of them measure language models,
which is not what is measured here.

{verdicts}
## Reading

Of the stored runs, which two processes made, each half of the schemes. Where a reason is given, it is our
explanation, not something that these runs measure.

- **Extrapolate here**: `shaw`, `transformer_xl` and `xlnet` nearly whole to 128 tokens, four times what they saw;
  `nezha` close to it. This agrees with what Shaw et al. and Dai et al. claim, and with what NEZHA hopes. `disan` and
  asymmetric `alibi` keep direction (first, and order at least to 64), but have too little sense of distance for
  back.
- **Extrapolate in part**: `music`, `deberta` and `huang_m3` keep back at about 90 % or more, and lose first and
  order by 128; `relative_key`, `relative_key_query` and `huang_m2` lose more; `tables` keeps first only. Shaw's
  tables share rows from 16 places on, which training saw often; these tell distances up to 31 apart, so that all
  longer ones share a row seen only at the ends of full rows (`music` has none for them). A clip well inside the
  trained range is the better choice. `tener`, with sinusoids and no clip, solves nothing at 64, but still tells
  order at 85 % at 128.
- **Do not**: `absolute`, `tupe`, `sinusoidal` and `cape` solve nothing at 64. For `sinusoidal` that is what Press et
  al. found, not what Vaswani et al. hoped; one of its seeds did not learn back. `cape` does not show what it claims,
  but its default shifts (± 5 tokens) are large for such short rows, and it did not learn back at all. `rope` is worn
  at 64 and broken at 128, as later papers say.
- **`t5`** solves back, first and order at 32 and none of them at 64 and 128. Untrained buckets are not the reason:
  with `max_distance=32` all are trained, and it is no better beyond the spread. A bias that does not depend on the
  content has a fixed lead over the other tokens, and longer rows have more of these.
- **`alibi`, `kerple`, `sandwich`, `fire`** promise perplexity of causal language models, which lives on near tokens
  and on a mask that tells direction. In an encoder they are symmetric: first stays at 73 to 80 %, where the control
  has 70 % at 32 tokens, and back is not solved. They tell order at 32 tokens, which they can only do by way of [CLS]
  and [SEP], and lose it with length (`fire` least). These runs neither confirm nor refute the papers; they say that
  such a scheme alone is not enough for an encoder that needs direction. Combine it with `disan`, or take `alibi`
  with `variant="asymmetric"`. `huang_m1` is symmetric too and solves back at 32, again by the ends of the row.
- **reverse** needs the length and the place. `absolute` and `tupe` learn it for the length that they saw most, and
  it is gone at 64; no scheme reverses a row longer than 32. Offsets alone cannot; what relative schemes reach comes
  from the distances to [CLS] and [SEP], and differs from seed to seed.
- **Limits**: small models, {steps} steps, one learning rate for all. Not solved here does not mean not solvable, and
  differences within the spread mean nothing. Size, steps, rate and the share of full rows were chosen on seed 0 of
  `absolute`, `none`, `rope`, `shaw`, `sinusoidal`, `t5` and `tupe`; full rows every other batch, because without them
  none of those tried learned reverse (`tupe` was not tried).
"""


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


def solved(runs: list[dict], name: str, task: str, length: int) -> bool:
    """Whether the mean accuracy reaches GOOD."""
    found = summary(runs, name, task, length)
    return found is not None and found[0] >= GOOD


def verdicts(runs: list[dict], tasks: list[str]) -> str:
    """Markdown: what each scheme solves at 32, what is left of it at 64 and 128, and the claim of its paper."""
    names = list(dict.fromkeys(run["scheme"] for run in runs))
    names.sort(key=lambda name: (name != "none", name))
    lines = [
        "| scheme | solved at 32 | of these at 64 | of these at 128 | what its paper says |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        learned = [task for task in tasks if solved(runs, name, task, TRAINED)]
        kept = [[task for task in learned if solved(runs, name, task, length)] for length in LENGTHS]
        cells = [", ".join(some) or "–" for some in kept]
        lines.append(f"| `{name}` | " + " | ".join(cells) + f" | {claim(name)} |")
    return "\n".join(lines) + "\n"


def card(stored: dict) -> str:
    """The Markdown file: how it was measured, the tables, and what they show."""
    runs, settings = stored["runs"], stored["settings"]
    seeds = len({run["seed"] for run in runs})
    return CARD.format(
        **stored | settings,
        seeds=seeds,
        last_seed=seeds - 1,
        count=len(runs),
        took=sum(run["seconds"] for run in runs) / 60,
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
    stored = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(
            ["python", "scripts/probe_schemes.py", *(sys.argv[1:] if arguments is None else arguments)]
        ),
        "machine": f"{platform.system()} {platform.machine()}, one CPU thread",
        "versions": f"hf_relpos {__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}",
        "settings": same,
        "runs": [],
    }
    if args.out and args.out.exists():
        before = json.loads(args.out.read_text(encoding="utf-8"))
        if before["settings"] == same:
            stored["runs"] = before["runs"]
    runs = stored["runs"]
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
                args.out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    if args.out:  # also when there was nothing left to run
        args.out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    print(table(runs, args.tasks))
    if args.card:
        args.card.write_text(card(stored), encoding="utf-8")
    return runs


if __name__ == "__main__":
    main()
