"""Speed and memory of attention with relative positions, against absolute attention and against Transformers 4.57.

    python scripts/benchmarks/bench_attention.py                               # some minutes, one thread
    python scripts/benchmarks/bench_attention.py --peer-python OLD/bin/python  # with the BERT of transformers 4.57.6
    python scripts/benchmarks/bench_attention.py --quick                       # a minute: few schemes, two lengths

The attention core of a BERT-base layer: 12 heads of 64, on fixed q, k and v. It includes the terms that the scheme
makes of its parameters in every layer (`Scheme.forward`); the floor is PyTorch's scaled_dot_product_attention without
positions. Before any time is taken it is compared with the eager backend in float64, outputs and all gradients, and a
failure ends the run. Written to docs/results/benchmarks, after every measurement: cpu-attention.json and .md, at the
end .png; a quick run's to cpu-attention-quick.
"""

import gc
import json
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from shared.arguments import benchmark_parser
from shared.measuring import environment, error_ratio, peak_memory, run_worker, time_in_turns
from shared.reports import Table, describe, markdown_sections, print_tables, write_report
from torch import nn


if TYPE_CHECKING:
    from hf_relpos.attention.call import AttentionCall


HEADS, SIZE = 12, 64
SIZES = [(8, 128), (4, 512), (2, 1024), (1, 2048)]
FLOOR = "absolute, SDPA"
ERRORS = "error ÷ eager's error"  # in the results
SCHEMES = ["relative_key", "relative_key_query", "shaw", "transformer_xl", "t5", "alibi", "deberta"]
SCHEMES += ["harmonic", "tables"]
QUICK = {"schemes": ["relative_key", "relative_key_query", "alibi", "tables"], "sizes": [(8, 128), (4, 512)]}
PEERS = ["relative_key", "relative_key_query"]
MEMORY = [("training", batch, length) for batch, length in SIZES[1:]]
MEMORY += [("inference", 1, 4096), ("inference", 1, 16384)]


