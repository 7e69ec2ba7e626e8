"""Stock encoders on the CPU, and what makes them faster: `hf_relpos.optimize`, torch.compile, ONNX Runtime, OpenVINO.

    python scripts/benchmarks/bench_encoder.py                     # DeBERTa v3 with all peers; half an hour
    python scripts/benchmarks/bench_encoder.py --families          # the other families, stock and ours; an hour
    python scripts/benchmarks/bench_encoder.py --families BERT --peers --cases "1 × 128"
    python scripts/benchmarks/bench_encoder.py --models all-mpnet-base-v2 --sts stsb.dev.tsv  # real ones, on sentences

Two layers of the size of a base model (hidden size 768, 12 heads), random weights, no dropout, float32. Cases: full
rows; 32 padded rows, whose lengths are the quantiles of a log-normal distribution from 8 to 190 (28 % are tokens); and
the same rows sorted by length into batches of 8, as sentence-transformers makes them. Forward passes, and training
steps (a loss of the states of tokens, backward), by one thread. Peers: onnxruntime, onnx, onnxscript, openvino, nncf,
ctranslate2 and disentangled-flash, each left out where it is not installed. The graph of ONNX Runtime and OpenVINO is
that of the stock model by torch.onnx.export for any size of batch; int8 is `quantize_dynamic` in the one and
`nncf.quantize` in the other.

Before any time is taken the states of all tokens are compared with stock's, and after a training step the gradients;
where ours differ by more than 1e-5 in float32 the run ends. Memory is the growth of the largest resident size over a
training step of the longest row, and with peers what a padded batch holds with the weights, in processes of their own.
Written to docs/results/benchmarks after each measurement, family by family and machine by machine, those of earlier
runs being kept: cpu-encoder.json and .md.

`--models` takes folders of sentence encoders (mean pooling) and pairs of sentences with a score: a heading, and lines
of score TAB sentence TAB sentence. Every other pair is encoded, in batches of 32 sorted by length, tokenized before.
The result says how close the vectors are to float32's and how the cosines of the pairs follow the scores (Spearman).
"""

