"""Speed and memory of attention with relative positions on a GPU: one command, at most ten minutes.

    python scripts/benchmarks/bench_gpu.py                       # every section
    python scripts/benchmarks/bench_gpu.py --sections check core # some of them

Sections, each with a time after which it stops: `check` compares every backend with float64, outputs and all
gradients, twice bit by bit, and times nothing that fails; `floor` times SDPA without positions, backend by backend;
`core` the kernels, `harmonic` on SDPA's kernels, and their peers (dense biases for SDPA, chunks, FlexAttention,
eager) at the same sizes; `window` an attention window by its band and by the mask of all pairs, full
attention, and text in pieces; `tiles` cuts of the kernels and sizes of the workspace, from which to choose; `model`
training steps of BERT-base, eager and compiled; `deberta` DeBERTa v3, stock, with `accelerate_attention`, and with the
packages flashdeberta and disentangled-flash where they are installed; `padding` what padded batches cost.
Times are medians of CUDA events over at least 20 calls, after a flush of the L2
cache; those of attention are the device's own, for a model hides what the host takes to queue it ("host_ms").
Results go to docs/results/benchmarks/gpu-attention.json and .md after every measurement.
"""

import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from bench_attention import HEADS, SIZE, RelativeAttention, passes
from shared.arguments import benchmark_parser
from shared.measuring import environment, error_ratio
from shared.reports import Table, describe, markdown_sections, met, print_tables, write_report
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


SECTIONS = {  # seconds
    "check": 100,
    "floor": 40,
    "core": 140,
    "window": 50,
    "tiles": 70,
    "model": 110,
    "deberta": 45,
    "padding": 30,
}
LIMIT = 585  # seconds of all of them
SIZES = [(32, 128), (32, 512), (64, 512), (8, 2048), (8, 4096), (4, 8192)]
SCHEMES = ["relative_key", "relative_key_query", "shaw", "t5", "deberta"]
PLAIN = "harmonic"  # attention without terms, with wider heads: no kernel of ours
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
CLIPPED = 64
WINDOW, PIECE = 256, 512
WINDOW_SIZES = [(8, 4096), (4, 8192), (1, 32768)]
# (scheme, batch, length, pass) to the most × the fastest floor.
GOALS = {
    ("relative_key", 32, 512, "forward"): 2.3,
    ("relative_key_query", 32, 512, "forward"): 3.0,
    ("relative_key", 32, 512, "both"): 2.4,
    ("relative_key_query", 32, 512, "both"): 3.2,
    ("relative_key", 8, 4096, "forward"): 2.0,
    (f"relative_key, clipped at {CLIPPED}", 8, 4096, "forward"): 1.3,
}
STEP_GOALS = {"relative_key": 1.07, "relative_key_query": 1.15, PLAIN: 1.15}
# What `tiles` tries: kernel to (rows, columns, warps, stages); the one that ships is among them.
CUTS = {
    "forward": [(128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (128, 64, 4, 2), (128, 128, 8, 2)],
    "backward": [(128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 64, 4, 2)],
    "table_product": [(128, 64, 4, 1), (128, 128, 8, 1), (128, 64, 8, 1)],
    "table_apply": [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2)],
    "table_gradient": [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2)],
}
WORKSPACES = [32 << 20, 64 << 20, 128 << 20, 256 << 20]


# What is run --------------------------------------------------------------------------------------------------------


def layer(name: str, backend: str, length: int, dtype: torch.dtype, device: str) -> nn.Module:
    """Attention with a scheme's terms; "…, clipped at k" has tables that end there."""
    attention = RelativeAttention(name.split(",")[0], backend, length)
    if "clipped" in name:
        from dataclasses import replace

        def clipped(scheme, args, unclipped):
            tables = tuple(
                replace(table, row_of=lambda r, row_of=table.row_of: row_of(r.clamp(-CLIPPED, CLIPPED)))
                for table in unclipped.query_table
            )
            return replace(unclipped, A=tables)

        attention.scheme.register_forward_hook(clipped)
    return attention.to(device, dtype)


