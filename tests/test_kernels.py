"""The Triton kernels without a GPU: results and gradients in Triton's interpreter, operators, the benchmark."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from oracles import padding, stir, tiny_config
from test_chunked import left_padding, window
from test_formula import clipped

from hf_relpos import AttentionContext, RelPosBertForMaskedLM, Table, Terms, attend, explain_backend
from hf_relpos.kernels import backend as kernels
from hf_relpos.kernels import ops
from hf_relpos.kernels.backend import Triton
from hf_relpos.model import backends, skewed
from hf_relpos.model.attention import AttentionCall
from hf_relpos.model.backend_chunked import chunked_attention
from hf_relpos.model.backends import choose
from hf_relpos.model.formula import content_vectors, position_values
from hf_relpos.model.toeplitz import to_toeplitz


pytest.importorskip("triton", reason="Triton has wheels for Linux alone")

SIZE = 16
CPU = torch.device("cpu")
ALL = "ABcVu"


@pytest.fixture(scope="module")
def interpreter():
    """The kernels' module for Triton's interpreter, which Triton must be told of before its first import."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "triton"}
    python = {name for name in before if not name.startswith("triton._C")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in python:
            del sys.modules[name]
        forget()
        made = importlib.import_module("hf_relpos.kernels.tiles")
        of_bits(patch, importlib.import_module("triton.runtime.interpreter"))
        yield made
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        del sys.modules[name]
    sys.modules.update(before)
    forget()


def forget():
    """Kernels as if they had never been imported."""
    sys.modules.pop("hf_relpos.kernels.tiles", None)
    vars(sys.modules["hf_relpos.kernels"]).pop("tiles", None)


def of_bits(patch, interpreter):
    """Products of bfloat16, which Triton 3.9's interpreter holds as 16 bits and multiplies as integers."""
    plain = interpreter.InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != interpreter.tl.bfloat16:
            return handle
        wide = (handle.data.view("uint16").astype("uint32") << 16).view("float32")
        return interpreter.TensorHandle(wide, interpreter.tl.float32)

    def create_dot(self, a, b, *rest):
        return plain(self, widened(a), widened(b), *rest)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def interpreted(interpreter, monkeypatch):
    """Kernels that run in the interpreter, in tiles that suit it; scratch memory full of NaN."""
    monkeypatch.setitem(sys.modules, "hf_relpos.kernels.tiles", interpreter)
    monkeypatch.setattr("hf_relpos.kernels.tiles", interpreter, raising=False)
    monkeypatch.setattr(ops, "TILES", {key: ops.Tile(64, 64) for key in ops.TILES})
    monkeypatch.setattr(ops, "scratch", lambda count, like: like.new_full((count,), torch.nan))


def make(letters, batch, heads, length, keys, dtype=torch.float64, size=SIZE):
    """Leaves by name, clipped at ±9: A for all heads, the others one for each."""
    leaves = {"query": torch.randn(batch, heads, length, size), "key": torch.randn(batch, heads, keys, size)}
    leaves["value"] = torch.randn(batch, heads, keys, size)
    for letter in letters:
        shape = {"u": (heads, size), "c": (heads, 19), "A": (1, 19, size)}.get(letter, (heads, 19, size))
        leaves[letter] = torch.randn(shape) * (1.0 if letter == "c" else 0.5)
    return {name: leaf.to(dtype).requires_grad_() for name, leaf in leaves.items()}


def terms_of(leaves):
    tables = {letter: (Table(leaves[letter], clipped(9)),) for letter in "ABcV" if letter in leaves}
    if "c" in tables:
        tables["c_outer"] = tables.pop("c")
    return Terms(u=leaves.get("u"), **tables)


def by_kernels(leaves, context, mask=None, causal=False, dropout=0.0):
    terms = terms_of(leaves)
    content, query, key = content_vectors(leaves["query"], leaves["key"], terms, context)
    form = to_toeplitz(terms, context, query)
    return kernels.attention(content, query, key, leaves["value"], form, context.start, mask, causal, dropout)


def by_formula(leaves, context, mask=None, causal=False, kept=None):
    """With zeros for queries that see nothing; `kept` are factors of the weights."""
    terms, seen = terms_of(leaves), mask
    if causal:
        seen = (context.matrix(CPU) <= 0)[None, None]
    out, weights = attend(leaves["query"], leaves["key"], leaves["value"], terms, context, seen)
    if kept is not None:
        weights = weights * kept
        out = weights @ leaves["value"]
        if (positional := position_values(weights, terms, context)) is not None:
            out = out + positional
    if seen is not None:
        out = out * seen.any(-1, keepdim=True)
    return out.transpose(1, 2)


def with_gradients(run, leaves, *given, **settings):
    out = run(leaves, *given, **settings)
    torch.manual_seed(5)
    gradient = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), gradient)]


