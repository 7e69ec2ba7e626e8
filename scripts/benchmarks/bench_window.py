"""What an attention window costs: time and memory against length, beside full attention, pieces and Longformer.

    python scripts/benchmarks/bench_window.py                   # half an hour, one thread
    python scripts/benchmarks/bench_window.py --quick           # two minutes: one scheme, up to 4,096 tokens, forward
    python scripts/benchmarks/bench_window.py --models SOURCE STUDENT  # whole models as well

The attention core of a BERT-base layer, 12 heads of 64, on fixed q, k and v, one row of `--lengths` tokens; window
256 and [CLS] global. Of the same scheme: full attention; the window as the mask of all pairs, whose making is not
counted (a model makes it once for all layers); the window by its band, whose geometry is not counted either; and the
same tokens as pieces of 512 with full attention. Longformer: stock `LongformerSelfAttention` of the same heads and
window, which has no relative terms, its projections replaced by fixed vectors. What PyTorch's fused attention alone
takes, without terms, masks and the global token: for blocks of 64 queries and the keys that any of them sees, and for
pieces; their quotient is what a window costs by itself. Before any time is taken outputs and gradients of the band
are compared with those of the mask in float64. What is quadratic is measured up to `--quadratic` tokens, once from
4,096 on. Memory: what forward and backward of one call add to the peak of a fresh process; of the first scheme every
variant, of the others the window. Whole models: the forward pass of one row of random tokens, the source's as pieces
of 512, the student's in the window, by both backends.

Written to docs/results/benchmarks, after every measurement: cpu-window.json and .md, at the end .png.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from bench_attention import HEADS, SIZE, RelativeAttention, inputs, passes
from shared.arguments import benchmark_parser, positive_int
from shared.measuring import environment, peak_memory, reset_peak_memory, run_worker, time_in_turns
from shared.reports import Table, describe, markdown_sections, print_tables, write_report
from torch import nn


WINDOW, PIECE, BLOCK = 256, 512, 64
LENGTHS = [2048, 4096, 8192, 16384]
SCHEMES = ["relative_key", "relative_key_query", "tables", "harmonic"]
FULL, MASK, BAND, PIECES, LONGFORMER = "full attention", "window as a mask", "window", "pieces of 512", "Longformer"
BARE_BLOCKS, BARE_PIECES = "SDPA without terms, blocks", "SDPA without terms, pieces"
QUADRATIC = (FULL, MASK)
VARIANTS = [FULL, MASK, BAND, PIECES, LONGFORMER, BARE_BLOCKS, BARE_PIECES]
COMPARED = [BAND, PIECES]  # what the page has of every scheme; of the first it has all variants
PASSES = {"forward": "Forward", "both": "Forward and backward"}
MODEL_LENGTHS = [2048, 8192]
SOURCE = "source, pieces of 512"
STUDENTS = {f"student, window, {backend}": backend for backend in ("relpos", "sdpa")}


class Windowed(RelativeAttention):
    """One layer's attention with a scheme: all keys, or a window, by its band or as a mask of all pairs."""

    def __init__(self, name: str, length: int, kind: str):
        from hf_relpos.attention.sliding_window import SlidingWindowMask

        super().__init__(name, "relpos", PIECE)
        band = SlidingWindowMask(length, length, WINDOW, torch.device("cpu"))
        self.mask = {MASK: band.dense if kind == MASK else None, BAND: band}.get(kind)

    def call(self, query, key, value, dropout: float = 0.0):
        from dataclasses import replace

        return replace(super().call(query, key, value, dropout), mask=self.mask)


