"""Speed of a whole BERT-base with relative positions, against absolute positions and against Transformers 4.57.

    python scripts/bench_model.py                                         # some minutes, one thread
    python scripts/bench_model.py --peer-python OLD/bin/python            # with the BERT of transformers 4.57.6

Random weights, 12 layers, no dropout unless said; forward of 4 × 512 tokens, and a training step (loss, backward,
SGD) of 2 × 512, also at Transformers' default dropout of 0.1; and a training step of a padded batch, 8 texts of 64 to
512 tokens, with the padding in it and taken out (`unpad_inputs`). Before any time is taken the outputs of relative
models are compared with those of the eager backend; a difference ends the run. Written to docs/results/benchmarks:
cpu-model.json and .md.
"""

import gc
import json
import sys
from collections.abc import Callable

import torch
from experiments.arguments import benchmark_parser
from experiments.measuring import environment, run_worker, time_in_turns
from experiments.reports import Table, describe, markdown_sections, met, print_tables, write_report


LENGTH, FORWARD, TRAINING = 512, 4, 2
FLOOR = "absolute, SDPA"
DIFFERENCES = "difference to eager"  # in the results
SCHEMES = ["relative_key", "relative_key_query", "harmonic", "shaw", "transformer_xl", "t5", "deberta"]
PEERS = ["relative_key", "relative_key_query"]
# Issue 5's table: × the floor, forward.
GOALS = {"relative_key": 1.3, "relative_key_query": 1.75}
KINDS = {
    "forward": "forward, B4",
    "training": "training step, B2",
    "dropout": "training step, dropout 0.1, B2",
    "padded": "training step, padded, B8",
}
# Real tokens of the texts of the padded batch: 56 % of it.
TEXTS = [512, 448, 384, 320, 256, 192, 128, 64]


def model_of(name: str, dropout: float, backend: str | None, unpad: bool = False) -> torch.nn.Module:
    """BERT-base for masked language modelling: stock and absolute, relative with the scheme `name`, or "4.57 …"."""
    from transformers import BertConfig, BertForMaskedLM

    settings = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    torch.manual_seed(0)
    if name.startswith("4.57 "):
        config = BertConfig(position_embedding_type=name.removeprefix("4.57 "), **settings)
        return BertForMaskedLM._from_config(config, attn_implementation="eager")
    if name == "absolute":
        return BertForMaskedLM._from_config(BertConfig(**settings), attn_implementation=backend)
    from hf_relpos import RelPosBertConfig, RelPosBertForMaskedLM

    config = RelPosBertConfig(position_embedding_type=name, unpad_inputs=unpad, **settings)
    return RelPosBertForMaskedLM._from_config(config, **({} if backend is None else {"attn_implementation": backend}))