def of_dtype(leaves, dtype):
    return {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in leaves.items()}


def close(got, exact, tolerance):
    """Every result by its own largest entry."""
    return all(
        (x - y).abs().max() <= tolerance * y.abs().max().clamp(min=1e-3) for x, y in zip(got, exact, strict=True)
    )


HOLES = torch.arange(63)[None, None, None] % 7 != 3
# letters, B, H, L, K, start, mask, causal
CASES = {
    "A": ("A", 1, 1, 63, 63, 0, None, False),
    "c": ("c", 2, 2, 63, 63, 0, None, False),
    "all": (ALL, 1, 2, 63, 63, 0, None, False),
    "all, two blocks": (ALL, 1, 1, 111, 111, 0, None, False),
    "value term, whole blocks": ("AV", 1, 1, 64, 64, 0, None, False),
    "padding": ("ABV", 2, 1, 100, 100, 0, padding([100, 33], 100)[:, None, None, :], False),
    "padding for each query": ("B", 2, 1, 63, 63, 0, padding([63, 0], 63)[:, None, None].expand(2, 1, 63, 63), False),
    "holes": ("Bu", 1, 1, 63, 63, 0, HOLES, False),
    "window": ("AV", 1, 1, 63, 63, 0, window(63, 9), False),
    "left padding, causal": ("AB", 2, 1, 63, 63, 0, left_padding(63), False),
    "causal, cache": ("ABcV", 1, 1, 30, 70, 40, None, True),
    "cache": ("AB", 1, 1, 1, 70, 69, None, False),
}


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_eagers(case, interpreted):
    """In float32, to 2e-5 of the largest entry of each result."""
    letters, batch, heads, length, keys, start, mask, causal = CASES[case]
    exact, context = make(letters, batch, heads, length, keys), AttentionContext(length, keys, start)
    expected = with_gradients(by_formula, exact, context, mask, causal)
    got = with_gradients(by_kernels, of_dtype(exact, torch.float32), context, mask, causal)
    assert close(got, expected, 2e-5)


