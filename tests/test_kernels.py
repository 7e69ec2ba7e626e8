"""The Triton kernels without a GPU: results and gradients in Triton's interpreter, operators, the benchmark."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracles import padding, stir, tiny_config
from test_chunked import left_padding, window
from test_formula import clipped
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_relpos import AttentionContext, RelPosBertForMaskedLM, Table, Terms, attend, explain_backend
from hf_relpos.attention import dispatch as backends
from hf_relpos.attention.backends import chunk_schedule as skewed
from hf_relpos.attention.backends.chunked import chunked_attention
from hf_relpos.attention.backends.kernels import backend as kernels
from hf_relpos.attention.backends.kernels import ops, register, self_check
from hf_relpos.attention.backends.kernels.backend import Triton
from hf_relpos.attention.backends.kernels.self_check import kept
from hf_relpos.attention.call import AttentionCall
from hf_relpos.attention.dispatch import choose
from hf_relpos.attention.formula import TABLE_FIELDS, content_vectors, position_values
from hf_relpos.attention.toeplitz import to_toeplitz


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
        made = importlib.import_module("hf_relpos.attention.backends.kernels.tiles")
        of_bits(patch, importlib.import_module("triton.runtime.interpreter"))
        yield made
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        del sys.modules[name]
    sys.modules.update(before)
    forget()


def forget():
    """Kernels as if they had never been imported."""
    sys.modules.pop("hf_relpos.attention.backends.kernels.tiles", None)
    vars(sys.modules["hf_relpos.attention.backends.kernels"]).pop("tiles", None)


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
    monkeypatch.setitem(sys.modules, "hf_relpos.attention.backends.kernels.tiles", interpreter)
    monkeypatch.setattr("hf_relpos.attention.backends.kernels.tiles", interpreter, raising=False)
    monkeypatch.setattr(ops, "TILES", {key: ops.Tile(64, 64) for key in ops.TILES})
    monkeypatch.setattr(ops, "scratch", lambda count, like: like.new_full((count,), torch.nan))
    monkeypatch.setattr(self_check, "LENGTHS", ((20, 24),))
    monkeypatch.setattr(self_check, "WINDOW_LENGTHS", ((20, 24),))
    self_check.OUTCOMES.clear()
    yield
    self_check.OUTCOMES.clear()


def make(letters, batch, heads, length, keys, dtype=torch.float64, size=SIZE):
    """Leaves by name, clipped at ±9: A for all heads, the others one for each."""
    leaves = {"query": torch.randn(batch, heads, length, size), "key": torch.randn(batch, heads, keys, size)}
    leaves["value"] = torch.randn(batch, heads, keys, size)
    for letter in letters:
        shape = {"u": (heads, size), "c": (heads, 19), "A": (1, 19, size)}.get(letter, (heads, 19, size))
        leaves[letter] = torch.randn(shape) * (1.0 if letter == "c" else 0.5)
    return {name: leaf.to(dtype).requires_grad_() for name, leaf in leaves.items()}


def terms_of(leaves):
    tables = {field: (Table(leaves[x], clipped(9)),) for x, field in TABLE_FIELDS.items() if x in leaves}
    if "scaled_bias" in tables:
        tables["bias"] = tables.pop("scaled_bias")
    return Terms(content_bias=leaves.get("u"), **tables)


def by_kernels(leaves, context, mask=None, causal=False, dropout=0.0, by_row=False):
    terms = terms_of(leaves)
    content, query, key = content_vectors(leaves["query"], leaves["key"], terms, context)
    form = to_toeplitz(terms, context, query, by_row=by_row)
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
    "padding, a key after whole blocks": ("A", 3, 1, 100, 100, 0, padding([17, 33, 65], 100)[:, None, None, :], False),
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


@pytest.mark.parametrize("case", ["A", "all", "padding", "causal, cache", "cache"])
def test_tables_are_read_by_row(case, interpreted, monkeypatch):
    """Of 19 rows, through the row of each offset: the same, and gradients of the rows as they are; bit by bit."""
    letters, batch, heads, length, keys, start, mask, causal = CASES[case]
    exact, context = make(letters, batch, heads, length, keys), AttentionContext(length, keys, start)
    form = to_toeplitz(terms_of(exact), context, exact["query"], by_row=True)
    for table in (form.query_table, form.key_table, form.value_table):
        assert table is None or (table.rows.shape[1] == 19 and len(table.row_of) == length + keys - 1)
    leaves = of_dtype(exact, torch.float32)
    expected = with_gradients(by_formula, exact, context, mask, causal)
    got = with_gradients(by_kernels, leaves, context, mask, causal, by_row=True)
    assert close(got, expected, 2e-5)
    by_offset = with_gradients(by_kernels, leaves, context, mask, causal)
    assert all(torch.equal(one, other) for one, other in zip(got[:4], by_offset[:4], strict=True))
    if case == "A":
        again = with_gradients(by_kernels, leaves, context, mask, causal, by_row=True)
        assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))


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


def check_errors(ours, eager, leaves, *arguments):
    """Root mean square distance from float64 of the same inputs, of the output and of every gradient."""
    exact = with_gradients(eager, of_dtype(leaves, torch.float64), *arguments)
    results = (with_gradients(run, leaves, *arguments) for run in (ours, eager))
    for x, y, truth in zip(*results, exact, strict=True):
        assert x.dtype == leaves["query"].dtype
        errors = [(other.double() - truth).square().mean().sqrt() for other in (x, y)]
        assert errors[0] <= 2 * errors[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_error_is_at_most_twice_eagers(dtype, interpreted):
    leaves = make(ALL, 1, 1, 100, 100, dtype, size=32)
    check_errors(by_kernels, by_formula, leaves, AttentionContext(100, 100))


def test_fully_hidden_rows_are_zero(interpreted):
    """By the scheme or by the mask; and so are their gradients."""
    leaves, context = make("A", 2, 1, 40, 40, torch.float32), AttentionContext(40, 40)
    terms = Terms(
        query_table=terms_of(leaves).query_table,
        allow=(Table(torch.tensor([[True, False]]), lambda r: (r >= 0).long()),),
    )
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


def test_dropout_is_replayed(interpreted):
    """Output and gradients are the formula's with weights dropped by (seed, row, head, i, j), block sizes or not."""
    leaves, context = make("ABV", 2, 2, 63, 63, torch.float32), AttentionContext(63, 63)
    torch.manual_seed(3)
    seed = int(torch.randint(torch.iinfo(torch.int32).max, (1,)))
    factors = kept(seed, (2, 2, 63, 63), round(0.3 * 65536)) / (1 - round(0.3 * 65536) / 65536)
    expected = with_gradients(by_formula, of_dtype(leaves, torch.float64), context, kept=factors)
    torch.manual_seed(3)
    assert close(with_gradients(by_kernels, leaves, context, dropout=0.3), expected, 2e-5)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_is_fair(rate):
    """In all, by row and by key, and independent between neighbours, heads, rows of the batch and seeds."""
    length, threshold = 256, round(rate * 65536)
    draws = [kept(seed, (2, 3, length, length), threshold) for seed in (11, 12, 11 + (1 << 40))]
    spread = (rate * (1 - rate)) ** 0.5
    for one in draws:
        assert abs(1 - one.double().mean() - rate) <= 4 * spread / one.numel() ** 0.5
        for axis in (-1, -2):
            assert (1 - one.double().mean(axis) - rate).abs().max() <= 6 * spread / length**0.5
    draws = [one.double() - (1 - rate) for one in draws]
    first = draws[0]
    pairs = [(first, draws[1]), (first, draws[2]), (first[0], first[1]), (first[:, 0], first[:, 1])]
    pairs += [(first[..., 1:], first[..., :-1]), (first[..., 1:, :], first[..., :-1, :])]
    for x, y in pairs:
        assert abs((x * y).mean()) <= 5 * spread**2 / x.numel() ** 0.5


