"""What a scheme learns, and what is left of it on longer rows: small encoders, trained from scratch.

    python scripts/benchmarks/probe_schemes.py                                  # all of MODELS
    python scripts/benchmarks/probe_schemes.py --schemes nezha tener --seeds 1  # other schemes, a quick look

Rows are [CLS] x … x [SEP] of random letters, with one A and one B among them. A model learns all of TASKS at once, on
rows of 8 to 32 tokens, and is tested on fresh rows of 32, 64 and 128. OUT/probes.json and .md are written after every
run; runs that are there, of as many steps, are not repeated.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from shared.arguments import RESULTS, positive_int
from shared.measuring import environment
from shared.process import start_quietly
from shared.reports import Table, describe, markdown_sections, print_tables, stored, write_report
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from hf_relpos import RelPosBertConfig, RelPosBertForTokenClassification
from hf_relpos.data.masking import IGNORE_INDEX
from hf_relpos.schemes import SCHEMES


PAD, CLS, SEP, A, B = range(5)
VOCABULARY = B + 1 + 16  # 16 letters
BACK, BATCH, SHORTEST, TRAINED = 3, 32, 8, 32  # positions, rows of a batch, tokens of a row
TASKS = {
    "back": f"the token {BACK} positions to the left",  # the padding token where there is none
    "reverse": "the token at the mirrored position",
    "first": "whether a letter has no copy to its left; mean of the accuracies on both classes",
    "order": "at A and at B, whether A comes before B",
}
CLASSES = [VOCABULARY, VOCABULARY, 2, 2]  # of the tasks
LENGTHS, TEST_TOKENS = (32, 64, 128), 16384  # of each length
SHOWN = {"back": LENGTHS, "reverse": (32,), "first": (32, 128), "order": (32, 128)}  # on the card
CONFIG = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
CONFIG |= {"vocab_size": VOCABULARY, "num_labels": sum(CLASSES), "initializer_range": 0.1, "hidden_dropout_prob": 0.0}
CONFIG |= {"max_position_embeddings": TRAINED, "attention_probs_dropout_prob": 0.0, "attn_implementation": "eager"}
# Models besides the schemes with their default options: position_embedding_type and position_options.
VARIANTS = {
    "none": ("t5", {}),  # with its table frozen at zero
    "alibi (asymmetric)": ("alibi", {"variant": "asymmetric"}),
    "t5 (max_distance 32)": ("t5", {"max_distance": 32}),
    "cable (gate key)": ("cable", {"gate": "key"}),
    "dual_triangle, rope": (["dual_triangle", "rope"], {}),
    "absolute": ("absolute", {"out_of_range": "clip"}),
}
KNOWN = {name: (name, {}) for name in SCHEMES if not SCHEMES[name].required_inputs} | VARIANTS
# What is probed by default, in the order of the card.
MODELS = ["none", "rope", "alibi", "alibi (asymmetric)", "t5 (max_distance 32)", "relative_key", "harmonic"]
MODELS += ["cable", "cable (gate key)", "dual_triangle", "dual_triangle, rope", "absolute"]
MODELS += ["shaw", "transformer_xl", "xlnet", "tupe", "cape", "sinusoidal"]
PROTOCOL = "CPU seconds of training and test (time.process_time), in the JSON file alone"


def rows(count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Random inputs, (count, length)."""
    ids = torch.randint(B + 1, VOCABULARY, (count, length), generator=generator)
    ids[:, 0], ids[:, -1] = CLS, SEP
    positions = 1 + torch.rand(count, length - 2, generator=generator).argsort(-1)[:, :2]
    return ids.scatter_(1, positions, torch.tensor([[A, B]]).expand(count, 2))