def test_in_chunks_of_heads_and_queries_and_twice(interpreted, monkeypatch):
    """Workspace for one pair at a time and then for some of the queries: the same; and bit by bit in every run."""
    leaves, context = make("ABcV", 1, 2, 150, 150, torch.float32), AttentionContext(150, 150)
    expected = with_gradients(by_formula, of_dtype(leaves, torch.float64), context)
    monkeypatch.setattr(ops, "WORKSPACE", 128 * 256 * 4 * 6)
    plan = list(ops.chunks(2, 150, 256 * 4 * 6))
    assert len(plan) == 4 and {row for _, _, row, _ in plan} == {0, 128}
    got = with_gradients(by_kernels, leaves, context)
    assert close(got, expected, 2e-5)
    short, context = make("AV", 1, 1, 20, 20, torch.float32), AttentionContext(20, 20)
    runs = [with_gradients(by_kernels, short, context) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_error_is_at_most_twice_eagers(dtype, interpreted):
    """Root mean square distance from float64 of the same inputs, of the output and of every gradient."""
    leaves, context = make(ALL, 1, 1, 100, 100, dtype, size=32), AttentionContext(100, 100)
    exact = with_gradients(by_formula, of_dtype(leaves, torch.float64), context)
    ours, eager = (with_gradients(run, leaves, context) for run in (by_kernels, by_formula))
    for x, y, truth in zip(ours, eager, exact, strict=True):
        assert x.dtype == dtype
        errors = [(other.double() - truth).square().mean().sqrt() for other in (x, y)]
        assert errors[0] <= 2 * errors[1]


def test_fully_hidden_rows_are_zero(interpreted):
    """By the scheme or by the mask; and so are their gradients."""
    leaves, context = make("A", 2, 1, 40, 40, torch.float32), AttentionContext(40, 40)
    terms = Terms(A=terms_of(leaves).A, allow=(Table(torch.tensor([[True, False]]), lambda r: (r >= 0).long()),))
    form = to_toeplitz(terms, context, leaves["query"])
    mask = padding([40, 0], 40)[:, None, None, :]
    query, key, value = (leaves[name] for name in ("query", "key", "value"))
    out = kernels.attention(query, query, key, value, form, 0, mask)
    assert (out[0, 0] == 0).all() and (out[1] == 0).all() and (out[0, 1:] != 0).any(-1).all()
    expected = attend(query, key, value, terms, context, mask)[0].transpose(1, 2)
    assert (out - expected).abs().max() <= 1e-5
    gradients = torch.autograd.grad(out.sum(), leaves.values())
    assert all(gradient.isfinite().all() for gradient in gradients) and (gradients[0][0, 0, 0] == 0).all()


# Dropout ---------------------------------------------------------------------------------------------------------


def mixed(x):
    """tiles.mix, of int64 that hold 32 bits."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


def kept_by_definition(seed, batch, heads, length, keys, dropout):
    """(B, H, L, K)."""
    low, high = torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32)
    key = mixed(mixed(mixed(low) ^ high) ^ torch.arange(batch * heads).view(batch, heads, 1))
    row = mixed(key ^ torch.arange(length))[..., :, None]
    column = mixed((~key & 0xFFFFFFFF) ^ torch.arange(keys))[..., None, :]
    return (mixed(row ^ column) >> 16) >= dropout


def test_dropout_is_replayed(interpreted):
    """Output and gradients are the formula's with weights dropped by (seed, row, head, i, j), block sizes or not."""
    leaves, context = make("ABV", 2, 2, 63, 63, torch.float32), AttentionContext(63, 63)
    torch.manual_seed(3)
    seed = int(torch.randint(torch.iinfo(torch.int32).max, (1,)))
    kept = kept_by_definition(seed, 2, 2, 63, 63, round(0.3 * 65536)) / (1 - round(0.3 * 65536) / 65536)
    expected = with_gradients(by_formula, of_dtype(leaves, torch.float64), context, kept=kept)
    torch.manual_seed(3)
    assert close(with_gradients(by_kernels, leaves, context, dropout=0.3), expected, 2e-5)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_is_fair(rate):
    """In all, by row and by key, and independent between neighbours, heads, rows of the batch and seeds."""
    length, threshold = 256, round(rate * 65536)
    kept = [kept_by_definition(seed, 2, 3, length, length, threshold) for seed in (11, 12, 11 + (1 << 40))]
    spread = (rate * (1 - rate)) ** 0.5
    for one in kept:
        assert abs(1 - one.double().mean() - rate) <= 4 * spread / one.numel() ** 0.5
        for axis in (-1, -2):
            assert (1 - one.double().mean(axis) - rate).abs().max() <= 6 * spread / length**0.5
    draws = [one.double() - (1 - rate) for one in kept]
    first = draws[0]
    pairs = [(first, draws[1]), (first, draws[2]), (first[0], first[1]), (first[:, 0], first[:, 1])]
    pairs += [(first[..., 1:], first[..., :-1]), (first[..., 1:, :], first[..., :-1, :])]
    for x, y in pairs:
        assert abs((x * y).mean()) <= 5 * spread**2 / x.numel() ** 0.5


# Operators, the compiler, and what is chosen ---------------------------------------------------------------------


def test_operators_keep_their_word(interpreted):
    leaves, context = make("AcV", 1, 1, 12, 12, torch.float32), AttentionContext(12, 12)
    form = to_toeplitz(terms_of(leaves), context, leaves["query"])
    tables = [x.detach().requires_grad_() for x in (form.A, form.c, form.V)]
    mask = padding([9], 12)[:, None, None, :]
    vectors = [leaves[name] for name in ("query", "key", "value")]
    given = (vectors[0], None, *vectors[1:], tables[0], None, *tables[1:], mask, None, 0, 0.25, False, 0)
    torch.library.opcheck(ops.attention, given)
    out, lse = ops.attention(*given)
    given = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in (out, out, lse, *given))
    torch.library.opcheck(ops.attention_backward, given, test_utils=("test_schema", "test_faketensor"))