def under_window(attention: nn.Module, length: int, device: str, whole: bool = False) -> Callable:
    """The same with the first token as global token; `whole`, by the mask of all pairs."""
    from dataclasses import replace

    from hf_relpos.attention.dispatch import run_attention
    from hf_relpos.attention.sliding_window import SlidingWindowMask

    band = SlidingWindowMask(length, length, WINDOW, torch.device(device))
    mask = band.dense if whole else band

    def run(query, key, value, dropout: float = 0.0) -> torch.Tensor:
        return run_attention(attention.backend, replace(attention.call(query, key, value, dropout), mask=mask))[0]

    run.parameters = attention.parameters
    return run


def inputs(batch: int, length: int, dtype: torch.dtype, device: str, size: int = SIZE) -> list[torch.Tensor]:
    """q, k and v as the projections of a layer leave them, (B, H, L, d), that require gradients."""
    torch.manual_seed(0)
    tensors = [torch.randn(batch, length, HEADS, size).to(device, dtype).transpose(1, 2) for _ in range(3)]
    return [tensor.detach().requires_grad_() for tensor in tensors]


def floor(query, key, value, dropout: float = 0.0) -> torch.Tensor:
    """Attention without positions, (B, L, H, d)."""
    return nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout).transpose(1, 2)


# Correctness --------------------------------------------------------------------------------------------------------


def check(name: str, batch: int, length: int, dtype: torch.dtype, device: str, window: bool = False) -> float:
    """Error of ours ÷ error of eager in the same dtype, both against float64: the worst of output and gradients.

    Args:
        window: whether under a window, which eager has as the mask of all pairs.

    Raises:
        AssertionError: when it is above 2, or two runs differ in any bit.
    """
    results = []
    for backend, kind in (("relpos", dtype), ("relpos", dtype), ("eager", dtype), ("eager", torch.float64)):
        attention = layer(name, backend, length, dtype, device).to(kind)
        if window:
            attention = under_window(attention, length, device, whole=backend == "eager")
        tensors = [x.detach().to(kind).requires_grad_() for x in inputs(batch, length, dtype, device)]
        results.append(passes(attention, tensors)["both"]())
    output, repeated, eager, exact = results
    assert all(torch.equal(x, y) for x, y in zip(output, repeated, strict=True)), f"{name}: two runs differ"
    ratio = error_ratio(output, eager, exact)
    assert ratio <= 2.0, f"{name} L{length} {dtype}: {ratio:.2f} times the error of eager"
    return ratio


def check_dropout(batch: int, length: int, device: str) -> None:
    """The backward drops what the forward dropped: the output is linear in v, so that Σ v·∂v is the output's own sum.

    Raises:
        AssertionError: when it does not.
    """
    attention = layer("relative_key", "relpos", length, torch.float32, device)
    tensors = inputs(batch, length, torch.float32, device)
    out = attention(*tensors, dropout=0.3)
    gradient = torch.randn_like(out)
    d_value = torch.autograd.grad(out, tensors[2], gradient)[0]
    one, other = (tensors[2] * d_value).sum(), (out * gradient).sum()
    assert (one - other).abs() <= 1e-3 * out.abs().sum().sqrt(), "dropout of the backward is not the forward's"


# Time ---------------------------------------------------------------------------------------------------------------


class Out:
    """Results so far, written after each."""

    def __init__(self, folder: Path):
        self.folder, self.results = folder, {"environment": environment() | device_facts(), "rows": [], "problems": []}
        self.results["environment"]["protocol"] = "medians of CUDA events, L2 flushed before each of at least 20 calls"

    def add(self, section: str, variant: str, **facts) -> dict:
        row = {"section": section, "variant": variant, **facts}
        self.results["rows"].append(row)
        print(json.dumps(row), flush=True)
        self.write()
        return row

    def problem(self, text: str) -> None:
        self.results["problems"].append(text)
        print(f"PROBLEM {text}", flush=True)
        self.write()

    def write(self) -> None:
        write_report(self.folder / "gpu-attention", self.results, card(self.results))


def device_facts() -> dict:
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "memory_gb": round(properties.total_memory / 1e9),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton.__version__,
    }