# Operators, the compiler, and what is chosen ---------------------------------------------------------------------


@pytest.mark.parametrize("by_row", [False, True])
def test_operators_keep_their_word(by_row, interpreted):
    leaves, context = make("AcV", 1, 1, 12, 12, torch.float32), AttentionContext(12, 12)
    form = to_toeplitz(terms_of(leaves), context, leaves["query"], by_row=by_row)
    tables = [x.detach().requires_grad_() for x in (form.query_table.rows, form.bias, form.value_table.rows)]
    mask = padding([9], 12)[:, None, None, :]
    vectors = [leaves[name] for name in ("query", "key", "value")]
    given = (vectors[0], None, *vectors[1:], tables[0], None, *tables[1:])
    given += (form.query_table.row_of, None, form.value_table.row_of, mask, None, 0, 0.25, False, 0)
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
    assert only_outcome().passed  # and the check of the compiled call, the first one, is not in the graph
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
    monkeypatch.setattr(backends, "BACKENDS", [Triton(), *(x for x in backends.BACKENDS if x.name != "triton")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    value_term = terms_of(make("ABcV", 1, 12, 1, 1))

    def chosen(terms=value_term, dtype=torch.bfloat16, context=AttentionContext(64, 64), size=64, **changes):  # noqa: B008
        vectors = torch.empty(4, 12, 64, size, dtype=dtype, device="meta")
        call = AttentionCall(vectors, vectors, vectors, terms, context, runs_on=torch.device("cuda"), **changes)
        backend, rejected = choose(call)
        return backend.name, "; ".join(rejected.get("triton", []))

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


# The check on first use ---------------------------------------------------------------------------------------------


@pytest.fixture
def broken(interpreter, monkeypatch):
    """A function that takes tiles.vectors into which a fault was put."""
    monkeypatch.delitem(sys.modules, "broken_tiles", raising=False)
    fault = importlib.import_module("broken_tiles").vectors
    return lambda patch: patch.setattr(interpreter, "vectors", fault)


@pytest.fixture
def checked_model(interpreted, monkeypatch):
    """A model that tries the kernels first, and its inputs."""
    others = [backend for backend in backends.BACKENDS if backend.name != "triton"]
    monkeypatch.setattr(backends, "BACKENDS", [Triton("cpu"), *others])
    config = tiny_config("relative_key", num_hidden_layers=2, hidden_size=32, num_attention_heads=2)
    return stir(RelPosBertForMaskedLM(config)).eval(), torch.randint(1, 50, (2, 12))


def eagers(model, ids):
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(ids).logits
    model.set_attn_implementation("relpos")
    return logits


def only_outcome():
    (outcome,) = self_check.OUTCOMES.values()
    return outcome


def test_kernels_are_checked_at_the_first_call(checked_model, monkeypatch):
    """Once for both layers and both calls; random numbers and what is set around the call stay out of it."""
    model, ids = checked_model
    expected, checks, state = eagers(model, ids), [], torch.get_rng_state()
    check = self_check._compare
    monkeypatch.setattr(self_check, "_compare", lambda kind, *rest: (checks.append(kind), check(kind, *rest))[1])
    monkeypatch.setattr(self_check, "LENGTHS", ((20, 24), (64, 64)))
    assert "takes triton (not checked before" in explain_backend(model, 2, 12)
    with torch.inference_mode(), torch.device("meta"):
        outputs = [model(ids).logits for _ in range(2)]
    assert all((x - expected).abs().max() <= 1e-5 for x in outputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(checks) == 4 and only_outcome().passed  # of both sizes, by offset and by row
    assert "takes triton (checked: " in explain_backend(model, 2, 12) and "off by" in explain_backend(model, 2, 12)


def test_check_inside_of_activation_checkpointing_and_autocast(checked_model):
    """Whose hooks would compute the check again in its own backward, and whose casts would lower the reference."""
    model, ids = checked_model
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, labels=ids).loss.backward()
    assert {(kind.dtype, found.passed) for kind, found in self_check.OUTCOMES.items()} == {(torch.bfloat16, True)}
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


def test_broken_kernels_are_not_used(checked_model, broken, monkeypatch, caplog):
    """One warning with the figures; the next backend computes, then and afterwards."""
    model, ids = checked_model
    expected = eagers(model, ids)
    with monkeypatch.context() as patch:
        broken(patch)
        with torch.no_grad(), caplog.at_level("WARNING", logger="hf_relpos"):
            outputs = [model(ids).logits for _ in range(2)]
    outputs.append(model(ids).logits)  # for good, though it would be right now
    assert all((x - expected).abs().max() <= 1e-5 for x in outputs)
    warned = [record.message for record in caplog.records]
    assert len(warned) == 1 and "float32 on cpu, heads of 16, terms A1" in warned[0] and "off by" in warned[0]
    assert not only_outcome().passed
    assert f"not triton: they failed their check here: {only_outcome().words}" in explain_backend(model, 2, 12)


def test_kernels_that_do_not_compile_are_not_used(checked_model, interpreter, monkeypatch, caplog):
    model, ids = checked_model
    expected = eagers(model, ids)
    monkeypatch.delattr(interpreter, "scores")
    with torch.no_grad(), caplog.at_level("WARNING", logger="hf_relpos"):
        assert "not triton: they failed their check" in explain_backend(model, 2, 12, check_kernels=True)
        output = model(ids).logits
    assert (output - expected).abs().max() <= 1e-5 and len(caplog.records) == 1
    assert "scores" in only_outcome().words


def test_check_for_the_compiler_is_outside_of_the_graph(checked_model, broken, monkeypatch):
    """Kernels that fail are not in the graph either; `test_compiled_model` is of those that pass."""
    model, ids = checked_model
    expected, seen = eagers(model, ids), set()
    broken(monkeypatch)

    def backend(graph, inputs):
        seen.update(str(node.target) for node in graph.graph.nodes)
        return graph

    with torch.no_grad():
        output = torch.compile(model, fullgraph=True, backend=backend)(ids).logits
    assert (output - expected).abs().max() <= 1e-5
    assert not only_outcome().passed and seen and not any("hf_relpos" in target for target in seen)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.full)])