def inputs(batch: int, length: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k and v as the projections of a layer leave them, (B, H, L, d), that require gradients."""
    torch.manual_seed(0)
    tensors = [torch.randn(batch, length, HEADS, SIZE).to(dtype).transpose(1, 2) for _ in range(3)]
    return [tensor.requires_grad_() for tensor in tensors]


class RelativeAttention(nn.Module):
    """One layer's scheme, and attention with it on fixed vectors."""

    def __init__(self, name: str, backend: str, length: int):
        super().__init__()
        from hf_relpos import RelPosBertConfig
        from hf_relpos.schemes.registry import build_scheme, build_shared

        config = RelPosBertConfig(position_embedding_type=name, max_position_embeddings=max(length, 512))
        config.hidden_dropout_prob = 0.0
        self.is_causal, self.backend = False, backend
        self.scheme, self.shared = build_scheme(config), build_shared(config)
        torch.manual_seed(1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)

    def call(self, query, key, value, dropout: float = 0.0) -> "AttentionCall":
        """What the backend computes, with the terms of the scheme."""
        from hf_relpos.attention.call import AttentionCall
        from hf_relpos.attention.context import LayerInputs
        from hf_relpos.schemes import AttentionContext

        length = query.shape[2]
        dtype = torch.promote_types(query.dtype, torch.float32)
        context = AttentionContext(length, length, device=query.device, dtype=dtype)
        if self.shared is not None:
            from dataclasses import replace

            context = replace(context, layer=LayerInputs(shared=self.shared(context)))
        terms = self.scheme(context)
        gradients = torch.is_grad_enabled()
        return AttentionCall(query, key, value, terms, context, dropout=dropout, needs_gradients=gradients, layer=self)

    def forward(self, query, key, value, dropout: float = 0.0) -> torch.Tensor:
        from hf_relpos.attention.dispatch import run_attention

        return run_attention(self.backend, self.call(query, key, value, dropout))[0]


def floor(query, key, value, dropout: float = 0.0) -> torch.Tensor:
    """Absolute attention, (B, L, H, d)."""
    out = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
    return out.transpose(1, 2).contiguous()


def absolute_eager(query, key, value, dropout: float = 0.0) -> torch.Tensor:
    """The same written out."""
    weights = torch.softmax(torch.matmul(query, key.transpose(2, 3)) * SIZE**-0.5, dim=-1)
    weights = nn.functional.dropout(weights, dropout, training=dropout > 0)
    return torch.matmul(weights, value).transpose(1, 2).contiguous()


class FixedProjection(nn.Module):
    """Stands for a projection whose result is known."""

    def __init__(self, tensor: torch.Tensor):
        super().__init__()
        self.tensor = tensor.transpose(1, 2).flatten(2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.tensor


def peer(name: str, length: int) -> Callable:
    """Self-attention of the BERT of an older Transformers, its projections replaced by fixed vectors."""
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertSelfAttention

    config = BertConfig(
        position_embedding_type=name, max_position_embeddings=max(length, 512), attention_probs_dropout_prob=0.0
    )
    layer = BertSelfAttention(config)

    def run(query, key, value, dropout: float = 0.0) -> torch.Tensor:
        layer.query, layer.key, layer.value = FixedProjection(query), FixedProjection(key), FixedProjection(value)
        layer.dropout.p = dropout
        return layer(layer.query.tensor)[0]

    run.parameters = lambda: [layer.distance_embedding.weight]
    return run


def passes(run: Callable, tensors: list[torch.Tensor], dropout: float = 0.0) -> dict[str, Callable[[], object]]:
    """The forward pass, and forward and backward with the gradients of q, k, v and all parameters."""
    leaves = [*tensors, *(run.parameters() if hasattr(run, "parameters") else ())]
    batch, heads, length, size = tensors[0].shape
    torch.manual_seed(2)
    gradient = torch.randn(batch, length, heads, size, device=tensors[0].device).to(tensors[0].dtype)

    def forward():
        with torch.no_grad():
            return run(*tensors, dropout=dropout)

    def both():
        out = run(*tensors, dropout=dropout)
        return out, *torch.autograd.grad(out, leaves, gradient.view(out.shape), allow_unused=True)

    return {"forward": forward, "both": both}


def times(variants: dict[str, Callable], batch: int, length: int, rounds: int, dtype=torch.float32) -> list[dict]:
    """Rows of results for one size, forward and both, without and with dropout (training only)."""
    tensors, rows = inputs(batch, length, dtype), []
    size = {"batch": batch, "length": length, "dtype": str(dtype).removeprefix("torch.")}
    kinds = [("forward", 0.0), ("both", 0.0)] + [("both", 0.1)] * (length <= 512)
    for kind, dropout in kinds:
        chosen = {name: run for name, run in variants.items() if "Flex" not in name or kind == "forward"}
        taken = time_in_turns({name: passes(run, tensors, dropout)[kind] for name, run in chosen.items()}, rounds)
        for name, seconds in taken.items():
            ratio = {"ms": round(seconds * 1e3, 3), "ratio": round(seconds / taken[FLOOR], 3)}
            rows.append({"variant": name, **size, "pass": kind, "dropout": dropout, **ratio})
        gc.collect()
    return rows


def check(name: str, dtype: torch.dtype) -> float:
    """Error of outputs and all gradients over that of eager in the same dtype, both against float64.

    Raises:
        SystemExit: when it is above 2.
    """
    from hf_relpos.attention.backends.chunked import Chunked
    from hf_relpos.attention.backends.sdpa import Sdpa
    from hf_relpos.attention.dispatch import choose

    batch, length = 2, 333
    results = []
    for backend, kind in (("relpos", dtype), ("eager", dtype), ("eager", torch.float64)):
        layer = RelativeAttention(name, backend, length).to(kind)
        tensors = [tensor.detach().to(kind).requires_grad_() for tensor in inputs(batch, length, dtype)]
        if backend == "relpos":
            chosen = choose(layer.call(*tensors))[0].name
            expected = Sdpa.name if name == "harmonic" else Chunked.name
            if chosen != expected:
                raise SystemExit(f"{name}: the call to be timed runs on {chosen!r}, not {expected!r}")
        results.append(passes(layer, tensors)["both"]())
    ratio = error_ratio(*results)
    if not ratio <= 2.0:
        raise SystemExit(f"{name} in {dtype}: {ratio:.2f} times the error of eager; no times are shown for it")
    return ratio


def memory(name: str, kind: str, batch: int, length: int) -> float:
    """MB that one call adds to the largest size of this process, which must be fresh."""
    if name == FLOOR:
        run = floor
    elif name.startswith("4.57 "):
        run = peer(name.removeprefix("4.57 "), length)
    else:
        run = RelativeAttention(name, "relpos", length)
    small = [tensor[:1, :, :64].detach().requires_grad_() for tensor in inputs(1, 64)]
    for call in passes(run, small).values():  # loads what libraries load at their first call
        call()
    call = passes(run, inputs(batch, length))["both" if kind == "training" else "forward"]
    before = peak_memory()
    call()
    return peak_memory() - before


def worker(request: dict, rounds: int) -> object:
    """What a fresh process measures: the memory of one call, or the times of the peers."""
    if request["what"] == "memory":
        return memory(request["name"], request["pass"], request["batch"], request["length"])
    tables = {f"4.57 {name}": peer(name, request["length"]) for name in PEERS}
    return times({FLOOR: floor, **tables}, request["batch"], request["length"], rounds)


def tables(results: dict) -> list[Table]:
    """Times in float32 without dropout, and memory."""
    rows = [row for row in results["times"] if (row["dropout"], row["dtype"]) == (0.0, "float32")]
    columns = list(dict.fromkeys((row["batch"], row["length"]) for row in rows))
    times = {(row["variant"], row["pass"], row["batch"], row["length"]): row for row in rows}

    def cell(name: str, kind: str, size: tuple) -> str:
        row = times.get((name, kind, *size))
        return "–" if row is None else f"{row['ms']:.1f} ms" if name == FLOOR else f"{row['ratio']:.2f}"

    lines = [
        [name, *(f"{cell(name, 'forward', size)} / {cell(name, 'both', size)}" for size in columns)]
        for name in dict.fromkeys(row["variant"] for row in rows)
    ]
    lines = [[each.replace("– / –", "–") for each in line] for line in lines]
    head = [f"× {FLOOR}", *(f"L{length} B{batch}" for batch, length in columns)]
    tables: list[Table] = [("Forward / forward and backward", head, lines)]
    shown = [(kind, batch, length) for kind, batch, length in MEMORY if length != 1024]
    head = ["MB beyond inputs", *(f"{kind}, L{length} B{batch}" for kind, batch, length in shown)]
    names = dict.fromkeys(row["variant"] for row in results["memory"])
    cells = {(row["variant"], row["pass"], row["length"]): f"{row['mb']:.0f}" for row in results["memory"]}
    tables.append(
        ("Memory", head, [[n, *(cells.get((n, kind, length), "–") for kind, _, length in shown)] for n in names])
    )
    return tables


def card(results: dict) -> str:
    """cpu-attention.md."""
    return (
        f"# Attention on the CPU\n\n{describe(results['environment'])}\n"
        "Time ÷ that of absolute positions with SDPA, float32; L tokens, B rows. 4.57: `BertSelfAttention` of "
        "transformers 4.57.6, eager, in a process of its own.\nErrors against "
        f"float64 are at most {max(results[ERRORS].values()):.2f} times those of eager in the same dtype.\n\n"
        "**Result.** The speed-up over Transformers 4.57 grows with the length. For the same number of tokens, the "
        "memory of\nTransformers 4.57 grows with the length, too, and that of the chunks stays about the same.\n"
        f"{markdown_sections(tables(results))}"
    )


def main() -> None:
    parser = benchmark_parser(__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few schemes, two lengths, no memory: within a minute")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*mkldnn_matmul.*")
    if args.worker:
        print(json.dumps(worker(json.loads(args.worker), args.rounds)))
        return
    args.rounds = max(args.rounds, 3)
    schemes = QUICK["schemes"] if args.quick else SCHEMES
    dtypes = (torch.float32,) if args.quick else (torch.float32, torch.bfloat16)
    checks = {f"{name} {dtype}": check(name, dtype) for name in schemes for dtype in dtypes}
    results = {"environment": environment(), ERRORS: checks, "times": [], "memory": []}
    path = args.out / ("cpu-attention-quick" if args.quick else "cpu-attention")

    def write() -> None:
        write_report(path, results, card(results))

    sizes = [(*size, torch.float32) for size in (QUICK["sizes"] if args.quick else SIZES)]
    for batch, length, dtype in sizes + [(4, 512, torch.bfloat16)] * (not args.quick):
        variants = {FLOOR: floor, "absolute, eager": absolute_eager}
        variants |= {name: RelativeAttention(name, "relpos", length).to(dtype) for name in schemes}
        if "alibi" in schemes and dtype == torch.float32:  # with keys too far to weigh anything
            variants["alibi, SDPA"] = RelativeAttention("alibi", "sdpa", length)
        if length == 512 and dtype == torch.float32 and not args.quick:
            variants["relative_key, our eager"] = RelativeAttention("relative_key", "eager", length)
        results["times"] += times(variants, batch, length, args.rounds, dtype)
        if args.peer_python and dtype == torch.float32:
            request = {"what": "times", "batch": batch, "length": length}
            rows = run_worker(
                args.peer_python, __file__, "--worker", json.dumps(request), "--rounds", str(args.rounds)
            )
            results["times"] += [row for row in rows if row["variant"] != FLOOR]
        write()
        print(f"L{length} B{batch} {dtype} done", file=sys.stderr)
    for kind, batch, length in [] if args.quick else MEMORY:
        names = [FLOOR, *(SCHEMES if length <= 4096 else PEERS)]
        if args.peer_python and length <= 2048:
            names += [f"4.57 {name}" for name in PEERS]
        for name in names:
            python = args.peer_python if name.startswith("4.57") else sys.executable
            request = {"what": "memory", "name": name, "pass": kind, "batch": batch, "length": length}
            used = run_worker(python, __file__, "--worker", json.dumps(request))
            row = {"variant": name, "pass": kind, "batch": batch, "length": length, "mb": round(used, 1)}
            results["memory"].append(row)
            write()
    print_tables(tables(results))


if __name__ == "__main__":
    main()
