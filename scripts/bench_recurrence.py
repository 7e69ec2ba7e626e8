"""Evaluation with segment recurrence against a sliding window recomputed for every token (Transformer-XL, Table 9).

    python scripts/bench_recurrence.py                       # some minutes, one thread
    python scripts/bench_recurrence.py --text FILE --contexts 128 512

One causal transformer_xl model, random weights, reads a text byte by byte and gives every byte a log-probability. With
both methods a byte depends on the `context` bytes up to the one before it:

window: one forward of `context` bytes for each byte, of which the last output counts. What a model without memory
    does when no byte may have a shorter context.
segments: one forward of `--segment` bytes, with `memory_length` = `context` and `memory_same_length`.

Before any time is taken the log-probabilities of both are compared where they must agree, and a difference above
`TOLERANCE` ends the run. In one layer that is everywhere, since a memory of embeddings holds all that a window
computes. In several it is the first `context` bytes of a text, before the window begins to slide. After that the
states in a memory have been computed with contexts of their own, and reach back by `context` in every layer: that is
the gain of recurrence and no error, so that there the difference is shown, not judged.

Every ratio is measured; nothing is extrapolated. Written to docs/results/benchmarks: recurrence.json and .md, with
another `--segment` recurrence-<segment>.json and .md.
"""

import math
import sys
from pathlib import Path

import torch
from experiments.arguments import ROOT, benchmark_parser
from experiments.measuring import environment, time_in_turns
from experiments.reports import Table, describe, markdown_sections, print_tables, write_report

from hf_relpos import RelPosBertConfig, RelPosBertLMHeadModel, SegmentMemory


CONTEXTS = [128, 256, 512, 800, 1600, 3200]
SEGMENT = 128
LAYERS, WIDTH, HEADS = 4, 512, 8
TOLERANCE = 1e-4  # nats; float32, of log-probabilities about −6
MATTERS = 1e-2  # a context half as long must change a log-probability by more, or agreement shows nothing
COMPARED = 4  # bytes for which a window is computed to compare


def model_of(layers: int) -> RelPosBertLMHeadModel:
    """A causal byte model, in eval mode; weights large enough for the context to matter."""
    torch.manual_seed(0)
    config = RelPosBertConfig(
        position_embedding_type="transformer_xl",
        vocab_size=256,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_hidden_layers=layers,
        intermediate_size=4 * WIDTH,
        initializer_range=0.05,
        is_decoder=True,
        use_cache=False,
        pad_token_id=None,
    )
    return RelPosBertLMHeadModel(config).eval()


def remember(model: RelPosBertLMHeadModel, context: int) -> None:
    """Have the model carry a memory of so many bytes; 0 for none."""
    model.config.memory_length, model.config.memory_same_length = context, context > 0


def by_window(model: RelPosBertLMHeadModel, text: torch.Tensor, position: int, context: int) -> torch.Tensor:
    """Log-probabilities of the byte at `position`, from those before it, (256,)."""
    ids = text[None, max(0, position - context) : position]
    return model(ids, logits_to_keep=1).logits[0, -1].log_softmax(-1)


def by_segments(
    model: RelPosBertLMHeadModel, text: torch.Tensor, segment: int
) -> tuple[torch.Tensor, SegmentMemory | None]:
    """Log-probabilities of the bytes from 1 on, (N, 256), and the memory before the last segment."""
    scores, memory, before = [], None, None
    for ids in text.split(segment):
        before = memory
        outputs = model(ids[None], memory=memory)
        memory = outputs.memory
        scores.append(outputs.logits[0].log_softmax(-1))
    return torch.cat(scores), before


