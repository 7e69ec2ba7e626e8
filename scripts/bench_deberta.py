"""Speed and memory of DeBERTa's encoder, beside Transformers' own class, of T5's, and beside BERT's.

    python scripts/bench_deberta.py                    # some minutes, one thread
    python scripts/bench_deberta.py --batches 1 4 8    # batches of several rows up to 512 tokens
    python scripts/bench_deberta.py --layers 12        # the whole of DeBERTa-v3-base

The shape of DeBERTa-v3-base (hidden size 768, 12 heads, 256 logarithmic buckets, `share_att_key`, both terms), random
weights, no dropout unless said. The weights of the stock model are those of ours, under their names there;
outputs are compared before any time is taken, and a difference above 1e-4 ends the run. A training step is the forward
pass, the mean square of the output and the backward pass. The T5 encoder computes through our attention by
`hf_relpos.accelerate_attention`. The least that DeBERTa can take is what absolute BERT takes and the products of the
position terms, with the rows that each query and each key meets, at the speed of the largest product of a layer; in
training also the projections of the relative embeddings. Written to docs/results/benchmarks after each measurement:
cpu-deberta.json and .md.
"""

import gc
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from experiments.arguments import benchmark_parser, positive_int
from experiments.measuring import environment, peak_memory, run_worker, time_in_turns
from experiments.reports import Table, describe, markdown_sections, met, print_tables, write_report


LENGTHS = [128, 512, 2048]
OURS, STOCK, FLOOR = "hf_relpos, deberta", "Transformers, DebertaV2", "absolute BERT, SDPA"
LEAST = "the same and the products of DeBERTa's terms alone"
KINDS = {"forward": "forward", "training": "training step", "dropout": "training step, dropout 0.1"}
# How many times faster than the stock class, one row.
GOALS = {
    ("forward", 128): 1.3,
    ("forward", 512): 1.5,
    ("forward", 2048): 2.0,
    ("training", 128): 1.25,
    ("training", 512): 1.5,
    ("training", 2048): 2.0,
}
VOCABULARY = 1000  # the embeddings are not what is measured
RENAMED = {".query_proj.": ".query.", ".key_proj.": ".key.", ".value_proj.": ".value."}
SHARED = {"rel_embeddings.weight": "distance_embedding.rel_embeddings.weight"}
SHARED |= {f"LayerNorm.{name}": f"distance_embedding.LayerNorm.{name}" for name in ("weight", "bias")}


def sizes(layers: int, dropout: float) -> dict:
    """What all models have in common."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "num_hidden_layers": layers,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }


def stock(layers: int, dropout: float) -> torch.nn.Module:
    """Transformers' encoder of the shape of DeBERTa-v3-base."""
    from transformers import DebertaV2Config, DebertaV2Model

    torch.manual_seed(0)
    config = DebertaV2Config(
        **sizes(layers, dropout),
        type_vocab_size=0,
        relative_attention=True,
        position_buckets=256,
        max_relative_positions=-1,
        max_position_embeddings=512,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        pad_token_id=0,
        layer_norm_eps=1e-7,
        initializer_range=0.02,
    )
    model = DebertaV2Model(config)
    with torch.no_grad():  # fresh ones are too small for positions to show in the outputs
        for name, parameter in model.named_parameters():
            if "query_proj" in name or "key_proj" in name:
                parameter.mul_(4)
    return model