def test_compiled_model(interpreted, monkeypatch):
    """In one graph, whose attention is our operator; loss and gradients are those of eager."""
    monkeypatch.setattr(backends, "BACKENDS", [Triton("cpu"), *backends.BACKENDS])
    config = tiny_config("relative_key_query", num_hidden_layers=1, hidden_size=32, num_attention_heads=2)
    model = stir(RelPosBertForMaskedLM(config)).train()
    ids, real = torch.randint(1, 50, (2, 20)), padding([20, 11], 20).long()
    labels, seen = ids.masked_fill(real == 0, -100), []

    def backend(graph, inputs):
        seen.append({str(node.target) for node in graph.graph.nodes})
        return graph

    results = []
    for backed, wrap in (("relpos", True), ("relpos", False), ("eager", False)):
        model.set_attn_implementation(backed)
        model.zero_grad()
        called = torch.compile(model, fullgraph=True, backend=backend) if wrap else model
        loss = called(input_ids=ids, attention_mask=real, labels=labels).loss
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert len(seen) == 1 and any("hf_relpos.attention" in target for target in seen[0])
    assert all((x - y).abs().max() <= 2e-5 for other in results[:2] for x, y in zip(other, results[2], strict=True))


def test_compiled_dropout_has_a_seed_of_32_bits(interpreted):
    """Inductor writes the bounds of random numbers as int32, where 2^62 is 0: a seed modulo 0."""
    leaves, context, bounds = make("A", 1, 1, 12, 12, torch.float32), AttentionContext(12, 12), []

    def backend(graph, inputs):
        bounds.extend(node.args[0] for node in graph.graph.nodes if node.target is torch.randint)
        return graph

    torch.compile(by_kernels, fullgraph=True, backend=backend)(leaves, context, dropout=0.5)
    assert bounds == [2**31 - 1]


@pytest.mark.parametrize("chosen", ["ieee", "tf32"])
def test_precision_of_float32_chosen_as_transformers_chooses_it(chosen, interpreted, monkeypatch):
    """Once `fp32_precision` is set, PyTorch refuses to say what the older `allow_tf32` is."""
    monkeypatch.setattr(torch.backends, "fp32_precision", chosen)
    leaves, context = make("A", 1, 1, 12, 12, torch.float32), AttentionContext(12, 12)
    assert (by_kernels(leaves, context) - by_formula(leaves, context)).abs().max() <= 1e-5


def test_programs_along_an_axis():
    """A device takes 65535 of them along the second axis of a grid."""
    plan = list(ops.chunks(12 * 6000, 16, 128, together=6000))
    assert all(count <= 65535 for _, count, _, _ in plan) and sum(count for _, count, _, _ in plan) == 12 * 6000


def test_what_is_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    value_term = terms_of(make("ABcV", 1, 12, 1, 1))

    def chosen(terms=value_term, dtype=torch.bfloat16, context=AttentionContext(64, 64), size=64, **changes):  # noqa: B008
        vectors = torch.empty(4, 12, 64, size, dtype=dtype, device="meta")
        call = AttentionCall(vectors, vectors, vectors, terms, context, runs_on=torch.device("cuda"), **changes)
        backend, passed_over = choose(call)
        return backend.name, "; ".join(passed_over.get("triton", []))

    assert chosen() == ("triton", "") and chosen(needs_gradients=True, dropout=0.1)[0] == "triton"
    for reason, changes in {
        "returns attention weights": {"output_weights": True},
        "torch.float64": {"dtype": torch.float64},
        "not of 48": {"size": 48},
        "dense bias": {"terms": Terms(dense=(torch.zeros(1, 1, 64, 64),))},
        "known to the device alone": {"context": AttentionContext(64, 64, torch.tensor([0]))},
        "not a boolean tensor": {"mask": torch.zeros(4, 1, 64, 64)},
        "a temperature": {"context": AttentionContext(64, 64, temperature=torch.ones(1, 1, 64))},
        "no terms": {"terms": Terms()},
    }.items():
        taken, why = chosen(**changes)
        assert taken != "triton" and reason in why
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert chosen()[0] == "triton" and chosen(size=48)[0] == "eager"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 8.0" in chosen()[1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    explained = explain_backend(tiny_config("shaw", hidden_size=64, num_attention_heads=1), 2, 600, "cuda")
    assert "takes chunked" in explained and "not triton: there is no cuda device here" in explained