import argparse
import contextlib
import copy
import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from shared.arguments import benchmark_parser, positive_int
from shared.measuring import environment, peak_memory, reset_peak_memory, run_worker, time_in_turns
from shared.process import start_quietly
from shared.reports import Table, machine_and_versions, print_tables, stored, write_report
from shared.runtimes import Inputs, Run, compiled, runtimes, versions


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
T5 = {"vocab_size": 1000, "num_layers": 2, "d_model": 768, "d_ff": 2048, "num_heads": 12, "dropout_rate": 0.0}
GATED = {"feed_forward_proj": "gated-gelu"}  # of v1.1; the gradient of ReLU jumps at rounding errors
XLNET = {"vocab_size": 1000, "n_layer": 2, "d_model": 768, "d_inner": 3072, "n_head": 12, "dropout": 0.0}
DISTIL = {"vocab_size": 1000, "n_layers": 2, "dim": 768, "hidden_dim": 3072, "n_heads": 12, "dropout": 0.0}
ROTARY = {**SIZES, "pad_token_id": 0, "attention_dropout": 0.0}
DECODER = {**ROTARY, "num_key_value_heads": 4, "head_dim": 64, "use_cache": False}
FAMILIES = {  # class, configuration
    "DeBERTa v3": ("DebertaV2Model", {**SIZES, **RELATIVE, **V3}),
    "DeBERTa v1": ("DebertaModel", {**SIZES, **RELATIVE, "max_relative_positions": 512}),
    "BERT": ("BertModel", SIZES),
    "RoBERTa": ("RobertaModel", SIZES),
    "DistilBERT": ("DistilBertModel", {**DISTIL, "attention_dropout": 0.0, "max_position_embeddings": 2048}),
    "MPNet": ("MPNetModel", SIZES),
    "RoFormer": ("RoFormerModel", SIZES),
    "T5 encoder": ("T5EncoderModel", {**T5, **GATED}),
    "XLNet": ("XLNetModel", XLNET),
    "ModernBERT": ("ModernBertModel", {**ROTARY, "intermediate_size": 1152}),
    "NomicBERT": ("NomicBertModel", ROTARY),
    "GTE": ("GteModel", ROTARY),
    "EuroBERT": ("EuroBertModel", ROTARY),
    "Jina v3": ("JinaEmbeddingsV3Model", ROTARY),
    "ESM-2": ("EsmModel", {**ROTARY, "position_embedding_type": "rotary", "token_dropout": False, "mask_token_id": 4}),
    "UMT5 encoder": ("UMT5EncoderModel", {**T5, **GATED}),
    "ALBERT": ("AlbertModel", {**SIZES, "embedding_size": 128}),
    "UltraBERT": ("UltrabertModel", {**ROTARY, "max_position_embeddings": 2048}),
    "Qwen3": ("Qwen3Model", DECODER),
    "Gemma 3, two-sided": ("Gemma3TextModel", {**DECODER, "use_bidirectional_attention": True, "sliding_window": 512}),
    "ESM-C": ("EsmcModel", ROTARY),
    "LFM2": ("Lfm2Model", {**DECODER, "full_attn_idxs": [1]}),
}
RELATIVE_FAMILIES = ("DeBERTa v3", "DeBERTa v1", "MPNet", "RoFormer", "T5 encoder", "XLNet")
FULL = {
    "1 × 8": (1, 8),
    "1 × 16": (1, 16),
    "1 × 64": (1, 64),
    "1 × 128": (1, 128),
    "8 × 128": (8, 128),
    "1 × 512": (1, 512),
    "4 × 512": (4, 512),
}
LONG = {"1 × 1,024": (1, 1024), "1 × 2,048": (1, 2048)}  # where the attention is most of the time; one round
PADDED, SORTED = "32 rows, padded", "32 rows, sorted"
# What servers and rerankers send: one request padded to a fixed length, and two short ones.
FEW = {"32 tokens in 512 slots": ([32], 512), "8 and 5 tokens": ([8, 5], 8)}
CASES = [*FULL, PADDED, SORTED, *FEW, *LONG]
STOCK, COMPILED, ATTENTION = "stock PyTorch", "torch.compile", "accelerate_attention"
OURS, BFLOAT16, INT8 = "optimize", "optimize, bfloat16", "optimize, int8"
CAPTURED = "optimize, captured"
EXACT = (ATTENTION, OURS, CAPTURED)
ALONE = (STOCK, OURS, BFLOAT16, INT8)  # also in processes of their own
PASSES = ("forward", "training")
LARGEST_ERROR = 1e-5
PROTOCOL = (
    "CPU seconds of the process (time.process_time), variants in turns, the median of the rounds after the first; of "
    "the longest rows one round; by several threads, seconds of the clock, each variant in a process of its own"
)


def model_of(family: str) -> torch.nn.Module:
    import transformers

    name, fields = FAMILIES[family]
    head = getattr(transformers, name)
    torch.manual_seed(0)
    return head(head.config_class(**fields))


def lengths_of(count: int = 32, least: int = 8, most: int = 190, median: float = 40, spread: float = 0.8) -> list[int]:
    """Quantiles of a log-normal distribution, in an order that is not theirs."""
    quantiles = torch.special.ndtri((torch.arange(count) + 0.5) / count)
    lengths = (median * (spread * quantiles).exp()).round().clamp(least, most)
    return lengths[torch.randperm(count, generator=torch.Generator().manual_seed(0))].int().tolist()