def tokens(batch: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(5, 30000, (batch, LENGTH))


def running(model: torch.nn.Module, kind: str) -> Callable[[], object]:
    """One forward pass of the encoder, or one training step."""
    if kind == "forward":
        model, ids = model.eval().bert, tokens(FORWARD)

        def forward():
            with torch.no_grad():
                return model(ids)[0]

        return forward
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    ids, mask = tokens(len(TEXTS) if kind == "padded" else TRAINING), None
    labels = ids
    if kind == "padded":
        mask = (torch.arange(LENGTH) < torch.tensor(TEXTS)[:, None]).long()
        labels = ids.masked_fill(mask == 0, -100)

    def step():
        model(ids, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def times(models: dict[str, tuple], kind: str, rounds: int) -> list[dict]:
    """Rows of results; models are (name, backend) or (name, backend, whether padding is taken out)."""
    dropout = 0.1 if kind == "dropout" else 0.0
    taken = time_in_turns({n: running(model_of(m[0], dropout, *m[1:]), kind) for n, m in models.items()}, rounds)
    gc.collect()
    return [
        {"variant": name, "pass": kind, "s": round(taken[name], 4), "ratio": round(taken[name] / taken[FLOOR], 3)}
        for name in models
    ]


def check(name: str) -> float:
    """Largest difference of the encoder's output to that with the eager backend, as a share of the largest number.

    Raises:
        SystemExit: when it is above 1e-5.
    """
    output = running(model_of(name, 0.0, None), "forward")()
    eager = running(model_of(name, 0.0, "eager"), "forward")()
    difference = float((output - eager).abs().max() / eager.abs().max())
    if not difference <= 1e-5:
        raise SystemExit(f"{name}: outputs differ from eager's by {difference:.1e}; no times are shown for it")
    return difference


def by_variant(results: dict) -> dict[tuple[str, str], dict]:
    """Rows of times by variant and pass."""
    return {(row["variant"], row["pass"]): row for row in results["times"]}


def against_goals(results: dict) -> list[list[str]]:
    """Issue 5's figures, and whether they are met."""
    cells, rows = by_variant(results), []
    for name, goal in GOALS.items():
        for title, variant, kind, bound in (
            ("forward", name, "forward", goal),
            ("training at dropout 0.1", name, "dropout", None),
            ("unpadded training", f"{name}, unpadded", "padded", None),
        ):
            ratio = cells[variant, kind]["ratio"]
            reached = ratio < 1 if bound is None else ratio <= bound
            rows.append([f"{name}, {title}", "< 1" if bound is None else f"≤ {bound}", f"{ratio:.2f}", met(reached)])
    return rows


def tables(results: dict) -> list[Table]:
    """Times and goals."""
    cells, rows = by_variant(results), []
    for name in dict.fromkeys(row["variant"] for row in results["times"]):
        shown = [cells.get((name, kind)) for kind in KINDS]
        rows.append(
            [name]
            + [
                "–" if row is None else f"{row['s']:.2f} s" if name == FLOOR else f"{row['ratio']:.2f}"
                for row in shown
            ]
        )
    return [
        ("12 layers, 512 tokens, float32", [f"× {FLOOR}", *KINDS.values()], rows),
        ("Against issue 5's figures", ["figure", "goal", "here", ""], against_goals(results)),
    ]


def card(results: dict) -> str:
    """cpu-model.md."""
    return (
        f"# BERT-base on the CPU\n\n{describe(results['environment'])}\nWritten by scripts/bench_model.py. Outputs "
        f"differ from eager's by at most {max(results[DIFFERENCES].values()):.1e} of the largest number.\n"
        f"{markdown_sections(tables(results))}"
    )


def main() -> None:
    parser = benchmark_parser(__doc__.splitlines()[0])
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.rounds = max(args.rounds, 3)
    floor = {FLOOR: ("absolute", "sdpa")}
    if args.worker:
        peers = {f"4.57 {name}": (f"4.57 {name}", None) for name in PEERS}
        print(json.dumps(times({**floor, **peers}, args.worker, args.rounds)))
        return
    results = {"environment": environment(), DIFFERENCES: {n: check(n) for n in SCHEMES}, "times": []}
    eager = {"absolute, eager": ("absolute", "eager")}
    for kind in KINDS:
        variants = {name: (name, None) for name in (SCHEMES if kind == "forward" else SCHEMES[:4])}
        if kind == "padded":  # whose rows have a mask: Transformers' BERT has no other way to leave padding out
            variants |= {f"{name}, unpadded": (name, None, True) for name in SCHEMES[:4]}
        else:
            variants = {**eager, **variants}
        results["times"] += times({**floor, **variants}, kind, args.rounds)
        if args.peer_python and kind != "padded":
            rows = run_worker(args.peer_python, __file__, "--worker", kind, "--rounds", str(args.rounds))
            results["times"] += [row for row in rows if row["variant"] != FLOOR]
        print(f"{kind} done", file=sys.stderr)
    print_tables(tables(results))
    write_report(args.out / "cpu-model", {**results, "goals": against_goals(results)}, card(results))


if __name__ == "__main__":
    main()