def ours(layers: int, dropout: float) -> torch.nn.Module:
    """Our encoder with the same weights."""
    from hf_relpos import RelPosBertConfig, RelPosBertModel

    config = RelPosBertConfig(
        **sizes(layers, dropout),
        max_position_embeddings=512,
        layer_norm_eps=1e-7,
        position_embedding_type="deberta",
        position_options={"buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    )
    model = RelPosBertModel(config, add_pooling_layer=False)
    state = {}
    for name, tensor in stock(layers, dropout).state_dict().items():
        parts = name.partition("encoder.")
        if parts[2] in SHARED:
            name = "encoder." + SHARED[parts[2]]
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        state[name] = tensor
    state["embeddings.token_type_embeddings.weight"] = torch.zeros_like(model.embeddings.token_type_embeddings.weight)
    model.load_state_dict(state)
    return model


def absolute(layers: int, dropout: float) -> torch.nn.Module:
    """BERT with absolute positions, as many as the longest input has."""
    from transformers import BertConfig, BertModel

    config = BertConfig(**sizes(layers, dropout), max_position_embeddings=max(LENGTHS))
    return BertModel._from_config(config, attn_implementation="sdpa", add_pooling_layer=False)


MODELS = {OURS: ours, STOCK: stock, FLOOR: absolute}
T5_OURS, T5_STOCK = "hf_relpos, T5 encoder", "Transformers, T5 encoder"


def t5_encoder(layers: int, accelerated: bool) -> torch.nn.Module:
    """Transformers' encoder of the shape of T5-base."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=768, d_kv=64, d_ff=3072, num_layers=layers, num_heads=12, dropout_rate=0.0
    )
    model = T5EncoderModel(config)
    if accelerated:
        from hf_relpos import accelerate_attention

        accelerate_attention(model)
    return model


def tokens(length: int, batch: int = 1) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(5, VOCABULARY, (batch, length))


def running(model: torch.nn.Module, kind: str, ids: torch.Tensor) -> Callable[[], object]:
    """One forward pass of the encoder, or one training step without the optimizer's part."""
    if kind == "forward":
        model.eval()

        def forward():
            with torch.no_grad():
                return model(ids)[0]

        return forward
    model.train()

    def step():
        model(ids)[0].square().mean().backward()
        model.zero_grad()

    return step


def check(layers: int, length: int) -> float:
    """Largest difference of our outputs to the stock ones.

    Raises:
        SystemExit: when it is above 1e-4.
    """
    outputs = [running(make(layers, 0.0), "forward", tokens(length))() for make in (ours, stock)]
    difference = float((outputs[0] - outputs[1]).abs().max())
    if not difference <= 1e-4:
        raise SystemExit(f"{length} tokens: outputs differ by {difference:.1e}; no times are shown")
    return difference


def product_speed(length: int) -> float:
    """FLOP/s of `length` vectors times the largest matrix of a layer."""
    states, matrix = torch.randn(length, 768), torch.randn(768, 3072)
    taken = time_in_turns({"product": lambda: states @ matrix}, 9)
    return 2 * states.numel() * matrix.shape[1] / taken["product"]


def position_flops(kind: str, length: int, layers: int, batch: int) -> int:
    """Those of q·A and k·B, and in training of their gradients and the projections of P, which inference keeps."""
    from hf_relpos.schemes.deberta import log_bucket

    bucket = log_bucket(torch.arange(1 - length, length), 256, 512)  # of the shape here
    starts = torch.nn.functional.pad(bucket[1:] != bucket[:-1], (1, 0)).cumsum(0)
    met_by_each = sum(int(starts[length - 1 - i + length - 1] - starts[length - 1 - i]) + 1 for i in range(length))
    products = 2 * 2 * batch * met_by_each * 768
    if kind == "forward":
        return layers * products
    projections = 2 * 2 * bucket.unique().numel() * 768 * 768
    return layers * 3 * (products + projections)


def times(kind: str, length: int, layers: int, batch: int, rounds: int) -> list[dict]:
    """Rows of results for one length and kind of pass."""
    dropout = 0.1 if kind == "dropout" else 0.0
    ids = tokens(length, batch)
    variants = {name: running(make(layers, dropout), kind, ids) for name, make in MODELS.items()}
    taken = time_in_turns(variants, rounds)
    least = position_flops(kind, length, layers, batch) / product_speed(length)
    gc.collect()
    return rows_of({**taken, LEAST: taken[FLOOR] + least}, kind, length, batch)


def rows_of(taken: dict[str, float], kind: str, length: int, batch: int) -> list[dict]:
    case = {"pass": kind, "length": length, "batch": batch}
    return [{"variant": name, **case, "s": round(seconds, 4)} for name, seconds in taken.items()]


def t5_times(kind: str, length: int, layers: int, batch: int, rounds: int) -> list[dict]:
    """The same of the T5 encoder.

    Raises:
        SystemExit: for outputs that differ.
    """
    ids = tokens(length, batch)
    models = {T5_OURS: t5_encoder(layers, True), T5_STOCK: t5_encoder(layers, False)}
    outputs = [running(model, "forward", ids)() for model in models.values()]
    if not torch.allclose(*outputs, atol=1e-4, rtol=1e-4):
        raise SystemExit(f"T5 encoder, {length} tokens: outputs differ; no times are shown")
    taken = time_in_turns({name: running(model, kind, ids) for name, model in models.items()}, rounds)
    gc.collect()
    return rows_of(taken, kind, length, batch)


def memory(name: str, kind: str, length: int, layers: int) -> float:
    """MB that one pass adds to the largest size of this process, which must be fresh."""
    model = MODELS[name](layers, 0.0)
    running(model, kind, tokens(16))()  # loads what libraries load at their first call, and makes gradients
    step = running(model, kind, tokens(length))
    before = peak_memory()
    step()
    return peak_memory() - before


Case = tuple[str, int, int]


def seconds(results: dict) -> dict[str, dict[Case, float]]:
    """By variant: the seconds of every kind of pass, length and batch."""
    taken: dict[str, dict[Case, float]] = {}
    for row in results["times"]:
        taken.setdefault(row["variant"], {})[row["pass"], row["length"], row["batch"]] = row["s"]
    return taken


def against_stock(results: dict) -> list[list[str]]:
    """How many times faster than stock, and how many times that could be, where it was measured."""
    taken = seconds(results)
    least = taken.get(LEAST, {})
    return [
        [
            KINDS[kind],
            f"{length:,}",
            str(batch),
            f"{taken[STOCK][kind, length, batch] / ours:.2f}",
            f"{taken[STOCK][kind, length, batch] / least[kind, length, batch]:.2f}" if least else "–",
            f"{ours / taken[FLOOR][kind, length, batch]:.2f}",
        ]
        for (kind, length, batch), ours in taken.get(OURS, {}).items()
    ]


def against_goals(results: dict) -> list[list[str]]:
    """The goals, and whether they are met."""
    taken, rows = seconds(results), []
    for (kind, length), goal in GOALS.items():
        case = kind, length, 1
        if case in taken[OURS]:
            faster = taken[STOCK][case] / taken[OURS][case]
            title = f"DeBERTa, {KINDS[kind]}, {length} tokens: times faster than stock"
            rows.append([title, f"≥ {goal}", f"{faster:.2f}", met(faster >= goal)])
    for kind in ("forward", "training"):
        case = kind, 512, 1
        if case in taken[OURS]:
            ratio = taken[OURS][case] / taken[FLOOR][case]
            title = f"DeBERTa, {KINDS[kind]}, 512 tokens: × {FLOOR} (stretch)"
            rows.append([title, "≤ 1.2", f"{ratio:.2f}", met(ratio <= 1.2)])
    case = "forward", 512, 1
    if case in taken.get(T5_OURS, {}):
        faster = taken[T5_STOCK][case] / taken[T5_OURS][case]
        rows.append(["T5 encoder, forward, 512 tokens: times faster", "≥ 1.2", f"{faster:.2f}", met(faster >= 1.2)])
    used = {(row["variant"], row["pass"], row["length"]): row["mb"] for row in results["memory"]}
    if {(name, "training", 2048) for name in (OURS, STOCK)} <= used.keys():
        share = used[STOCK, "training", 2048] / used[OURS, "training", 2048]
        rows.append(["memory of training, 2,048 tokens: stock's ÷ ours", "≥ 8", f"{share:.1f}", met(share >= 8)])
    return rows


def tables(results: dict) -> list[Table]:
    """Times, memory and goals."""
    taken, made = seconds(results), []
    cases = list(dict.fromkeys(case for of in taken.values() for case in of))
    for kind in dict.fromkeys(kind for kind, _, _ in cases):
        sizes = [(length, batch) for other, length, batch in cases if other == kind]
        rows = []
        for name, of in taken.items():
            own = [of.get((kind, *size)) for size in sizes]
            if any(own):
                rows.append([name, *("–" if each is None else f"{each * 1e3:,.0f}" for each in own)])
        columns = [f"{length:,} tokens" + (f" × {batch}" if batch > 1 else "") for length, batch in sizes]
        made.append((f"{KINDS[kind].capitalize()}, ms", ["", *columns], rows))
    columns = ["pass", "tokens", "rows", "times faster", "the most possible", f"× {FLOOR}"]
    made.append(("Beside stock", columns, against_stock(results)))
    if results["memory"]:
        rows = [[row["variant"], row["pass"], f"{row['length']:,}", f"{row['mb']:,.0f}"] for row in results["memory"]]
        made.append(("Memory", ["", "pass", "tokens", "MB beyond weights and gradients"], rows))
    return [*made, ("Against the goals", ["figure", "goal", "here", ""], against_goals(results))]


def card(results: dict) -> str:
    """cpu-deberta.md."""
    return (
        f"# DeBERTa on the CPU\n\n{describe(results['environment'])}\nWritten by scripts/bench_deberta.py: "
        f"{results['layers']} layers, float32. Outputs differ from the stock class's by at "
        f"most {max(results['differences'].values()):.1e}.\n{markdown_sections(tables(results))}"
    )


def main() -> None:
    parser = benchmark_parser(__doc__.splitlines()[0])
    parser.add_argument("--layers", type=positive_int, default=2)
    parser.add_argument("--batches", type=positive_int, nargs="+", default=[1], help="rows; several up to 512 tokens")
    parser.add_argument("--lengths", type=positive_int, nargs="+", default=LENGTHS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--skip", nargs="+", choices=("memory", "t5"), default=())
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.worker:
        print(json.dumps(memory(**json.loads(args.worker))))
        return
    results = {"environment": environment(), "layers": args.layers, "times": [], "memory": []}
    results["differences"] = {str(length): check(args.layers, length) for length in args.lengths}
    for length, batch, kind in itertools.product(args.lengths, args.batches, args.kinds):
        if length > 512 and (batch > 1 or kind == "dropout"):
            continue
        measured = [times]
        if "t5" not in args.skip and kind != "dropout" and length == 512 and batch == 1:
            measured.append(t5_times)
        for measure in measured:
            results["times"] += measure(kind, length, args.layers, batch, max(args.rounds, 3))
            write(args.out, results)
        print(f"{KINDS[kind]}, {length} tokens × {batch} done", file=sys.stderr)
    for length, name in () if "memory" in args.skip else itertools.product(args.lengths, MODELS):
        request = {"name": name, "kind": "training", "length": length, "layers": args.layers}
        used = run_worker(sys.executable, __file__, "--worker", json.dumps(request))
        results["memory"].append({"variant": name, "pass": "training", "length": length, "mb": round(used, 1)})
        write(args.out, results)
    print_tables(tables(results))


def write(out: Path, results: dict) -> None:
    """cpu-deberta.json and .md, of what has been measured so far; notes in the latter are kept."""
    path = out / "cpu-deberta"
    content = {**results, "goals": against_goals(results)}
    write_report(path, content, card(results))


if __name__ == "__main__":
    main()