def test_exported_graphs_have_no_kernels(strict, checked_model):
    """They may be run without this package."""
    model, ids = checked_model
    with torch.no_grad():
        graph = torch.export.export(model, (ids,), strict=strict).graph
    assert not any("hf_relpos" in str(node.target) for node in graph.nodes) and not self_check.OUTCOMES


def test_kernels_are_not_checked_where_there_is_no_data(interpreted):
    """As where a CUDA graph is captured: unchecked kernels wait, those that have passed are taken."""
    terms, context = terms_of(make("A", 1, 2, 12, 12, torch.float32)), AttentionContext(12, 12)
    real = AttentionCall(*torch.randn(3, 1, 2, 12, SIZE), terms, context)
    with FakeTensorMode():
        fake = replace(real, query=torch.empty(1, 2, 12, SIZE))
    backend = Triton("cpu")
    assert "have not been checked" in backend.unsupported(fake)[0] and not self_check.OUTCOMES
    assert backend.unsupported(real) == backend.unsupported(fake) == []


def test_check_finds_one_wrong_entry_of_a_table(interpreted, monkeypatch):
    """In what is made of many: the sharpest difference that is not rounding."""
    kind = self_check.Kind(CPU, torch.float32, SIZE, ("A", "V"), "keys", False, True, "ieee")
    right = self_check.check(kind, kernels.attention)
    assert right.passed

    def wrong(content, query, key, value, form, *rest):
        bent = form.value_table.rows.clone()
        bent[0, bent.shape[1] // 2, 0] += 0.01
        form = replace(form, value_table=form.value_table.with_rows(bent))
        return kernels.attention(content, query, key, value, form, *rest)

    self_check.OUTCOMES.clear()
    assert not self_check.check(kind, wrong).passed


def test_out_of_memory_is_no_verdict(interpreted):
    def greedy(*arguments):
        raise torch.OutOfMemoryError("full")

    kind = self_check.Kind(CPU, torch.float32, SIZE, ("A",), "none", False, False, "ieee")
    with pytest.raises(torch.OutOfMemoryError):
        self_check.check(kind, greedy)
    assert not self_check.OUTCOMES


def test_kernels_are_used_on_request_alone(checked_model, monkeypatch):
    model, _ = checked_model
    for switch, triton, reason in [
        (None, True, "set HF_RELPOS_KERNELS=1"),
        ("0", True, "set HF_RELPOS_KERNELS=1"),
        ("1", False, "Triton is not installed"),
        ("1", True, None),
    ]:
        with monkeypatch.context() as patch:
            if switch is None:
                patch.delenv("HF_RELPOS_KERNELS", raising=False)
            else:
                patch.setenv("HF_RELPOS_KERNELS", switch)
            patch.setattr("importlib.util.find_spec", lambda name, found=triton: found or None)
            kernels.requested.cache_clear()
            register()
        backends.BACKENDS[0].device_type = "cpu"
        text = explain_backend(model, 2, 12)
        assert "takes triton" in text if reason is None else "not triton: " in text and reason in text
    monkeypatch.setenv("HF_RELPOS_KERNELS", "maybe")
    kernels.requested.cache_clear()
    with pytest.raises(ValueError, match="HF_RELPOS_KERNELS = 'maybe'"):
        register()
    kernels.requested.cache_clear()


# The benchmark ------------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[1] / "scripts" / "benchmarks")
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
