"""Stock encoders with and without `hf_relpos.accelerate_attention`: time and memory.

    python scripts/benchmarks/bench_live.py                     # some minutes, one thread
    python scripts/benchmarks/bench_live.py --families MPNet --cases 512 2,048

Two layers of the size of a base model (hidden size 768, 12 heads), random weights, no dropout, float32. Forward passes
and training steps (the mean square of the output, backward) of one text, and of a padded batch, 8 texts of 16 to 128
tokens; of texts of 1,024 tokens and more one round after the warm-up. Outputs are compared before any time is taken; a
difference above 1e-5 ends the run. Memory is the growth of the largest resident size over a training step of the
longest text in a process of its own. The effects in `hf_relpos/families/live` are said after these figures. Written
to docs/results/benchmarks after each measurement: cpu-live.json and .md.
"""

import copy
import gc
import itertools
import json
import sys
from collections.abc import Callable, Iterator

import torch
from shared.arguments import benchmark_parser
from shared.measuring import environment, peak_memory, reset_peak_memory, run_worker, time_in_turns
from shared.reports import Table, describe, markdown_sections, print_tables, write_report


SIZES = {
    "vocab_size": 1000,  # the embeddings are not what is measured
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048 + 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
V3 = {"position_buckets": 256, "max_relative_positions": 512, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
T5 = {"vocab_size": 1000, "num_layers": 2, "d_model": 768, "d_ff": 3072, "num_heads": 12, "dropout_rate": 0.0}
XLNET = {"vocab_size": 1000, "n_layer": 2, "d_model": 768, "d_inner": 3072, "n_head": 12, "dropout": 0.0}
FAMILIES = {  # class, configuration
    "DeBERTa v3": ("DebertaV2Model", {**SIZES, **RELATIVE, **V3}),
    "DeBERTa v1": ("DebertaModel", {**SIZES, **RELATIVE, "max_relative_positions": 512}),
    "MPNet": ("MPNetModel", SIZES),
    "RoFormer": ("RoFormerModel", SIZES),
    "T5 encoder": ("T5EncoderModel", T5),
    "XLNet": ("XLNetModel", XLNET),
}
LENGTHS = {"128": 128, "512": 512, "1,024": 1024, "2,048": 2048, "8 × 128, padded": 128}
TEXTS = [128, 112, 96, 80, 64, 48, 32, 16]


def model_of(family: str) -> torch.nn.Module:
    import transformers

    name, fields = FAMILIES[family]
    head = getattr(transformers, name)
    torch.manual_seed(0)
    return head(head.config_class(**fields))


def inputs_of(family: str, case: str) -> dict[str, torch.Tensor]:
    """A batch; with token types for XLNet, whose tokenizer always makes them and whose layers have a term for them."""
    torch.manual_seed(1)
    length = LENGTHS[case]
    lengths = torch.tensor(TEXTS if "padded" in case else [length])
    mask = (torch.arange(length) < lengths[:, None]).long()
    inputs = {"input_ids": torch.randint(5, 1000, mask.shape), "attention_mask": mask}
    if family == "XLNet":
        inputs["token_type_ids"] = (torch.arange(length) >= length // 2).long().expand_as(mask)
    return inputs


def running(model: torch.nn.Module, kind: str, inputs: dict[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
    """One forward pass or one training step; returns the output."""
    if kind == "forward":
        model.eval()

        def forward() -> torch.Tensor:
            with torch.inference_mode():
                return model(**inputs)[0]

        return forward
    model.train()

    def step() -> torch.Tensor:
        model.zero_grad()
        out = model(**inputs)[0]
        out.square().mean().backward()
        return out.detach()

    return step


def measure(family: str, cases: list[str], rounds: int) -> Iterator[dict]:
    """Times of stock and of ours, in turns, case by case."""
    from hf_relpos import accelerate_attention

    stock = model_of(family)
    ours = copy.deepcopy(stock)
    accelerate_attention(ours)
    for case, kind in itertools.product(cases, KINDS):
        inputs = inputs_of(family, case)
        runs = {"stock": running(stock, kind, inputs), "ours": running(ours, kind, inputs)}
        expected = runs["stock"]()
        difference = float((runs["ours"]() - expected).abs().max() / expected.abs().max())
        if not difference <= 1e-5:
            raise SystemExit(f"{family}, {case}: outputs differ by {difference:.1e}; no times are shown")
        taken = time_in_turns(runs, 1 if LENGTHS[case] >= 1024 else rounds)
        row = {"family": family, "case": case, "pass": kind, **{k: round(s, 4) for k, s in taken.items()}}
        yield {**row, "faster": round(taken["stock"] / taken["ours"], 2), "difference": difference}
        gc.collect()


def memory(family: str, variant: str, case: str) -> float:
    """MB by which a training step of the longest text grows the process."""
    model = model_of(family)
    if variant == "ours":
        from hf_relpos import accelerate_attention

        accelerate_attention(model)
    running(model, "training", inputs_of(family, "128"))()  # gradients exist from now on
    step = running(model, "training", inputs_of(family, case))
    gc.collect()
    reset_peak_memory()
    before = peak_memory()
    step()
    return round(peak_memory() - before, 1)


def tables(results: dict) -> list[Table]:
    faster = {(row["family"], row["case"], row["pass"]): f"{row['faster']:.2f}" for row in results["times"]}
    cases = dict.fromkeys((row["case"], row["pass"]) for row in results["times"])
    rows = [
        [family, *(faster.get((family, *case), "–") for case in cases)]
        for family in dict.fromkeys(row["family"] for row in results["times"])
    ]
    columns = [f"{case} tokens, {KINDS[kind]}" for case, kind in cases]
    grown = [
        [family, f"{of['stock']:.0f}", f"{of['ours']:.0f}", f"{of['stock'] / of['ours']:.1f}"]
        for family, of in results["memory"].items()
    ]
    title = f"Memory of a training step, {results['longest']} tokens"
    return [
        ("Stock time ÷ accelerated time", ["family", *columns], rows),
        (title, ["family", "stock, MB", "accelerated, MB", "ratio"], grown),
    ]


KINDS = {"forward": "forward", "training": "training"}


def card(results: dict) -> str:
    """cpu-live.md."""
    largest = max(row["difference"] for row in results["times"])
    return (
        f"# Live stock models on the CPU\n\n{describe(results['environment'])}\n"
        f"Written by scripts/benchmarks/bench_live.py. Outputs differ "
        f"from stock's by at most {largest:.1e} of the largest number. At 128 tokens MPNet, "
        "RoFormer, T5 and XLNet run stock's code on both sides: what they differ by is the noise of this machine.\n"
        f"{markdown_sections(tables(results))}"
    )


def main() -> None:
    parser = benchmark_parser(__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--cases", nargs="+", choices=LENGTHS, default=list(LENGTHS), metavar="CASE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.worker:
        print(json.dumps(memory(*args.worker.split("/"))))
        return
    longest = max(args.cases, key=LENGTHS.__getitem__)
    results = {"environment": environment(), "times": [], "longest": longest, "memory": {}}
    for family in args.families:
        for row in measure(family, args.cases, args.rounds):
            print(row, file=sys.stderr)
            results["times"].append(row)
            write_report(args.out / "cpu-live", results, card(results))
    for family in args.families:
        results["memory"][family] = {
            variant: run_worker(sys.executable, __file__, "--worker", f"{family}/{variant}/{longest}")
            for variant in ("stock", "ours")
        }
        write_report(args.out / "cpu-live", results, card(results))
    print_tables(tables(results))


if __name__ == "__main__":
    main()