def milliseconds(call: Callable, ahead: bool, least: int = 20, seconds: float = 1.0) -> tuple[float, float]:
    """Median of `least` calls or more, after two that do not count, the L2 cache flushed before each; and of the host.

    Args:
        ahead: flush for as long as the host takes to queue a call, so that the device never waits for it.
    """
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    call()
    flush.zero_()
    one, host = (_seconds(run) for run in (flush.zero_, call))
    flushes = 1 + (min(int(1.5 * host[0] / one[1]), 100) if ahead else 0)
    begin, taken = time.monotonic(), []
    while len(taken) < least or (time.monotonic() - begin < 0.2 * seconds and len(taken) < 100):
        for _ in range(flushes):
            flush.zero_()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        taken.append(first.elapsed_time(last))
        if time.monotonic() - begin > seconds and len(taken) >= 3:
            break
    return statistics.median(taken), 1e3 * host[0]


def _seconds(call: Callable) -> tuple[float, float]:
    """Until the host has queued a call, and until the device is done."""
    torch.cuda.synchronize()
    begin = time.monotonic()
    call()
    queued = time.monotonic() - begin
    torch.cuda.synchronize()
    return queued, time.monotonic() - begin


def peak_mb(call: Callable) -> float:
    """MB that a call adds to what is allocated before it."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def timed(out: Out, section: str, variant: str, call: Callable, **facts) -> None:
    """Time one call and note it; a failure is noted and ends nothing."""
    try:
        ms, host_ms = milliseconds(call, ahead=section not in ("model", "padding"))
        out.add(section, variant, ms=round(ms, 4), host_ms=round(host_ms, 4), mb=round(peak_mb(call), 1), **facts)
    except Exception as error:  # Triton's, for a cut that takes too much memory, are of no kind that PyTorch has
        out.problem(f"{section}, {variant}, {facts}: {type(error).__name__}: {str(error)[:200]}")
        torch.cuda.empty_cache()


def until(seconds: float, things: Iterable) -> Iterable:
    """The things, as long as there is time."""
    end = time.monotonic() + seconds
    for thing in things:
        if time.monotonic() > end:
            print(f"out of time before {thing}", flush=True)
            return
        yield thing


# Sections -----------------------------------------------------------------------------------------------------------


def run_check(out: Out, seconds: float) -> None:
    clipped = f"relative_key, clipped at {CLIPPED}"
    cases = [  # what is timed later first: builds take most of the time
        *((name, 2, 512, torch.bfloat16, 64) for name in (*SCHEMES[:2], PLAIN, clipped, *SCHEMES[2:])),
        *((name, 2, 100, torch.bfloat16, 64) for name in (*SCHEMES, PLAIN, clipped)),
        *(("shaw", 2, 333, dtype, size) for dtype in (torch.float32, torch.float16) for size in (32, 64, 128)),
    ]
    try:
        check_dropout(2, 100, "cuda")
    except Exception as error:
        out.problem(f"check of dropout: {type(error).__name__}: {str(error)[:300]}")
    for name in SCHEMES[:3]:
        try:
            ratio = check(name, 1, 2000, torch.bfloat16, "cuda", window=True)
            facts = {"batch": 1, "length": 2000, "dtype": "torch.bfloat16", "size": SIZE, "ratio": round(ratio, 3)}
            out.add("check", windowed(name), **facts)
        except Exception as error:
            out.problem(f"check, {windowed(name)} L2000: {type(error).__name__}: {str(error)[:300]}")
            torch.cuda.empty_cache()
    for name, batch, length, dtype, size in until(seconds, cases):
        try:
            usual = size == SIZE
            ratio = check(name, batch, length, dtype, "cuda") if usual else check_wide(size, length, dtype)
            out.add("check", name, batch=batch, length=length, dtype=str(dtype), size=size, ratio=round(ratio, 3))
        except Exception as error:
            out.problem(f"check, {name} L{length} {dtype} d{size}: {type(error).__name__}: {str(error)[:300]}")
            torch.cuda.empty_cache()


def check_wide(size: int, length: int, dtype: torch.dtype) -> float:
    """As `check`, for other head sizes: relative_key's formula written out."""

    from hf_relpos import AttentionContext, Table, Terms, attend
    from hf_relpos.attention.backends.kernels.backend import Triton
    from hf_relpos.attention.call import AttentionCall

    torch.manual_seed(1)
    table, results = 0.3 * torch.randn(1, 33, size, device="cuda"), []
    for by_kernel, kind in ((True, dtype), (False, dtype), (False, torch.float64)):
        tensors = [x.detach().to(kind).requires_grad_() for x in inputs(2, length, dtype, "cuda", size)]
        rows = table.to(dtype).to(kind).requires_grad_()
        near = Table(rows, lambda r: r.clamp(-16, 16) + 16)
        terms = Terms(query_table=(near,), value_table=(near,))
        context = AttentionContext(length, length)
        if by_kernel:
            output = Triton().run(AttentionCall(*tensors, terms, context))[0]
        else:
            output = attend(*tensors, terms, context)[0].transpose(1, 2)
        torch.manual_seed(2)
        gradient = torch.randn(output.shape).to("cuda", output.dtype)
        results.append((output, *torch.autograd.grad(output, [*tensors, rows], gradient)))
    ratio = error_ratio(*results)
    assert ratio <= 2.0, f"{ratio:.2f} times the error of eager"
    return ratio