def compare(model: RelPosBertLMHeadModel, text: torch.Tensor, context: int, segment: int) -> dict[str, float]:
    """Largest differences of log-probabilities between the two methods.

    Returns:
        `start`: over bytes with less than `context` before them; `later`: over bytes with more; `context matters`: by
        how much half the context changes those.

    Raises:
        SystemExit: where they must agree and do not, or where the context does not matter.
    """
    remember(model, context)
    scores, _ = by_segments(model, text, segment)
    remember(model, 0)
    positions = {
        "start": torch.linspace(2, context, COMPARED).long().tolist(),
        "later": torch.linspace(context + segment, len(text) - 1, COMPARED).long().tolist(),
    }
    windows = {position: by_window(model, text, position, context) for kind in positions.values() for position in kind}
    differences = {
        kind: max(float((windows[position] - scores[position - 1]).abs().max()) for position in group)
        for kind, group in positions.items()
    }
    position = positions["later"][-1]
    differences["context matters"] = float(
        (windows[position] - by_window(model, text, position, context // 2)).abs().max()
    )
    exact = ["start", "later"] if model.config.num_hidden_layers == 1 else ["start"]
    for kind in exact:
        if not differences[kind] <= TOLERANCE:
            raise SystemExit(
                f"context {context}, {kind}: log-probabilities differ by {differences[kind]:.1e} nats; no times"
            )
    if not differences["context matters"] > MATTERS:
        raise SystemExit(
            f"context {context}: half of it changes log-probabilities by {differences['context matters']:.1e}"
        )
    return differences


def times(
    model: RelPosBertLMHeadModel, text: torch.Tensor, context: int, segment: int, rounds: int
) -> dict[str, float]:
    """Seconds for each byte, with a window or a memory that is full, and their ratio."""
    remember(model, context)
    _, memory = by_segments(model, text, segment)
    if memory.length != context or not memory.mask.all():
        raise SystemExit(f"context {context}: the text is too short to fill the memory")
    ids = text[None, -segment:]

    def window():
        remember(model, 0)
        by_window(model, text, len(text), context)

    def segments():
        remember(model, context)
        model(ids, memory=memory).logits.log_softmax(-1)

    taken = time_in_turns({"window": window, "segments": segments}, rounds)
    each = {"window": taken["window"], "segments": taken["segments"] / segment}
    return {**each, "ratio": each["window"] / each["segments"]}


def growth(results: dict) -> float | None:
    """The power of the context with which the ratio grows; None for a single context."""
    first, last = results["results"][0], results["results"][-1]
    if last["context"] <= first["context"]:
        return None
    return math.log(last["ratio"] / first["ratio"]) / math.log(last["context"] / first["context"])


def table(results: dict) -> Table:
    """Times and differences by context."""
    columns = ["context", "window, ms per byte", "segments, ms per byte", "ratio", "ratio ÷ context", "1 layer"]
    columns += [f"{LAYERS} layers, start", f"{LAYERS} layers, later"]
    rows = [
        [
            f"{row['context']:,}",
            f"{1000 * row['window']:.1f}",
            f"{1000 * row['segments']:.2f}",
            f"**{row['ratio']:,.0f}**",
            f"{row['ratio'] / row['context']:.2f}",
            f"{max(row['one layer'][kind] for kind in ('start', 'later')):.0e}",
            f"{row['several layers']['start']:.0e}",
            f"{row['several layers']['later']:.2f}",
        ]
        for row in results["results"]
    ]
    return f"Segments of {results['segment']} bytes with memory against a window for every byte", columns, rows


def note(results: dict) -> str:
    """What the ratios show."""
    first, last, power = results["results"][0], results["results"][-1], growth(results)
    text = ""
    if power is not None:
        text = (
            f"From context {first['context']:,} to {last['context']:,} the ratio grows from {first['ratio']:.0f} to "
            f"{last['ratio']:,.0f}: as the context to the power of {power:.2f}. "
        )
    return text + (
        "A window computes `context` bytes for one. A segment computes its own bytes, and in every layer projects the "
        "keys and values of `context` remembered bytes anew: a share that grows with context ÷ segment, so that the "
        "ratio falls behind the context, and longer segments (`--segment`) bring it closer."
    )


def card(results: dict) -> str:
    """recurrence.md."""
    return (
        f"# Evaluation with segment recurrence\n\n{describe(results['environment'])}\nWritten by "
        f"scripts/bench_recurrence.py: transformer_xl, {LAYERS} layers, D = {WIDTH}, {HEADS} heads, float32, one row, "
        f"random weights. The last three columns are the largest differences of log-probabilities (nats). With one "
        f"layer, and in the first `context` bytes, they must be within {TOLERANCE:g}. Later the states in a memory "
        f"depend on `context` more tokens in each of the {LAYERS} layers, those in a window do not, so that deep "
        f"models differ, as they should.\n{markdown_sections([table(results)])}\n{note(results)}\n"
    )


def main() -> None:
    parser = benchmark_parser(__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=ROOT / "README.md", help="a file, whose bytes are read")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="lengths of context, bytes")
    parser.add_argument("--segment", type=int, default=SEGMENT, help="bytes of a segment")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.text.is_file():
        raise SystemExit(f"--text {args.text}: there is no such file; check the path")
    data = args.text.read_bytes()
    longest = max(args.contexts) + 3 * args.segment
    if min(args.contexts) < 2 or args.segment < 1 or len(data) < longest:
        raise SystemExit(f"--text {args.text} has {len(data)} bytes; these contexts and segments need {longest}")
    args.rounds = max(args.rounds, 3)
    text, segment = torch.tensor(list(data)), args.segment
    results = {
        "environment": environment(),
        "model": {"layers": LAYERS, "hidden_size": WIDTH, "heads": HEADS, "scheme": "transformer_xl"},
        "segment": segment,
        "tolerance": TOLERANCE,
        "results": [],
    }
    shallow, deep = model_of(1), model_of(LAYERS)
    with torch.no_grad():
        for context in args.contexts:
            # whole segments, so that the memory is full before the last one
            part = text[: segment * (math.ceil(context / segment) + 2)]
            row = {"context": context, "one layer": compare(shallow, part, context, segment)}
            row["several layers"] = compare(deep, part, context, segment)
            row |= times(deep, part, context, segment, args.rounds)
            results["results"].append(row)
            print(f"context {context}: {row['ratio']:.0f} times", file=sys.stderr)
    if growth(results) is not None:
        results["growth"] = growth(results)
    print_tables([table(results)])
    print(note(results))
    name = "recurrence" if segment == SEGMENT else f"recurrence-{segment}"
    write_report(args.out / name, results, card(results))


if __name__ == "__main__":
    main()