def in_pieces(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """One row, (1, H, L, d), as a batch of pieces."""
    return [tensor.transpose(1, 2).reshape(-1, PIECE, HEADS, SIZE).transpose(1, 2) for tensor in tensors]


class Pieces(RelativeAttention):
    """The tokens of one row as a batch of pieces, each with full attention."""

    def __init__(self, name: str):
        super().__init__(name, "relpos", PIECE)

    def forward(self, query, key, value, dropout: float = 0.0) -> torch.Tensor:
        return super().forward(*in_pieces(query, key, value), dropout)


class Longformer(nn.Module):
    """Stock Longformer's self-attention with a global first token, on fixed vectors."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LongformerConfig
        from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

        config = LongformerConfig(
            hidden_size=HEADS * SIZE,
            num_attention_heads=HEADS,
            attention_window=[2 * WINDOW],
            num_hidden_layers=1,
            attention_probs_dropout_prob=0.0,
        )
        self.layer = LongformerSelfAttention(config, 0)

    def forward(self, query, key, value, dropout: float = 0.0) -> torch.Tensor:
        layer = self.layer
        q, k, v = (tensor.transpose(1, 2).flatten(2) for tensor in (query, key, value))
        for name, vectors in (("query", q), ("key", k), ("value", v), ("key_global", k), ("value_global", v)):
            layer._modules.pop(name, None)
            # a copy, which a projection makes as well: it divides the queries in place
            object.__setattr__(layer, name, lambda hidden, vectors=vectors: vectors.transpose(0, 1).clone())
        layer._modules.pop("query_global", None)
        object.__setattr__(layer, "query_global", lambda hidden: hidden)
        is_global = torch.zeros(query.shape[0], query.shape[2], dtype=torch.bool)
        is_global[:, 0] = True
        return layer(
            q.detach(),
            attention_mask=is_global * 10000.0,
            is_index_masked=torch.zeros_like(is_global),
            is_index_global_attn=is_global,
            is_global_attn=True,
        )[0]


class Bare(nn.Module):
    """Fused attention without any term: of pieces, or of blocks of queries with the keys in their windows."""

    def __init__(self, is_in_pieces: bool) -> None:
        super().__init__()
        self.is_in_pieces = is_in_pieces

    def forward(self, query, key, value, dropout: float = 0.0) -> torch.Tensor:
        attend = nn.functional.scaled_dot_product_attention
        if self.is_in_pieces:
            return attend(*in_pieces(query, key, value)).transpose(1, 2)
        length, blocks = query.shape[2], []
        for first in range(0, length, BLOCK):
            keys = slice(max(first - WINDOW, 0), first + BLOCK + WINDOW)
            blocks.append(attend(query[:, :, first : first + BLOCK], key[:, :, keys], value[:, :, keys]))
        return torch.cat(blocks, dim=2).transpose(1, 2)


def variant(name: str, scheme: str, length: int) -> nn.Module:
    """One way to compute attention over rows of that length."""
    if name == LONGFORMER:
        return Longformer()
    if name in (BARE_BLOCKS, BARE_PIECES):
        return Bare(is_in_pieces=name == BARE_PIECES)
    return Pieces(scheme) if name == PIECES else Windowed(scheme, length, name)


def check(scheme: str) -> float:
    """Largest difference of outputs and gradients between band and mask, in float64, for a text of four windows.

    Raises:
        SystemExit: when it is above 1e-11, relative to the largest entry.
    """
    length = 4 * WINDOW + 37
    tensors = [tensor.detach().double().requires_grad_() for tensor in inputs(1, length)]
    results = [passes(Windowed(scheme, length, kind).double(), tensors)["both"]() for kind in (BAND, MASK)]
    found = max(
        float(((band - mask).abs().max() / mask.abs().max().clamp(min=1.0)).detach())
        for band, mask in zip(*results, strict=True)
        if band is not None
    )
    if found > 1e-11:
        raise SystemExit(f"{scheme}: band and mask differ by {found:.1e}; no times are shown for it")
    return found


def memory(name: str, scheme: str, length: int) -> float:
    """MB that forward and backward add to the largest size of this process, which must be fresh."""
    small = [tensor.detach().requires_grad_() for tensor in inputs(1, PIECE)]
    passes(variant(name, scheme, PIECE), small)["both"]()  # loads what libraries load at their first call
    call = passes(variant(name, scheme, length), inputs(1, length))["both"]
    reset_peak_memory()  # of the making of a mask of all pairs
    before = peak_memory()
    call()
    return peak_memory() - before


def model_calls(models: list[str], length: int) -> dict[str, Callable[[], object]]:
    """The encoder of the source over one row in pieces, and that of the student over the row in a window."""
    from transformers import AutoModel

    import hf_relpos  # noqa: F401  (registers the student's classes)

    source, student = models
    torch.manual_seed(0)
    encoder = AutoModel.from_pretrained(source).eval()
    ids = torch.randint(encoder.config.vocab_size, (1, length))

    def running(model: nn.Module, rows: torch.Tensor) -> Callable[[], object]:
        return torch.inference_mode()(lambda: model(rows))

    calls = {SOURCE: running(encoder, ids.view(-1, PIECE))}
    for name, backend in STUDENTS.items():
        model = AutoModel.from_pretrained(student, attention_window=WINDOW, attn_implementation=backend).eval()
        calls[name] = running(model, ids)
    return calls


def measured(results: dict, what: str, scheme: str, name: str, length: int, kind: str = "both") -> float | None:
    """Microseconds for each token, or MB; None where it was not measured."""
    for row in results[what]:
        if (row["scheme"], row["variant"], row["length"], row["pass"]) == (scheme, name, length, kind):
            return row["us_per_token" if what == "times" else "mb"]
    return None


def tables(results: dict) -> list[Table]:
    """Times by scheme and pass, and memory."""
    lengths, made = results["lengths"], []
    for what, kinds, title in (
        ("times", list(PASSES), "µs for each token, forward / forward and backward"),
        ("memory", ["both"], "MB, forward and backward"),
    ):
        lines = []
        for scheme in results["schemes"]:
            for name in VARIANTS if scheme == results["schemes"][0] else COMPARED:
                numbers = [
                    [measured(results, what, scheme, name, length, kind) for kind in kinds] for length in lengths
                ]
                cells = [" / ".join("–" if one is None else f"{one:.0f}" for one in each) for each in numbers]
                cells = [cell.replace("– / –", "–") for cell in cells]
                if set(cells) != {"–"}:
                    lines.append([f"{scheme}, {name}", *cells])
        if lines:
            made.append((title, ["", *(f"{length:,}" for length in lengths)], lines))
    if results["models"]:
        lines = []
        for name in (SOURCE, *STUDENTS):
            numbers = [f"{row['us_per_token']:.0f}" for row in results["models"] if row["variant"] == name]
            lines.append([name, *numbers])
        header = ["µs for each token", *(f"{length:,}" for length in MODEL_LENGTHS)]
        made.append((f"Forward: {' and '.join(results['model_names'])}", header, lines))
    return made


def card(results: dict) -> str:
    """The page of the results."""
    errors = ", ".join(f"{scheme} {error:.0e}" for scheme, error in results["difference"].items())
    words = (
        f"One attention with 12 heads of 64, window {WINDOW}, [CLS] global. "
        f"Window against mask in float64, outputs and gradients, largest relative difference:\n{errors}.\n\n"
        "**Result.** With a window, the time per token grows far less with the length than with full attention. "
        "Separate pieces\nare faster still.\n"
    )
    heading = f"# An attention window on the CPU\n\n{describe(results['environment'])}\n{words}"
    return heading + markdown_sections(tables(results))


def run(args: argparse.Namespace) -> dict:
    """All measurements, each written when it is made."""
    settings = {"schemes": args.schemes, "lengths": args.lengths, "rounds": args.rounds, "quadratic": args.quadratic}
    settings["model_names"] = [Path(model).name for model in args.models or ()]
    results: dict = {"environment": environment(), **settings, "times": [], "memory": [], "models": []}
    results["difference"] = {scheme: check(scheme) for scheme in args.schemes}

    def write() -> None:
        write_report(args.out / args.name, results, card(results))

    def time(names: list[str], scheme: str, length: int, kind: str, rounds: int) -> None:
        tensors = inputs(1, length)
        calls = {name: passes(variant(name, scheme, length), tensors)[kind] for name in names}
        for name, seconds in time_in_turns(calls, rounds).items():
            row = {"scheme": scheme, "variant": name, "length": length, "pass": kind}
            results["times"].append({**row, "us_per_token": round(seconds / length * 1e6, 2)})
        write()
        print(f"{scheme}, {length} tokens, {kind}: {', '.join(names)}", file=sys.stderr)

    kinds = list(PASSES)[:1] if args.quick else list(PASSES)
    for kind in kinds:
        for scheme in args.schemes:
            for length in args.lengths:
                quadratic = [name for name in QUADRATIC if length <= args.quadratic]
                linear = [name for name in VARIANTS if name not in QUADRATIC]
                once = quadratic if length >= 4096 else []
                time([name for name in quadratic if name not in once] + linear, scheme, length, kind, args.rounds)
                if once:
                    time(once, scheme, length, kind, 1)
    for length in MODEL_LENGTHS if args.models else ():
        for name, seconds in time_in_turns(model_calls(args.models, length), args.rounds).items():
            row = {"variant": name, "length": length, "us_per_token": round(seconds / length * 1e6, 2)}
            results["models"].append(row)
        write()
        print(f"{' and '.join(results['model_names'])}, {length} tokens", file=sys.stderr)
    for scheme in [] if args.quick else args.schemes:
        for length in args.lengths:
            for name in VARIANTS if scheme == args.schemes[0] else [BAND]:
                if name in QUADRATIC and length > args.quadratic:
                    continue
                request = json.dumps({"variant": name, "scheme": scheme, "length": length})
                used = run_worker(sys.executable, __file__, "--worker", request)
                row = {"scheme": scheme, "variant": name, "length": length, "pass": "both"}
                results["memory"].append({**row, "mb": round(used, 1)})
                write()
    return results


def main() -> None:
    parser = benchmark_parser(__doc__.splitlines()[0])
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--lengths", nargs="+", type=positive_int, default=LENGTHS, help=f"multiples of {PIECE}")
    parser.add_argument("--quadratic", type=positive_int, default=8192, help="the most tokens for what is quadratic")
    parser.add_argument("--models", nargs=2, metavar=("SOURCE", "STUDENT"), help="whole models to be timed as well")
    parser.add_argument("--quick", action="store_true", help="one scheme, up to 4,096 tokens, forward")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.worker:
        request = json.loads(args.worker)
        print(json.dumps(memory(request["variant"], request["scheme"], request["length"])))
        return
    for length in args.lengths:
        if length % PIECE:
            parser.error(f"--lengths {length}: give multiples of {PIECE}, the length of a piece")
    args.name = "cpu-window"
    if args.quick:
        args.name, args.schemes, args.lengths = "cpu-window-quick", args.schemes[:1], [2048, 4096]
    results = run(args)
    print_tables(tables(results))


if __name__ == "__main__":
    main()