def passed(out: Out, name: str) -> bool:
    """Whether attention with that scheme may be timed: it was checked, and no check of it failed."""
    checked = any(row["section"] == "check" and row["variant"] == name for row in out.results["rows"])
    failed = (f"check, {name} L", "check of dropout")
    return checked and not any(text.startswith(failed) for text in out.results["problems"])


def windowed(name: str) -> str:
    """A scheme under the window, in the results."""
    return f"{name}, window of {WINDOW}"


def run_floor(out: Out, seconds: float) -> None:
    for (batch, length), (name, backend) in until(seconds, itertools.product(SIZES, BACKENDS.items())):
        tensors = inputs(batch, length, torch.bfloat16, "cuda")
        with sdpa_kernel(backend):
            for kind, call in passes(floor, tensors).items():
                timed(out, "floor", name, call, batch=batch, length=length, **{"pass": kind})


def flex(length: int) -> Callable:
    """FlexAttention with q·A read by index, compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention)
    table = torch.randn(2 * length - 1, SIZE, device="cuda", dtype=torch.bfloat16)

    def run(query, key, value, dropout: float = 0.0):
        products = query @ table.t() * SIZE**-0.5

        def score(value, row, head, i, j):
            return value + products[row, head, i, j - i + length - 1]

        return compiled(query, key, value, score_mod=score).transpose(1, 2)

    return run


def run_core(out: Out, seconds: float) -> None:
    from hf_relpos.attention import dispatch as backends

    order = [(32, 512), (8, 4096), (32, 128), (8, 2048), (4, 8192), (64, 512)]
    schemes = [*SCHEMES[:2], PLAIN, f"relative_key, clipped at {CLIPPED}", *SCHEMES[2:]]
    for batch, length in until(seconds, order):
        tensors = inputs(batch, length, torch.bfloat16, "cuda")
        facts = {"batch": batch, "length": length}
        for name in schemes:
            if not passed(out, name):
                out.problem(f"core, {name}: not timed, since a check of it failed or is missing")
                continue
            attention = layer(name, "relpos", length, torch.bfloat16, "cuda")
            for kind, call in passes(attention, tensors).items():
                timed(out, "core", name, call, **facts, **{"pass": kind})
        if (batch, length) not in ((32, 512), (8, 2048)):
            continue
        everything = list(backends.BACKENDS)
        backends.BACKENDS[:] = [backend for backend in everything if backend.name != "triton"]
        for name in SCHEMES[:2]:  # the same without kernels
            attention = layer(name, "relpos", length, torch.bfloat16, "cuda")
            for kind, call in passes(attention, tensors).items():
                timed(out, "core", f"{name}, without Triton", call, **facts, **{"pass": kind})
        backends.BACKENDS[:] = everything
        for name in SCHEMES[:2]:  # the bias as a mask, (B, H, L, L)
            attention = layer(name, "sdpa", length, torch.bfloat16, "cuda")
            for kind, call in passes(attention, tensors).items():
                timed(out, "core", f"{name}, dense bias for SDPA", call, **facts, **{"pass": kind})
        if length == 512:
            attention = layer("relative_key_query", "eager", length, torch.bfloat16, "cuda")
            for kind, call in passes(attention, tensors).items():
                timed(out, "core", "relative_key_query, eager", call, **facts, **{"pass": kind})
            call = passes(flex(length), tensors)["forward"]
            timed(out, "core", "FlexAttention", call, **facts, **{"pass": "forward"})


def pieces(query, key, value, dropout: float = 0.0) -> torch.Tensor:
    """Attention without positions in pieces of the text, (B, L, H, d)."""
    batch, heads, length, size = query.shape
    shape = (batch, heads, length // PIECE, PIECE, size)
    parts = (x.reshape(shape).transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    return floor(*parts, dropout).reshape(batch, length, heads, size)


def run_window(out: Out, seconds: float) -> None:
    for batch, length in until(seconds, WINDOW_SIZES):
        tensors = inputs(batch, length, torch.bfloat16, "cuda")
        calls = {f"flash, pieces of {PIECE}": pieces}
        if length <= SIZES[-1][1]:
            calls["flash, full attention"] = floor
        for name in SCHEMES[:3]:
            if not passed(out, windowed(name)):
                out.problem(f"window, {name}: not timed, since a check of it failed or is missing")
                continue
            attention = layer(name, "relpos", length, torch.bfloat16, "cuda")
            calls[windowed(name)] = under_window(attention, length, "cuda")
            if length <= SIZES[-1][1]:
                calls[f"{windowed(name)}, mask of all pairs"] = under_window(attention, length, "cuda", whole=True)
                calls[f"{name}, full attention"] = attention
        for name, run in until(seconds, calls.items()):
            for kind, call in passes(run, tensors).items():
                timed(out, "window", name, call, batch=batch, length=length, **{"pass": kind})


def run_tiles(out: Out, seconds: float) -> None:
    from hf_relpos.attention.backends.kernels import ops

    tensors = inputs(32, 512, torch.bfloat16, "cuda")
    calls = {}
    for name in SCHEMES[:2]:
        if passed(out, name):
            calls[name] = passes(layer(name, "relpos", 512, torch.bfloat16, "cuda"), tensors)
    settings = [("workspace", size) for size in WORKSPACES]
    settings += [(kernel, cut) for kernel, cuts in CUTS.items() for cut in cuts]
    for (what, value), (name, kinds) in until(seconds, itertools.product(settings, calls.items())):
        kept, kept_size = dict(ops.TILES), ops.WORKSPACE
        if what == "workspace":
            ops.WORKSPACE = value
        else:
            ops.TILES[what, True, False] = ops.Tile(*value)
        for kind, call in kinds.items():
            if kind == "both" or what in ("forward", "table_product", "workspace"):
                timed(out, "tiles", f"{name}, {what} {value}", call, batch=32, length=512, **{"pass": kind})
        ops.TILES, ops.WORKSPACE = kept, kept_size


def bert(name: str, backend: str | None, length: int) -> nn.Module:
    from hf_relpos import RelPosBertConfig, RelPosBertForMaskedLM

    config = RelPosBertConfig(position_embedding_type=name, max_position_embeddings=max(length, 512))
    config._attn_implementation = backend
    torch.manual_seed(0)
    return RelPosBertForMaskedLM(config).cuda().train()


def run_model(out: Out, seconds: float) -> None:
    cases = [
        (batch, length, dropout, compiled, name)
        for batch, length, dropout, compiled in ((32, 512, 0.0, False), (32, 512, 0.1, False))
        for name in ("absolute", *SCHEMES[:2], PLAIN)
    ]
    cases += [(32, 512, 0.0, False, "relative_key_query, eager")]
    cases += [(8, 4096, 0.0, False, name) for name in ("absolute", "relative_key")]
    cases += [(32, 512, 0.0, True, name) for name in ("absolute", *SCHEMES[:2], PLAIN)]  # a minute each
    for batch, length, dropout, compiled, variant in until(seconds, cases):
        name = variant.split(",")[0]
        if name != "absolute" and not passed(out, name):
            continue
        backend = "sdpa" if name == "absolute" else "eager" if "eager" in variant else "relpos"
        model = bert(name, backend, length)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        called = torch.compile(model) if compiled else model
        ids = torch.randint(1000, 30000, (batch, length), device="cuda")

        def step(called=called, optimizer=optimizer, ids=ids):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = called(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        facts = {"batch": batch, "length": length, "dropout": dropout, "compiled": compiled, "pass": "step"}
        timed(out, "model", variant, step, **facts)
        del model, optimizer, called, step
        gc.collect()
        torch.cuda.empty_cache()


def deberta(variant: str, training: bool, layers: int, device: str, dtype: torch.dtype) -> nn.Module:
    """The model of DeBERTa v3, base size, stock or with another attention; the weights are the same."""
    from bench_encoder import FAMILIES as SIZES
    from transformers import DebertaV2Config, DebertaV2Model

    config = DebertaV2Config(**{**SIZES["DeBERTa v3"][1], "num_hidden_layers": layers})
    torch.manual_seed(0)
    model = DebertaV2Model(config).to(device, dtype).train(training)
    if variant == "accelerate_attention":
        import hf_relpos

        hf_relpos.accelerate_attention(model)
    elif variant == "flashdeberta":
        import flashdeberta

        other = flashdeberta.FlashDebertaV2Model(config)
        other.load_state_dict(model.state_dict())
        model = other.to(device, dtype).train(training)
    elif variant == "disentangled-flash":
        import disentangled_flash

        enable = disentangled_flash.optimize_deberta_training if training else disentangled_flash.optimize_deberta
        enable(model)
    return model


def deberta_call(model: nn.Module, ids: torch.Tensor, training: bool) -> Callable:
    """A forward pass, or one with its gradients; either returns the last hidden states."""

    def call() -> torch.Tensor:
        with torch.set_grad_enabled(training):
            hidden = model(ids, attention_mask=torch.ones_like(ids))[0]
            if training:
                hidden.float().square().mean().backward()
                model.zero_grad()
        return hidden.detach()

    return call


def run_deberta(out: Out, seconds: float) -> None:
    variants = ("stock", "accelerate_attention", "flashdeberta", "disentangled-flash")
    cases = itertools.product(((16, 512), (4, 2048)), (False, True), variants)
    expected = {}
    for (batch, length), training, variant in until(seconds, cases):
        ids = torch.randint(5, 1000, (batch, length), generator=torch.Generator().manual_seed(1)).cuda()
        kind = "both" if training else "forward"
        try:
            call = deberta_call(deberta(variant, training, 12, "cuda", torch.bfloat16), ids, training)
            hidden = call().float()
        except Exception as error:  # such as a package that is not installed
            out.problem(f"deberta, {variant}: {type(error).__name__}: {str(error)[:200]}")
            continue
        reference = expected.setdefault((batch, length, training), hidden)  # stock's, which is first
        error = float((hidden - reference).norm() / reference.norm())
        facts = {"batch": batch, "length": length, "difference": round(error, 4)}
        timed(out, "deberta", variant, call, **facts, **{"pass": kind})


def run_padding(out: Out, seconds: float) -> None:
    from hf_relpos import RelPosBertModel

    torch.manual_seed(0)
    lengths = torch.randint(32, 513, (64,))
    real = (torch.arange(512) < lengths[:, None]).long().cuda()
    ids = torch.randint(1000, 30000, (64, 512), device="cuda")
    for name in until(seconds, ("absolute", "relative_key")):
        if name != "absolute" and not passed(out, name):
            continue
        model = bert(name, "sdpa" if name == "absolute" else "relpos", 512).bert.bfloat16().eval()
        assert isinstance(model, RelPosBertModel)
        for title, mask in (("no padding", None), ("lengths 32 to 512", real)):

            def call(model=model, mask=mask):
                with torch.no_grad():
                    model(ids, attention_mask=mask)

            timed(out, "padding", f"{name}, {title}", call, batch=64, length=512, **{"pass": "forward"})


# Tables -------------------------------------------------------------------------------------------------------------


def floors(results: dict) -> dict[tuple, float]:
    """The fastest SDPA, by batch, length and pass."""
    best = {}
    for row in results["rows"]:
        if row["section"] == "floor":
            key = (row["batch"], row["length"], row["pass"])
            best[key] = min(best.get(key, row["ms"]), row["ms"])
    return best


def tables(results: dict) -> list[Table]:
    """All that was timed, × the fastest floor; and the goals."""
    best, tables, lines = floors(results), [], []
    times = [row for row in results["rows"] if "ms" in row]
    for row in times:
        floor_ms = best.get((row["batch"], row["length"], row["pass"]))
        if row["section"] == "deberta":
            alike = ("section", "batch", "length", "pass")
            stock = [r for r in times if r["variant"] == "stock" and all(r[key] == row[key] for key in alike)]
            floor_ms = stock[0]["ms"] if stock else None
        elif row["section"] == "model":
            same = ("batch", "length", "dropout", "compiled")
            absolute = [r for r in times if r["section"] == "model" and r["variant"] == "absolute"]
            floor_ms = next((r["ms"] for r in absolute if all(r[key] == row[key] for key in same)), None)
        extra = f" dropout {row['dropout']}{' compiled' * row['compiled']}" if row["section"] == "model" else ""
        size = f"B{row['batch']} L{row['length']} {row['pass']}{extra}"
        ratio = "–" if floor_ms is None else f"{row['ms'] / floor_ms:.2f}"
        lines.append([row["section"], row["variant"], size, f"{row['ms']:.3f}", ratio, f"{row['mb']:.0f}"])
    tables.append(("Times", ["section", "variant", "size", "ms", "× floor, or stock", "MB"], lines))
    checks = [row for row in results["rows"] if row["section"] == "check"]
    lines = [[r["variant"], f"L{r['length']} d{r['size']} {r['dtype']}", f"{r['ratio']:.2f}"] for r in checks]
    tables.append(("Error ÷ error of eager in the same dtype, against float64", ["scheme", "size", "ratio"], lines))
    lines = []
    for (name, batch, length, kind), goal in GOALS.items():
        variant = [r for r in times if r["section"] == "core" and r["variant"] == name]
        ms = [r["ms"] for r in variant if (r["batch"], r["length"], r["pass"]) == (batch, length, kind)]
        if ms and (batch, length, kind) in best:
            ratio = ms[0] / best[batch, length, kind]
            lines.append([f"{name} B{batch} L{length} {kind}", f"≤ {goal}", f"{ratio:.2f}", met(ratio <= goal)])
    steps = {
        row["variant"]: row["ms"]
        for row in times
        if row["section"] == "model" and (row["length"], row["dropout"], row["compiled"]) == (512, 0.0, False)
    }
    for name, goal in STEP_GOALS.items():
        if name in steps and "absolute" in steps:
            ratio = steps[name] / steps["absolute"]
            lines.append([f"{name}, training step of BERT-base", f"≤ {goal}", f"{ratio:.2f}", met(ratio <= goal)])
    tables.append(("Against the goals", ["figure", "goal", "here", ""], lines))
    return tables


def card(results: dict) -> str:
    """gpu-attention.md."""
    problems = "\n".join(f"- {problem}" for problem in results["problems"])
    return (
        f"# Attention on a GPU\n\n{describe(results['environment'])}\n{problems}{markdown_sections(tables(results))}"
    )


def main() -> None:
    parser = benchmark_parser(__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("scripts/benchmarks/bench_gpu.py needs a CUDA device, and there is none here")
    out = Out(args.out)
    if "check" not in args.sections:
        print("without the section `check` no relative attention is timed", flush=True)
    begin = time.monotonic()
    for name in args.sections:
        globals()[f"run_{name}"](out, min(SECTIONS[name], begin + LIMIT - time.monotonic()))
    print_tables(tables(out.results))
    if out.results["problems"]:
        raise SystemExit("\n".join(out.results["problems"]))


if __name__ == "__main__":
    main()