def batches_of(family: str, case: str) -> list[Inputs]:
    """Padded on the right; for XLNet on the left and with token types, as its tokenizer makes them."""
    slots = None
    if case in (PADDED, SORTED):
        lengths = lengths_of()
        size = 8 if case == SORTED else len(lengths)
        lengths = sorted(lengths, reverse=True) if case == SORTED else lengths
    elif case in FEW:
        lengths, slots = FEW[case]
        size = len(lengths)
    else:
        size, length = {**FULL, **LONG}[case]
        lengths = [length] * size
    generator = torch.Generator().manual_seed(1)
    batches = []
    for start in range(0, len(lengths), size):
        rows = torch.tensor(lengths[start : start + size])
        mask = (torch.arange(slots or int(rows.max())) < rows[:, None]).long()
        ids = torch.randint(5, 1000, mask.shape, generator=generator)
        batch = {"input_ids": torch.where(mask == 1, ids, padding_id(family)), "attention_mask": mask}
        if family == "XLNet":
            batch["token_type_ids"] = (torch.arange(mask.shape[1]) >= mask.shape[1] // 2).long().repeat(len(rows), 1)
            batch = {name: each.flip(1) for name, each in batch.items()}
        batches.append(batch)
    return batches


def padding_id(family: str) -> int:
    import transformers

    name, fields = FAMILIES[family]
    return getattr(transformers, name).config_class(**fields).pad_token_id or 0


def forward(model: torch.nn.Module) -> Run:
    """States of a batch, in inference."""

    def run(inputs: Inputs) -> torch.Tensor:
        with torch.inference_mode():
            return model(**inputs)[0]

    return run


def step(model: torch.nn.Module, inputs: Inputs) -> None:
    """Gradients of a loss of the states of tokens: of their product with a fixed vector, since their norm is fixed."""
    states = model(**inputs)[0]
    mask = inputs["attention_mask"]
    direction = torch.linspace(-1, 1, states.shape[-1])
    (((states @ direction) * mask).square().sum() / mask.sum()).backward()


def training(model: torch.nn.Module, batches: list[Inputs]) -> Callable[[], None]:
    """Training steps of these batches."""

    def run() -> None:
        for inputs in batches:
            model.zero_grad()
            step(model, inputs)

    return run


def encoding(run: Run, batches: list[Inputs]) -> Callable[[], list[torch.Tensor]]:
    """Forward passes of these batches."""
    return lambda: [run(inputs) for inputs in batches]


def states_errors(runs: dict[str, Run], batches: list[Inputs]) -> dict[str, float]:
    """Of each variant: the largest difference of the states of tokens from stock's, relative to the largest state."""
    real = [inputs["attention_mask"].bool() for inputs in batches]

    def states(run: Run) -> torch.Tensor:
        return torch.cat([run(inputs)[mask] for inputs, mask in zip(batches, real, strict=True)])

    expected = states(runs[STOCK])
    return {
        name: float((states(run) - expected).abs().max() / expected.abs().max())
        for name, run in runs.items()
        if name != STOCK
    }


def gradients_errors(models: dict[str, torch.nn.Module], inputs: Inputs) -> dict[str, float]:
    """Of each variant: the norm of the difference of all gradients from stock's, relative to their norm."""

    step(models[STOCK], inputs)
    reached = [weight.grad is not None for weight in models[STOCK].parameters()]  # torch.compile makes zeros of others

    def gradients(model: torch.nn.Module) -> torch.Tensor:
        model.zero_grad()
        step(model, inputs)
        pairs = zip(model.parameters(), reached, strict=True)
        return torch.cat([weight.grad.flatten() for weight, is_reached in pairs if is_reached])

    expected = gradients(models[STOCK])
    return {
        name: float((gradients(model) - expected).norm() / expected.norm())
        for name, model in models.items()
        if name != STOCK
    }


def changed(stock: torch.nn.Module, variant: str) -> torch.nn.Module:
    """A copy of a model, changed by one of our functions."""
    import hf_relpos

    model = copy.deepcopy(stock)
    if variant == ATTENTION:
        hf_relpos.optimize(model, dtype=None, unpad=False)
    else:
        dtype = {BFLOAT16: "bfloat16", INT8: "int8"}.get(variant, "float32")
        hf_relpos.optimize(model, dtype=dtype, capture=variant == CAPTURED)
    return model


def measure(family: str, cases: list[str], rounds: int, with_peers: bool, absent: dict[str, str]) -> Iterator[dict]:
    """Times of all variants, in turns, case by case.

    Args:
        absent: filled with the peers that do not run, and why.
    """
    stock = model_of(family).eval()
    ours = [*([ATTENTION] if family in RELATIVE_FAMILIES else []), OURS, CAPTURED, BFLOAT16, INT8]
    models = {STOCK: stock, **{each: changed(stock, each) for each in ours}}
    if with_peers:
        models[COMPILED] = compiled(copy.deepcopy(stock))
    runs: dict[str, Run] = {name: forward(model) for name, model in models.items()}
    with contextlib.closing(runtimes(stock, batches_of(family, SORTED))) as graphs:
        for name, make in graphs if with_peers else ():
            try:
                runs[name] = make()
            except Exception as error:  # whatever a peer raises: the others are measured
                absent[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                print(f"{name} is left out: {absent[name]}", file=sys.stderr)
        for case in cases:
            yield timed(family, case, "forward", rounds, runs, models)
    runs.clear()
    for name in (CAPTURED, BFLOAT16, INT8):  # for inference
        models.pop(name)
    for model in models.values():
        model.train()
    for case in cases:
        yield timed(family, case, "training", rounds, {}, models)


def pooled(run: Run, batches: list[Inputs]) -> torch.Tensor:
    """Sentence vectors: the mean of the states of tokens, of norm 1."""
    found = []
    for inputs in batches:
        mask = inputs["attention_mask"][..., None]
        found.append((run(inputs) * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(found).clone(), dim=-1)


def measure_sentences(folder: Path, pairs: list[list[str]]) -> list[dict]:
    """A real sentence encoder: times, cosines to float32 and the correlation with scores of pairs, by variant."""
    from scipy.stats import spearmanr
    from transformers import AutoModel, AutoTokenizer

    import hf_relpos

    tokenizer, stock = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    names = ("input_ids", "attention_mask")

    def batches_of_texts(texts: list[str]) -> list[Inputs]:
        given = [tokenizer(texts[at : at + 32], padding=True, return_tensors="pt") for at in range(0, len(texts), 32)]
        return [{name: each[name] for name in names} for each in given]

    others, pairs = pairs[1::2], pairs[::2]  # the others are what int8 looks at before
    texts = [text for _, *both in pairs for text in both]
    order = sorted(range(len(texts)), key=lambda at: -len(tokenizer(texts[at])["input_ids"]))
    batches = batches_of_texts([texts[at] for at in order])
    models = {STOCK: stock}
    for variant, precision in ((OURS, "float32"), (BFLOAT16, "bfloat16"), (INT8, "int8")):
        models[variant] = copy.deepcopy(stock)
        sample = batches_of_texts([pair[1] for pair in others[:32]])[0] if precision == "int8" else None
        print(hf_relpos.optimize(models[variant], dtype=precision, sample=sample), file=sys.stderr)
    runs = {name: forward(model) for name, model in models.items()}
    with contextlib.closing(runtimes(stock, batches)) as graphs:
        runs |= {name: make() for name, make in graphs if name.startswith("ONNX")}
        vectors = {name: pooled(run, batches) for name, run in runs.items()}
        taken = time_in_turns({name: encoding(run, batches) for name, run in runs.items()}, 1, time.process_time)
    rows = []
    for name, found in vectors.items():
        cosines = (found * vectors[STOCK]).sum(1)
        of_text = found[torch.tensor(order).argsort()].unflatten(0, (-1, 2))
        rho = spearmanr((of_text[:, 0] * of_text[:, 1]).sum(1), [float(score) for score, *_ in pairs])
        row = {"model": folder.name, "variant": name, "sentences": len(texts), "seconds": round(taken[name], 3)}
        row["cosine"] = [round(float(cosines.mean()), 4), round(float(cosines.min()), 4)]
        rows.append({**row, "spearman": round(100 * float(rho.statistic), 2)})
    return rows


def timed(
    family: str, case: str, kind: str, rounds: int, runs: dict[str, Run], models: dict[str, torch.nn.Module]
) -> dict:
    """One row of the results."""
    batches = batches_of(family, case)
    if kind == "forward":
        calls = {name: encoding(run, batches) for name, run in runs.items()}
        errors = states_errors(runs, batches)
    else:
        calls = {name: training(model, batches) for name, model in models.items()}
        errors = gradients_errors(models, batches[0])
    for name in EXACT:
        if not errors.get(name, 0.0) <= LARGEST_ERROR:
            raise SystemExit(f"{family}, {case}, {kind}: {name} differs by {errors[name]:.1e}; no times are shown")
    taken = time_in_turns(calls, 1 if case in LONG else rounds, time.process_time)
    gc.collect()
    return {
        "family": family,
        "case": case,
        "pass": kind,
        "seconds": {name: round(seconds, 5) for name, seconds in taken.items()},
        "errors": {name: float(f"{error:.2g}") for name, error in errors.items()},
    }


def alone(family: str, variant: str, cases: list[str], rounds: int) -> dict:
    """Of a variant in a process of its own: seconds of cases by the clock, and MB of a padded batch.

    The MB are those of the process at its largest in the batch, less those that it has once the variant is gone.
    """
    stock, batches = model_of(family).eval(), batches_of(family, PADDED)
    with contextlib.closing(runtimes(stock, batches_of(family, SORTED))) as graphs:
        if variant in ALONE:
            run = forward(stock if variant == STOCK else changed(stock, variant))
        else:
            run = next(make for name, make in graphs if name == variant)()
    del stock
    for _ in range(3):  # weights are packed in the second
        run(batches[0])
    ctypes.CDLL(None).malloc_trim(0)  # what was needed to make it
    reset_peak_memory()
    run(batches[0])
    largest = peak_memory()
    seconds = {
        case: time_in_turns({case: encoding(run, batches_of(family, case))}, 3 * rounds, time.perf_counter)[case]
        for case in cases
    }
    del run
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak_memory()
    return {"seconds": seconds, "MB": round(largest - peak_memory(), 1)}


def measure_alone(family: str, args: argparse.Namespace, run: dict) -> None:
    """Memory, and times by several threads, in processes of their own: idle threads of a variant slow down others."""
    with contextlib.closing(runtimes(model_of(family), batches_of(family, SORTED))) as graphs:
        names = [*ALONE, *(name for name, _ in graphs if args.peers and name not in run["absent"])]
    options = ["--threads", str(args.threads), "--rounds", str(args.rounds), "--cases", *args.cases]
    found = {}
    for name in names:
        try:
            found[name] = run_worker(sys.executable, __file__, *options, "--worker", f"{family}/{name}")
        except RuntimeError as error:
            run["absent"][name] = str(error).strip().splitlines()[-1]
    run["forward_memory"] = {name: each["MB"] for name, each in found.items()}
    for case in args.cases if args.threads > 1 else ():
        seconds = {name: round(each["seconds"][case], 5) for name, each in found.items()}
        run["times"].append({"family": family, "case": case, "pass": "forward", "seconds": seconds, "errors": {}})


def memory(family: str, variant: str, case: str) -> float:
    """MB by which a training step of a case grows the process."""
    model = model_of(family)
    if variant == OURS:
        model = changed(model, OURS)
    training(model, batches_of(family, "1 × 128"))()  # gradients exist from now on
    run = training(model, batches_of(family, case))
    gc.collect()
    reset_peak_memory()
    before = peak_memory()
    run()
    return round(peak_memory() - before, 1)


# The page ------------------------------------------------------------------------------------------------------------

GRAPHS = ("ONNX Runtime", "ONNX Runtime, int8", "OpenVINO", "OpenVINO, default precision", "OpenVINO, int8")
OTHER_PEERS = ("CTranslate2", "CTranslate2, int8", "disentangled-flash")
ORDER = (STOCK, COMPILED, *GRAPHS, *OTHER_PEERS, ATTENTION, OURS, CAPTURED, BFLOAT16, INT8)


INTRODUCTION = """# Encoders of Transformers on the CPU, and what makes them faster

Speed-up over Transformers ("stock"): its time ÷ that of each variant. Two layers of base size, random weights,
float32. `optimize` is `hf_relpos.optimize`; `accelerate_attention` is its attention alone, by
`dtype=None, unpad=False` ([how](../../live.md)).

- "4 × 512": four full rows of 512 tokens. "32 rows": 8 to 190 tokens each, "padded" into one batch, of which
  {real:.0f} % are tokens, or "sorted" by length into batches of 8.
- Errors are the largest differences from stock in all cases: hidden states of tokens relative to the largest one,
  gradients relative to their norm.
- ρ: Spearman's correlation of the cosines of sentence pairs with the scores of STS-B.
- Memory: what a training step of the longest case adds to the resident size. "MB, padded": weights and all that a
  process holds at its largest while it computes the padded batch.
- ONNX Runtime and OpenVINO run the stock model's graph; int8 by `quantize_dynamic` and `nncf.quantize`.
- disentangled-flash: its PyTorch backend without padding (`forward_packed`), in inference.
- Times: {protocol}.
  Export, quantization and compilation are not counted. Differences below a tenth are noise.

**Result.** On full rows `optimize` is about as fast as ONNX Runtime; on padded batches it is several times faster. On
family/model 26/2 oneDNN multiplies float32 twice as fast as MKL. On 25/17 both are equally fast, so float32 gains only
by attention and unpadding. Sentence vectors in int8 stay close to float32; those of ONNX Runtime's int8 may not.
**One short request is faster elsewhere**: 16 tokens of DeBERTa v3 and BERT take OpenVINO 0.76 and 0.75 of the time of
`optimize` (26/2), 0.63 and 0.60 in bfloat16, which it takes unasked; BERT 0.61 on 25/17, 0.80 with `capture=True`.
`optimize` needs the least memory.
"""
PEERS = ("onnxruntime", "openvino", "nncf", "disentangled-flash", "ctranslate2")  # whose releases the page names
PEER = "ONNX Runtime"  # that is shown of many families
BRIEF = ("8 × 128", PADDED, *FEW, "1 × 1,024")  # what is shown of many families


def faster(rows: list[dict], name: str, case: str) -> str:
    """Stock's time ÷ that of a variant."""
    for row in rows:
        if row["case"] == case and name in row["seconds"]:
            return f"{row['seconds'][STOCK] / row['seconds'][name]:.2f}"
    return "–"


def largest_error(rows: list[dict], name: str) -> str:
    """Over the cases, of a variant."""
    errors = [row["errors"][name] for row in rows if name in row["errors"]]
    return f"{max(errors):.0e}" if errors else "–"


def tables_of(runs: dict[str, dict]) -> list[Table]:
    """Tables of the families that were measured by one command: times, and memory where it was measured."""
    cases = list(dict.fromkeys(row["case"] for run in runs.values() for row in run["times"]))
    measured = {family: run["memory"] for family, run in runs.items() if run["memory"]}
    grown = {family: [f"{max(0, of[name]):.0f}" for name in (STOCK, OURS)] for family, of in measured.items()}
    title = ", ".join(runs)

    def rows_of(family: str, kind: str) -> list[dict]:
        return [row for row in runs[family]["times"] if row["pass"] == kind]

    if len(runs) > 2:  # a row for each family
        cases = [case for case in cases if case in BRIEF]
        shown = [(OURS, "forward"), (BFLOAT16, "forward"), (OURS, "training")]
        with_peers = any(PEER in row["seconds"] for family in runs for row in rows_of(family, "forward"))
        shown += [(PEER, "forward")] if with_peers else []
        lines = []
        for family in runs:
            cells = [[faster(rows_of(family, kind), name, case) for name, kind in shown] for case in cases]
            cells += [[largest_error(rows_of(family, "forward"), OURS)], grown.get(family, ["–"])]
            lines.append([family, *(" / ".join(each) for each in cells)])
        head = f"optimize / bfloat16 / training step{' / ONNX Runtime' if with_peers else ''}"
        return [(title, [head, *cases, "error", "MB, stock / optimize"], lines)]
    found: list[Table] = []
    for family, run in runs.items():
        held, lines = run.get("forward_memory", {}), []
        for kind in PASSES:
            every = rows_of(family, kind)
            order = ORDER if held and kind == "forward" else ORDER[1:]
            for name in (each for each in order if any(each in row["seconds"] for row in every)):
                cells = [faster(every, name, case) for case in cases]
                label = name if kind == "forward" else f"{name}, training step"
                memory = [f"{held[name]:.0f}" if kind == "forward" and name in held else "–"] if held else []
                lines.append([label, *cells, largest_error(every, name), *memory])
        found.append((title, [family, *cases, "error", *(["MB, padded"] if held else [])], lines))
    if grown:
        lines = [[family, runs[family]["longest"], *numbers] for family, numbers in grown.items()]
        found.append((title, ["MB of a training step", "", "stock", "optimize"], lines))
    return found


def sentence_tables(runs: dict[str, dict]) -> list[Table]:
    """Of the real models that were measured by one command."""
    cells: dict[str, list[str]] = {}
    for run in runs.values():
        stock = run["rows"][0]
        for row in run["rows"]:
            mean, least = row["cosine"]
            ratio = f"{stock['seconds'] / row['seconds']:.2f}"
            cells.setdefault(row["variant"], []).extend([ratio, f"{mean:.4f} / {least:.4f}", f"{row['spearman']:.2f}"])
    names = [run["rows"][0]["model"] for run in runs.values()]
    columns = [f"{name}, {what}" for name in names for what in ("speed", "cosine to float32, mean / least", "ρ × 100")]
    lines = [[variant, *found] for variant, found in cells.items()]
    return [(f"Real models, {stock['sentences']} sentences", ["", *columns], lines)]


def tables(results: dict) -> list[tuple[dict, dict[str, str], list[Table]]]:
    """Of families that were measured alike: their environment, the peers that were left out, and the tables."""
    alike: dict[str, dict[str, dict]] = {}
    for key, run in results["families"].items():
        fixed = {name: value for name, value in run["environment"].items() if name not in ("date", "load", "command")}
        fixed["kind"] = "rows" in run
        alike.setdefault(json.dumps(fixed, sort_keys=True), {})[key.partition(" / ")[0]] = run
    found = []
    for runs in alike.values():
        commands = dict.fromkeys(run["environment"]["command"] for run in runs.values())
        about = {**next(iter(runs.values()))["environment"], "command": "`\n\n`".join(commands)}
        absent = {name: reason for run in runs.values() for name, reason in run["absent"].items()}
        made = sentence_tables if "rows" in next(iter(runs.values())) else tables_of
        found.append((about, absent, made(runs)))
    return found


def throughput(results: dict) -> tuple[list[str], list[list[str]]]:
    """What padded batches mean for encoders of twelve layers, which take six times the seconds of two."""
    names, tokens, lines = (STOCK, PEER, OURS, BFLOAT16, INT8), sum(lengths_of()), []
    for key, run in results["families"].items():
        for row in run.get("times", ()) if run["environment"]["threads"] == 1 else ():
            if (row["case"], row["pass"]) == (PADDED, "forward") and INT8 in row["seconds"]:
                rates = [tokens / (6 * row["seconds"][name]) if name in row["seconds"] else None for name in names]
                lines.append([key, *("–" if rate is None else f"{rate:,.0f}" for rate in rates)])
    return ["tokens a second", *names], lines


def card(results: dict) -> str:
    """cpu-encoder.md."""
    from hf_relpos.console import markdown_table

    real = 100 * sum(lengths_of()) / (len(lengths_of()) * max(lengths_of()))
    text = INTRODUCTION.format(real=real, protocol=PROTOCOL)
    for about, absent, parts in tables(results):
        left = "; ".join(f"{name} ({why})" for name, why in absent.items())
        left = f"\nLeft out: {left}.\n" if left else ""
        packages = ", ".join(f"{name} {about['packages'][name]}" for name in PEERS if name in about["packages"])
        peers = f"\nPeers: {packages}.\n" if packages else ""
        text += f"\n## {parts[0][0]} ({machine(about)})\n\n{machine_and_versions(about)}\n\n`{about['command']}`\n"
        text += peers + left + "".join(f"\n{markdown_table(columns, rows)}\n" for _, columns, rows in parts)
    passages = 1e6 * sum(lengths_of()) / len(lengths_of()) / 3600
    words = (
        f"of twelve layers, padded batches, one core. A million passages take {passages:,.0f} hours ÷ these numbers"
    )
    return (
        f"{text}\n## Tokens a second\n\nExtrapolated to encoders {words}.\n\n{markdown_table(*throughput(results))}\n"
    )


def machine(about: dict) -> str:
    """What tells processors apart."""
    return f"{about['machine']} {about['cpu_family_model']}"


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__.splitlines()[0])
    first, *others = FAMILIES
    choice = f"instead of {first}, stock and ours alone; without a name: {', '.join(others)}"
    parser.add_argument("--families", nargs="*", choices=FAMILIES, metavar="FAMILY", help=choice)
    parser.add_argument("--peers", action="store_true", help="the peers for these families, too")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--models", nargs="+", type=Path, metavar="FOLDER", help="real sentence encoders alone")
    parser.add_argument("--sts", type=Path, metavar="FILE", help="pairs of sentences for --models")
    parser.add_argument("--pairs", type=int, default=600, help="how many of them; half is what int8 looks at before")
    parser.add_argument("--label", default="", help="added to the names, so that results of other cases are kept")
    parser.add_argument("--threads", type=positive_int, default=1, help="more than one: forward passes, by the clock")
    args = parser.parse_args()
    if args.models and args.sts is None:
        parser.error("--models needs --sts FILE: lines of score TAB sentence TAB sentence")
    args.peers = args.peers or args.families is None
    args.families = [first] if args.families is None else args.families or others
    return args


def main() -> None:
    args = arguments()
    start_quietly(args.threads)
    if args.worker:
        family, variant, *longest = args.worker.split("/")
        cases = args.cases if args.threads > 1 else []
        found = memory(family, variant, *longest) if longest else alone(family, variant, cases, args.rounds)
        print(json.dumps(found))
        return
    path = args.out / "cpu-encoder"
    results = stored(path) or {"families": {}}  # other families and machines are kept
    about = {**environment(), "protocol": PROTOCOL, "packages": versions() if args.peers or args.models else {}}
    for folder in args.models or ():
        lines = args.sts.read_text(encoding="utf-8").splitlines()[1:]
        pairs = [line.split("\t") for line in lines[:: max(1, len(lines) // args.pairs)]][: args.pairs]
        rows = measure_sentences(folder, pairs)
        results["families"][f"{folder.name} / {machine(about)}"] = {"environment": about, "absent": {}, "rows": rows}
        write_report(path, results, card(results))
    for family in () if args.models else args.families:
        run: dict = {"environment": about, "absent": {}, "times": [], "longest": args.cases[-1], "memory": {}}
        results["families"][f"{family}{args.label} / {machine(about)}"] = run
        rows = measure(family, args.cases, args.rounds, args.peers, run["absent"]) if args.threads == 1 else ()
        for row in rows:
            print(json.dumps(row, ensure_ascii=False), file=sys.stderr)
            run["times"].append(row)
            write_report(path, results, card(results))
        if args.threads > 1 or args.peers:
            measure_alone(family, args, run)
        if not args.label:
            run["memory"] = {
                variant: run_worker(sys.executable, __file__, "--worker", f"{family}/{variant}/{run['longest']}")
                for variant in (STOCK, OURS)
            }
        write_report(path, results, card(results))
    print_tables([table for _, _, parts in tables(results) for table in parts])


if __name__ == "__main__":
    main()
