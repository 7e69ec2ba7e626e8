"""Speed of a whole BERT-base with relative positions, against absolute positions and against Transformers 4.57.

    python scripts/benchmarks/bench_model.py                                    # an hour, one thread
    python scripts/benchmarks/bench_model.py --quick                            # 128 and 512 tokens alone: ten minutes
    python scripts/benchmarks/bench_model.py --peer-python OLD/bin/python       # with the BERT of transformers 4.57.6

Random weights, 12 layers, no dropout unless said; forward, and a training step (loss, backward, SGD), of rows of 128
and 512 tokens; a training step at Transformers' default dropout of 0.1; and one of a padded batch, 8 texts of 64 to
512 tokens, with the padding in it and taken out (`unpad_inputs`). Before any time is taken the outputs of relative
models are compared with those of the eager backend; a difference ends the run. Written to docs/results/benchmarks
after each of these: cpu-model.json and .md; a quick run's to cpu-model-quick.
"""

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from shared.arguments import benchmark_parser
from shared.measuring import environment, run_worker, time_in_turns
from shared.reports import Table, describe, markdown_sections, print_tables, write_report


FLOOR = "absolute, SDPA"
DIFFERENCES = "difference to eager"  # in the results
SCHEMES = ["relative_key", "relative_key_query", "harmonic", "shaw", "transformer_xl", "t5", "deberta"]
TRAINED = SCHEMES[:4]
QUICK = SCHEMES[:3]
PEERS = ["relative_key", "relative_key_query"]
# Real tokens of the texts of the padded batch: 56 % of it.
TEXTS = [512, 448, 384, 320, 256, 192, 128, 64]


@dataclass(frozen=True)
class Kind:
    """What is timed: a pass over `batch` rows of `length` tokens."""

    length: int
    batch: int
    training: bool
    dropout: float = 0.0
    padded: bool = False

    def __str__(self) -> str:
        words = ["training step" if self.training else "forward", f"{self.batch} × {self.length}"]
        return ", ".join([*words, *["dropout 0.1"] * bool(self.dropout), *["padded"] * self.padded])


KINDS = {
    "forward-128": Kind(128, 8, training=False),
    "forward": Kind(512, 4, training=False),
    "training-128": Kind(128, 8, training=True),
    "training": Kind(512, 2, training=True),
    "dropout": Kind(512, 2, training=True, dropout=0.1),
    "padded": Kind(512, len(TEXTS), training=True, padded=True),
}


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


def running(model: torch.nn.Module, kind: Kind) -> Callable[[], object]:
    """One forward pass of the encoder, or one training step."""
    torch.manual_seed(1)
    ids = torch.randint(5, 30000, (kind.batch, kind.length))
    if not kind.training:
        encoder = model.eval().bert

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return encoder(ids)[0]

        return forward
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    mask, labels = None, ids
    if kind.padded:
        mask = (torch.arange(kind.length) < torch.tensor(TEXTS)[:, None]).long()
        labels = ids.masked_fill(mask == 0, -100)

    def step() -> None:
        model(ids, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def times(models: dict[str, tuple], name: str, rounds: int) -> list[dict]:
    """Rows of results; models are (name, backend) or (name, backend, whether padding is taken out)."""
    kind = KINDS[name]
    taken = time_in_turns({n: running(model_of(m[0], kind.dropout, *m[1:]), kind) for n, m in models.items()}, rounds)
    gc.collect()
    return [
        {"variant": each, "pass": name, "s": round(taken[each], 4), "ratio": round(taken[each] / taken[FLOOR], 3)}
        for each in models
    ]


def check(name: str) -> float:
    """Largest difference of the encoder's output to that with the eager backend, as a share of the largest number.

    Raises:
        SystemExit: when it is above 1e-5.
    """
    output, eager = (running(model_of(name, 0.0, backend), KINDS["forward"])() for backend in (None, "eager"))
    difference = float((output - eager).abs().max() / eager.abs().max())
    if not difference <= 1e-5:
        raise SystemExit(f"{name}: outputs differ from eager's by {difference:.1e}; no times are shown for it")
    return difference


def compared(name: str, quick: bool) -> dict[str, tuple]:
    """The models of a pass, besides the floor."""
    kind = KINDS[name]
    variants: dict[str, tuple] = {each: (each, None) for each in (TRAINED if kind.training else SCHEMES)}
    if quick:
        return {each: variants[each] for each in QUICK}
    if kind.padded:  # whose rows have a mask: Transformers' BERT has no other way to leave padding out
        return variants | {f"{each}, unpadded": (each, None, True) for each in TRAINED}
    return {"absolute, eager": ("absolute", "eager")} | variants


def by_variant(results: dict) -> dict[tuple[str, str], dict]:
    """Rows of times by variant and pass."""
    return {(row["variant"], row["pass"]): row for row in results["times"]}


def tables(results: dict) -> list[Table]:
    """Times."""
    cells, rows = by_variant(results), []
    kinds = {name: kind for name, kind in KINDS.items() if any(key[1] == name for key in cells)}
    for name in dict.fromkeys(row["variant"] for row in results["times"]):
        shown = [cells.get((name, kind)) for kind in kinds]
        rows.append(
            [name]
            + [
                "–" if row is None else f"{row['s']:.2f} s" if name == FLOOR else f"{row['ratio']:.2f}"
                for row in shown
            ]
        )
    return [("12 layers, float32", [f"× {FLOOR}", *map(str, kinds.values())], rows)]


def card(results: dict) -> str:
    """cpu-model.md."""
    return (
        f"# BERT-base on the CPU\n\n{describe(results['environment'])}\n"
        f"Outputs differ from eager's by at most {max(results[DIFFERENCES].values()):.1e} of the largest number.\n"
        f"{markdown_sections(tables(results))}"
    )


def main() -> None:
    parser = benchmark_parser(__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"128 and 512 tokens, {', '.join(QUICK)} alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.rounds = max(args.rounds, 3)
    floor = {FLOOR: ("absolute", "sdpa")}
    if args.worker:
        peers = {f"4.57 {name}": (f"4.57 {name}", None) for name in PEERS}
        print(json.dumps(times({**floor, **peers}, args.worker, args.rounds)))
        return
    checked = QUICK if args.quick else SCHEMES
    results = {"environment": environment(), DIFFERENCES: {name: check(name) for name in checked}, "times": []}
    for name, kind in KINDS.items():
        if args.quick and (kind.dropout or kind.padded):
            continue
        results["times"] += times({**floor, **compared(name, args.quick)}, name, args.rounds)
        if args.peer_python and not kind.padded:
            rows = run_worker(args.peer_python, __file__, "--worker", name, "--rounds", str(args.rounds))
            results["times"] += [row for row in rows if row["variant"] != FLOOR]
        path = args.out / ("cpu-model-quick" if args.quick else "cpu-model")
        write_report(path, results, card(results))
        print(f"{kind} done", file=sys.stderr)
    print_tables(tables(results))


if __name__ == "__main__":
    main()