def test_chunks_on_a_device_take_as_many_queries(monkeypatch):
    """The safety net's own sizes, on the CPU."""
    monkeypatch.setattr(skewed, "QUERIES", skewed.DEVICE_QUERIES)
    monkeypatch.setattr(skewed, "BUFFER", skewed.DEVICE_BUFFER)
    leaves, context = make("ABcV", 2, 2, 63, 63), AttentionContext(63, 63)
    form = to_toeplitz(terms_of(leaves), context, leaves["query"])
    out = chunked_attention(leaves["query"], *(leaves[x] for x in ("query", "key", "value")), form)
    assert (out - by_formula(leaves, context)).abs().max() <= 1e-12


# The benchmark ------------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[1] / "scripts")
    module = importlib.import_module("bench_gpu")
    monkeypatch.setattr(module, "HEADS", 2)
    return module


def test_benchmark_checks_before_it_times(bench, interpreted, monkeypatch):
    """What is right passes, what is slightly wrong does not, and what did not pass is not timed."""
    monkeypatch.setattr(backends, "BACKENDS", [Triton("cpu"), *backends.BACKENDS])
    assert bench.check("relative_key", 1, 40, torch.float32, "cpu") <= 2.0
    bench.check_dropout(1, 40, "cpu")

    right = kernels.attention
    monkeypatch.setattr(kernels, "attention", lambda *arguments: right(*arguments) * 1.001)
    with pytest.raises(AssertionError, match="times the error of eager"):
        bench.check("relative_key", 1, 40, torch.float32, "cpu")


def test_benchmark_needs_a_device(bench, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        bench.main()


def test_benchmark_tables(bench):
    """Ratios go to the fastest floor; a scheme that failed, or that was not checked, is not timed."""
    row = {"batch": 32, "length": 512, "pass": "forward", "mb": 1.0}
    rows = [
        {"section": "floor", "variant": "flash", "ms": 2.0, **row},
        {"section": "floor", "variant": "cudnn", "ms": 1.0, **row},
        {"section": "core", "variant": "relative_key", "ms": 2.5, **row},
        {"section": "check", "variant": "shaw", "length": 1, "size": 64, "dtype": "x", "ratio": 1.0},
    ]
    found = {"rows": rows, "problems": []}
    times, _, goals = bench.tables(found)
    assert times[2][2][-2] == "2.50" and goals[2] == [["relative_key B32 L512 forward", "≤ 2.3", "2.50", "NOT met"]]
    out = type("Out", (), {"results": found})
    assert bench.passed(out, "shaw") and not bench.passed(out, "relative_key")
    found["problems"].append("model, shaw, {'dropout': 0.1}: out of memory")
    assert bench.passed(out, "shaw")
    found["problems"].append("check, shaw L1: wrong")
    assert not bench.passed(out, "shaw")


def test_benchmark_goes_on_after_a_failure(bench, monkeypatch):
    """Such as a cut that takes more memory than a program may have, which is no RuntimeError."""
    from triton.runtime.errors import OutOfResources

    def fails(call, ahead):
        raise OutOfResources(1 << 20, 227 << 10, "shared memory")

    noted = []
    monkeypatch.setattr(bench, "milliseconds", fails)
    bench.timed(type("Out", (), {"problem": noted.append}), "tiles", "forward (256, 256, 8, 3)", None)
    assert len(noted) == 1 and "OutOfResources" in noted[0]