def labels(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Labels of all tasks, (B, L); IGNORE_INDEX, which the loss leaves out, at tokens without one."""
    inside = (ids != CLS) & (ids != SEP)
    copies = (ids[:, :, None] == ids[:, None, :]).tril(-1)
    a_first = (ids == A).int().argmax(-1) < (ids == B).int().argmax(-1)
    tasks = {
        "back": (nn.functional.pad(ids, (BACK, 0), value=PAD)[:, : ids.shape[1]], inside),
        "reverse": (ids.flip(-1), inside),
        "first": ((~copies.any(-1)).long(), ids > B),
        "order": (a_first.long()[:, None].expand_as(ids), (ids == A) | (ids == B)),
    }
    return {task: label.masked_fill(~labelled, IGNORE_INDEX) for task, (label, labelled) in tasks.items()}


def train(name: str, seed: int, steps: int) -> nn.Module:
    """A model after `steps` batches; rows of a batch are equally long, those of every other batch 32."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    scheme, options = KNOWN[name]
    config = RelPosBertConfig(position_embedding_type=scheme, position_options=options, **CONFIG)
    model = RelPosBertForTokenClassification(config).train()
    if name == "none":
        model.bert.encoder.distance_embedding.relative_attention_bias.weight.requires_grad_(False).zero_()
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=5e-3, weight_decay=0.01, betas=(0.9, 0.98), fused=True)
    warmup = max(1, steps // 10)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup)))
    for step in range(steps):
        length = int(torch.randint(SHORTEST, TRAINED + 1, (), generator=generator)) if step % 2 else TRAINED
        ids = rows(BATCH, length, generator)
        pairs = zip(model(input_ids=ids).logits.split(CLASSES, dim=-1), labels(ids).values(), strict=True)
        loss = sum(nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()) for logits, target in pairs)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def evaluate(model: nn.Module) -> dict[str, dict[str, float]]:
    """Accuracy by task and length, on rows that are the same for every model."""
    accuracies: dict[str, dict[str, float]] = {task: {} for task in TASKS}
    for length in LENGTHS:
        generator = torch.Generator().manual_seed(10_000 + length)
        batches = [rows(TEST_TOKENS // length // 4, length, generator) for _ in range(4)]
        logits = torch.cat([model(input_ids=ids).logits for ids in batches]).split(CLASSES, dim=-1)
        for (task, target), scores in zip(labels(torch.cat(batches)).items(), logits, strict=True):
            right = scores.argmax(-1) == target
            classes = [target == 0, target == 1] if task == "first" else [target != IGNORE_INDEX]
            accuracies[task][str(length)] = statistics.fmean(right[each].float().mean().item() for each in classes)
    return accuracies


def by_model(content: dict[str, Any]) -> dict[str, list[dict[str, dict[str, float]]]]:
    """The accuracies of each model, one for each seed; models in the order of the card."""
    found = {name: [run["accuracy"] for run in content["runs"] if run["scheme"] == name] for name in [*MODELS, *KNOWN]}
    return {name: runs for name, runs in found.items() if runs}


def percent(values: Sequence[float]) -> str:
    """Mean of accuracies ± their standard deviation, unless it rounds to 0."""
    spread = round(100 * statistics.stdev(values)) if len(values) > 1 else 0
    return f"{100 * statistics.fmean(values):.0f}" + (f"±{spread}" if spread else "")


def tables(content: dict[str, Any]) -> list[Table]:
    """Percent right by model, task and length."""
    columns = [(task, length) for task, lengths in SHOWN.items() for length in lengths]
    lines = [
        [f"`{name}`", *(percent([run[task][str(length)] for run in runs]) for task, length in columns)]
        for name, runs in by_model(content).items()
    ]
    return [("Percent right", ["", *(f"{task} {length}" for task, length in columns)], lines)]


def card(content: dict[str, Any]) -> str:
    """probes.md."""
    seeds = " or ".join(map(str, sorted({len(runs) for runs in by_model(content).values()})))
    return (
        "# Probes: what a scheme learns, and how well it extrapolates\n\n"
        f"{describe(content['environment'])}\n"
        f"Encoders of 2 layers of width 48 learn all tasks at once, in {content['steps']} batches of {BATCH} rows of "
        f"{SHORTEST} to {TRAINED} tokens: random letters,\none A and one B among them. They are tested on new rows. "
        f"Seeds: {seeds}; their mean ± standard deviation, unless it\nrounds to 0. `none`, the control, is a T5 table "
        'frozen at zero; `absolute` has `out_of_range="clip"`.\n\n'
        + "".join(f"- **{task}**: {text}.\n" for task, text in TASKS.items())
        + markdown_sections(tables(content))
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", choices=KNOWN, default=MODELS, metavar="NAME", help=", ".join(KNOWN))
    parser.add_argument("--seeds", type=positive_int, default=3, help="how many")
    parser.add_argument("--steps", type=positive_int, default=600, help="batches of the training")
    parser.add_argument("--threads", type=positive_int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmarks")
    args = parser.parse_args(arguments)
    start_quietly(args.threads)
    content: dict[str, Any] = {"environment": {**environment(), "protocol": PROTOCOL}, "steps": args.steps, "runs": []}
    earlier = stored(args.out / "probes") or content
    if earlier["steps"] != args.steps:
        parser.error(f"--steps {args.steps}: {args.out} has runs of {earlier['steps']}; give another --out")
    content["runs"] = earlier["runs"]
    for seed, name in itertools.product(range(args.seeds), args.schemes):
        if any((run["scheme"], run["seed"]) == (name, seed) for run in content["runs"]):
            continue
        started = time.process_time()
        run = {"scheme": name, "seed": seed, "accuracy": evaluate(train(name, seed, args.steps))}
        run["seconds"] = round(time.process_time() - started, 1)
        content["runs"].append(run)
        print(f"{name}, seed {seed}: {run['seconds']} s", file=sys.stderr, flush=True)
        write_report(args.out / "probes", content, card(content))
    print_tables(tables(content))


if __name__ == "__main__":
    main()
