"""Attention in chunks against eager: outputs, all gradients, memory, dropout, and when it is taken."""

import dataclasses
import itertools

import pytest
import torch
from computed import Computed
from errors import raises
from launching import run_command
from oracles import ON_TOKENS, extra_inputs, padding, stir, tiny_config, tiny_model
from selection import thinned
from test_formula import ALL, clipped, combination_id, random_terms
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hf_relpos import RelPosBertForMaskedLM, RelPosBertLMHeadModel, RelPosBertModel, explain_backend
from hf_relpos.attention.backends import chunked as backend_chunked, window_blocks
from hf_relpos.attention.backends.chunked import (
    Chunked,
    chunks as skewed,
    far_offsets,
    products as chunk_products,
    relative_shift as diagonals,
)
from hf_relpos.attention.call import AttentionCall
from hf_relpos.attention.dispatch import choose, run_attention
from hf_relpos.attention.formula import TABLE_FIELDS, toeplitz_table
from hf_relpos.attention.sliding_window import SlidingWindowMask
from hf_relpos.attention.toeplitz import to_toeplitz
from hf_relpos.products.cpu_gemm import Library
from hf_relpos.schemes import SCHEMES, AttentionContext, Table, Terms, attend
from hf_relpos.schemes.registry import build_scheme


BATCH, HEADS, SIZE = 2, 3, 4
LENGTHS = (63, 100, 111, 513)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks so small that these lengths take several, and no call too small for them; scratch memory full of NaN."""
    monkeypatch.setattr(skewed, "QUERIES", 48)
    monkeypatch.setattr(skewed, "BLOCK", 16)
    monkeypatch.setattr(skewed, "BUFFER", 2 * 48 * 160)
    monkeypatch.setattr(backend_chunked, "FEWEST_SCORES", 0)
    monkeypatch.setattr(backend_chunked, "KEPT", 0)
    fresh = chunk_products.workspace

    def poisoned(name, shape, dtype):
        buffer = fresh(name, shape, dtype)
        return buffer.fill_(torch.nan) if dtype.is_floating_point else buffer.fill_(1)

    for module in (chunk_products, diagonals):
        monkeypatch.setattr(module, "workspace", poisoned)


TABLES = (*TABLE_FIELDS.values(), "bias")


def leaves_of(terms):
    """Every tensor of the terms that may have a gradient."""
    tables = [table.rows for field in TABLES for table in getattr(terms, field)]
    return [*tables, *terms.dense, *([] if terms.content_bias is None else [terms.content_bias])]


def vectors(length, keys, batch=BATCH):
    return [torch.randn(batch, HEADS, count, SIZE, dtype=torch.float64) for count in (length, keys, keys)]


def converted(terms, dtype):
    """The same terms in another dtype, as leaves, and these."""

    def leaf(tensor):
        return tensor.detach().to(dtype).requires_grad_()

    tables = {field: tuple(Table(leaf(each.rows), each.row_of) for each in getattr(terms, field)) for field in TABLES}
    content_bias = None if terms.content_bias is None else leaf(terms.content_bias)
    terms = dataclasses.replace(terms, **tables, dense=tuple(map(leaf, terms.dense)), content_bias=content_bias)
    return terms, leaves_of(terms)


def in_chunks(tensors, terms, context, mask=None, causal=False, dropout=0.0):
    return Chunked().run(AttentionCall(*tensors, terms, context, mask=mask, is_causal=causal, dropout=dropout))[0]


def run(how, tensors, terms, context, mask=None, causal=False, dtype=torch.float64):
    """Output (B, L, H, d) and all gradients, "eager" or "chunked"."""
    tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    terms, leaves = converted(terms, dtype)
    if how == "eager":
        seen = (context.matrix(tensors[0].device) <= 0)[None, None] if causal else getattr(mask, "dense", mask)
        out = attend(*tensors, terms, context, seen)[0].transpose(1, 2)
    else:
        out = in_chunks(tensors, terms, context, mask, causal)
    torch.manual_seed(7)
    gradient = torch.randn(out.shape, dtype=torch.float64).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, [*tensors, *leaves], gradient, allow_unused=True)]


def largest(one, other):
    return max(float((x - y).abs().max()) for x, y in zip(one, other, strict=True) if not (x is None and y is None))


def assert_eagers(tensors, terms, context, mask=None, causal=False, bound=1e-11):
    """Output and gradients in chunks are eager's, which are returned."""
    expected = run("eager", tensors, terms, context, mask, causal)
    assert largest(run("chunked", tensors, terms, context, mask, causal), expected) <= bound
    return expected


def window(length, max_distance):
    """Keys at most `max_distance` places away, and the first token."""
    near = (torch.arange(length)[:, None] - torch.arange(length)).abs() <= max_distance
    near[0] = near[:, 0] = True
    return near[None, None]


def documents(length, *ends):
    """Rows of the batch cut into documents at these places, the same in each; (1, 1, L, L)."""
    number = torch.bucketize(torch.arange(length), torch.tensor(ends), right=True)
    return (number[:, None] == number)[None, None]


def left_padding(length):
    """Causal, the second row beginning late: its first queries see nothing."""
    real = padding([length, length // 2], length).flip(1)
    return real[:, None, None, :] & torch.ones(length, length).bool().tril()


MASKS = {
    "none": lambda n: None,
    "padding": lambda n: padding([n, n // 3], n)[:, None, None, :],
    "padding for each query": lambda n: padding([n, n // 3], n)[:, None, None, :].expand(2, 1, n, n),
    "holes": lambda n: (torch.arange(n) % 7 != 3)[None, None, None, :],
    "window": lambda n: window(n, 9),
    "documents": lambda n: documents(n, n // 5, n // 2),
    "left padding, causal": left_padding,
    "any": lambda n: (torch.rand(2, HEADS, n, n) < 0.3) | torch.eye(n).bool(),
    "nothing": lambda n: torch.zeros(2, 1, 1, n).bool(),
    "attention window": lambda n: SlidingWindowMask(n, n, 9, CPU),
}


def case_id(value):
    return str(value) if isinstance(value, int | str) else combination_id(value)


# every mask at one length or another, every length, every letter alone and all at once, shared tables and not
CHOSEN = [*map(frozenset, ("A", "B", "c", "V", "")), ALL]
CASES = [(LENGTHS[number % 3], *case) for number, case in enumerate(itertools.product(MASKS, CHOSEN))]
CASES += [(513, "padding", ALL), (513, "window", frozenset("AV"))]


@pytest.mark.parametrize("length, mask, chosen", CASES, ids=case_id)
def test_output_and_gradients_are_eagers(length, mask, chosen):
    """In float64, so that nothing but rounding may differ."""
    shared = length == 100
    terms, _ = random_terms(chosen, shared, tables=2)
    if len(chosen) != 1:
        dense = torch.randn(1 if shared else BATCH, HEADS, length, length).double()
        terms = dataclasses.replace(terms, dense=(dense,))
    tensors, context, seen = vectors(length, length), AttentionContext(length, length), MASKS[mask](length)
    assert_eagers(tensors, terms, context, seen, bound=1e-10)
    got, again = (run("chunked", tensors, terms, context, seen) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True) if one is not None)


@pytest.mark.parametrize("mask", ["padding", "any", "attention window"])
def test_gradients_are_finite_differences(mask):
    """Of a loss in one random direction of each tensor, without another backward to compare with."""
    terms, _ = random_terms(ALL, shared=False, tables=2)
    tensors, given = vectors(63, 63), (terms, AttentionContext(63, 63), MASKS[mask](63))
    out, *gradients = run("chunked", tensors, *given)
    torch.manual_seed(7)
    weights, step = torch.randn(out.shape, dtype=torch.float64), 1e-5
    for tensor, gradient in zip([*tensors, *leaves_of(terms)], gradients, strict=True):
        direction, values = torch.randn_like(tensor), []
        for move in (step, -2 * step, step):
            tensor.data.add_(direction, alpha=move)
            values.append(float((run("chunked", tensors, *given)[0] * weights).sum()))
        found = (values[0] - values[1]) / (2 * step)
        assert found == pytest.approx(float((gradient * direction).sum()), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("counts", [(63, 63, 0), (100, 100, 0), (50, 111, 61), (1, 70, 69), (111, 140, 0)])
def test_causal_without_a_mask(counts):
    """Also with keys from a cache, and a static one that is not full."""
    terms, _ = random_terms(ALL, shared=False)
    assert_eagers(vectors(*counts[:2]), terms, AttentionContext(*counts), causal=True)


def wide_terms(chosen, dtype):
    """Tables for heads of 32, clipped to ±20: sums as long as real ones, where rounding is not a matter of luck."""
    terms = {}
    for letter in chosen:
        rows = torch.randn(1, 41) if letter == "c" else torch.randn(1, 41, 32)
        terms[TABLE_FIELDS[letter]] = (Table((0.3 * rows).to(dtype), clipped(20)),)
    return Terms(**terms)


# The dtype, and whether the processor multiplies in bfloat16.
PRECISIONS = {"fp32": (torch.float32, True), "bf16": (torch.bfloat16, True), "bf16 by fp32": (torch.bfloat16, False)}


@pytest.mark.parametrize("dtype, native", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("mask", ["none", "padding", "window"])
@pytest.mark.parametrize("chosen", ["A", "B", "c", "V", "ABcV"])
def test_error_is_at_most_twice_eagers(chosen, mask, dtype, native, monkeypatch):
    """Root mean square distance from float64, of the output and of every gradient."""
    monkeypatch.setattr(backend_chunked, "multiplies_bfloat16", lambda: native)
    length, errors = 111, 0.0
    for seed in range(3):
        torch.manual_seed(seed)
        terms = wide_terms(chosen, dtype)
        tensors = [torch.randn(BATCH, HEADS, length, 32).to(dtype) for _ in range(3)]
        context, seen = AttentionContext(length, length), MASKS[mask](length)
        exact = run("eager", tensors, terms, context, seen)
        results = [run(how, tensors, terms, context, seen, dtype=dtype) for how in ("chunked", "eager")]
        assert {x.dtype for x in results[0]} == {dtype}
        pairs = (zip(its, exact, strict=True) for its in results)
        errors = errors + torch.tensor([[(x.double() - truth).square().sum() for x, truth in each] for each in pairs])
    assert (errors[0].sqrt() <= 2 * errors[1].sqrt()).all(), (errors[0] / errors[1]).sqrt()


def test_scheme_that_hides_keys():
    """`allow`, with and without a mask: queries that may attend to nothing get zeros."""
    heads = torch.tensor([[True, False, False], [False, False, True], [True, False, True]])
    terms, _ = random_terms(frozenset("A"), shared=False)
    terms = dataclasses.replace(terms, allow=(Table(heads, lambda r: r.sign() + 1),))
    tensors, context = vectors(63, 63), AttentionContext(63, 63)
    for mask in (None, MASKS["padding"](63), left_padding(63)):
        assert (assert_eagers(tensors, terms, context, mask)[0][:, 0, 0] == 0).all()


def test_other_rows_of_the_batch_change_nothing():
    """Bit for bit, and neither does right padding, nor what stands there."""
    terms, _ = random_terms(ALL, shared=True)
    tensors = vectors(100, 100)
    together = run("chunked", tensors, terms, AttentionContext(100, 100), padding([100, 70], 100)[:, None, None, :])[0]
    noise = [x.clone() for x in tensors]
    for x in noise:
        x[1, :, 70:] = torch.randn_like(x[1, :, 70:])
    elsewhere = run("chunked", noise, terms, AttentionContext(100, 100), padding([100, 70], 100)[:, None, None, :])[0]
    assert torch.equal(together[0], elsewhere[0]) and torch.equal(together[1, :70], elsewhere[1, :70])
    alone = run("chunked", [x[:1] for x in tensors], terms, AttentionContext(100, 100))[0]
    assert torch.equal(together[:1], alone)
    short = [x[1:, :, :70] for x in tensors]
    assert (together[1:, :70] - run("chunked", short, terms, AttentionContext(70, 70))[0]).abs().max() <= 1e-12


# Memory and work -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_is_linear_in_the_length():
    """No operation of forward or backward returns anything near B·H·L·K or L·K elements."""
    length = 1200
    terms, _ = random_terms(ALL, shared=True)
    tensors, context = vectors(length, length), AttentionContext(length, length)
    mask = padding([length, length // 2], length)[:, None, None, :]
    with Computed() as seen:
        run("chunked", tensors, terms, context, mask)
    assert seen.largest <= 8 * BATCH * HEADS * length * SIZE < length * length // 4


class Multiplications(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts those of matrix products."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in ("mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_"):
            self.count += result.numel() * args[-1].shape[-2]
        return result


@pytest.mark.slow
def test_a_window_costs_what_it_shows():
    """Products grow with the window, not with the length; documents of a pack cost what they do alone."""
    terms, _ = random_terms(frozenset("AV"), shared=True)
    cost = {}
    for kind, length, mask in (
        ("all", 513, None),
        ("window", 513, window(513, 9)),
        ("wide", 513, window(513, 90)),
        ("pack", 480, documents(480, 96, 192, 288, 384)),
        ("document", 96, None),
    ):
        tensors = vectors(length, length)
        with Multiplications() as products:
            run("chunked", tensors, terms, AttentionContext(length, length), mask)
        cost[kind] = products.count
    assert cost["window"] <= 0.45 * cost["all"] and cost["window"] <= 0.8 * cost["wide"] < 0.8 * cost["all"]
    assert cost["pack"] <= 1.01 * 5 * cost["document"]


@pytest.mark.parametrize("mask", ["none", "padding", "window"])
def test_chunks_of_long_inputs(mask, monkeypatch):
    monkeypatch.setattr(skewed, "LONG", 200)
    terms, _ = random_terms(ALL, shared=False)
    assert_eagers(vectors(201, 201), terms, AttentionContext(201, 201), MASKS[mask](201))


# Keys that weigh nothing ------------------------------------------------------------------------------------------


def decaying(length, sees=None):
    """ALiBi's bias, of a head that forgets at once, of one that does so later, and of one that never does."""
    rows = -torch.tensor([2.0, 0.5, 2**-7])[:, None] * torch.arange(1 - length, length).abs()
    own = toeplitz_table(rows.double(), AttentionContext(length, length))
    return Terms(bias=(own,), allow=() if sees is None else (Table(sees, lambda r: r.sign() + 1),))


FAR_MASKS = ["none", "causal", "padding", "holes", "documents", "left padding, causal"]


@pytest.mark.parametrize("mask", FAR_MASKS)
@pytest.mark.parametrize("spread", [0.1, 4.0], ids=["even content", "content that outweighs the bias"])
def test_far_keys_left_out(mask, spread, monkeypatch):
    """Padding, too, has eager's output, though the keys that it sees are far."""
    length, causal = 513, mask == "causal"
    tensors, seen = vectors(length, length), None if causal else MASKS[mask](length)
    tensors[0] *= spread
    tensors[1][:, :, 7] *= 20 * spread  # a far key that most queries find
    given = tensors, decaying(length), AttentionContext(length, length), seen, causal
    assert_eagers(*given, bound=1e-12)
    if spread < 1 and mask != "holes":  # some query of each chunk is in a hole
        with Multiplications() as products:
            run("chunked", *given)
        monkeypatch.setattr(backend_chunked, "far_offsets", lambda *_: None)
        with Multiplications() as all_products:
            run("chunked", *given)
        assert products.count < 0.8 * all_products.count


def test_far_keys_of_one_side():
    """Each head sees one side, and its own token in any case; where it does not, nothing is left out."""
    length, context = 513, AttentionContext(513, 513)
    tensors = [0.1 * each for each in vectors(length, length)]
    for own in (True, False):
        sees = torch.tensor([[True, own, False], [False, own, True], [True, own, True]])
        terms = decaying(length, sees)
        assert_eagers(tensors, terms, context, bound=1e-12)
        assert (far_offsets(*tensors[:2], to_toeplitz(terms, context, tensors[0])) is not None) == own


def test_far_keys_leave_no_subnormal_weight(monkeypatch):
    """Some processors take many times as long for these."""
    smallest = []
    whole = chunk_products.HeadGroup.probabilities

    def recorded(*args):
        weights = whole(*args)
        smallest.append(weights[weights > 0].min())
        return weights

    monkeypatch.setattr(chunk_products.HeadGroup, "probabilities", recorded)
    tensors, context = vectors(513, 513), AttentionContext(513, 513)
    for leaves_out in (True, False):
        if not leaves_out:
            monkeypatch.setattr(backend_chunked, "far_offsets", lambda *_: None)
        run("chunked", tensors, decaying(513), context, dtype=torch.float32)
        assert (min(smallest) >= torch.finfo(torch.float32).tiny) == leaves_out


# Offsets that share rows ------------------------------------------------------------------------------------------


def log_buckets(r):
    """Offsets to 60 rows: ±10 one by one, longer and longer runs up to ±60, and the tails; rows descend."""
    far = (torch.log(r.abs().clamp(min=10) / 10) / torch.log(torch.tensor(6.0)) * 19).long().clamp(max=19)
    return 30 - r.sign() * (r.abs().clamp(max=10) + far)


SHARED_ROWS = {
    "clipped": (lambda r: r.clamp(-9, 12) + 9, 22),
    "buckets": (log_buckets, 60),
    "one": (torch.zeros_like, 1),
    "sides": (lambda r: (r > 0).long(), 2),
}


def terms_of_rows(row_of, rows, heads):
    def table(kind):
        return Table(torch.randn(heads, rows, SIZE, dtype=torch.float64), kind)

    # two tables, whose rows change in different places
    return Terms(scale=0.4, query_table=(table(row_of),), key_table=(table(row_of), table(lambda r: row_of(r + 3))))


@pytest.mark.parametrize("mask", ["none", "padding", "holes", "window", "documents", "any", "nothing"])
@pytest.mark.parametrize("heads", [1, HEADS], ids=["shared", "per-head"])
@pytest.mark.parametrize("kind", SHARED_ROWS)
def test_offsets_that_share_rows_are_eagers(kind, heads, mask):
    terms = terms_of_rows(*SHARED_ROWS[kind], heads)
    assert_eagers(vectors(201, 201), terms, AttentionContext(201, 201), MASKS[mask](201))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("mask", MASKS)
def test_probabilities_that_are_kept_give_the_gradients_of_those_computed_again(mask, dropout, dtype, monkeypatch):
    length = 100
    terms, _ = random_terms(ALL, shared=False)
    tensors, context, seen = vectors(length, length), AttentionContext(length, length), MASKS[mask](length)
    results, held = [], []
    for most in (0, 1 << 20):
        monkeypatch.setattr(backend_chunked, "KEPT", most)
        own, leaves = converted(terms, dtype)
        inputs = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=sizes: s.append(x.numel()) or x, lambda x: x):
            out = dropped_out(inputs, own, context, dropout, 3, seen)
        total = out.double().square().sum()
        first = torch.autograd.grad(total, [*inputs, *leaves], retain_graph=True, allow_unused=True)
        again = torch.autograd.grad(total, [*inputs, *leaves], allow_unused=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True) if x is not None)
        results.append([out, *(x for x in first if x is not None)])
        held.append(sum(sizes))
    assert all(map(torch.equal, *results))
    assert held[1] > held[0]


# Dropout ---------------------------------------------------------------------------------------------------------


def dropped_out(tensors, terms, context, rate, seed, mask=None):
    torch.manual_seed(seed)
    return in_chunks(tensors, terms, context, mask, dropout=rate)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_is_fair(rate):
    """The share of weights dropped, in all and by row and key, and what is left of them in the mean."""
    length = 200
    tensors = vectors(length, length)
    tensors[2] = torch.eye(length, dtype=torch.float64).expand(BATCH, HEADS, -1, -1)  # the output is the weights
    terms, context = Terms(), AttentionContext(length, length)
    weights = dropped_out(tensors, terms, context, rate, 11).transpose(1, 2)
    whole = dropped_out(tensors, terms, context, 0.0, 0).transpose(1, 2)
    kept = weights != 0
    count = kept.numel()
    assert abs(1 - kept.double().mean() - rate) <= 4 * (rate * (1 - rate) / count) ** 0.5
    for axis in (-1, -2):
        share = 1 - kept.double().mean(axis)
        assert (share - rate).abs().max() <= 6 * (rate * (1 - rate) / length) ** 0.5
    assert torch.allclose(weights[kept], whole[kept] / (1 - round(rate * 65536) / 65536), rtol=1e-12)
    assert not torch.equal(kept[0], kept[1]) and not torch.equal(kept[:, 0], kept[:, 1])
    other = dropped_out(tensors, terms, context, rate, 1).transpose(1, 2) != 0
    assert not torch.equal(kept, other)
    assert torch.equal(dropped_out(tensors, terms, context, rate, 11).transpose(1, 2), weights)


@pytest.mark.parametrize("mask", ["none", "padding", "documents"])
def test_dropout_does_not_depend_on_the_contents_of_other_rows(mask):
    """Which tell how many keys are left out. The output is linear in the values, with the gradient for weights."""
    tensors = [0.1 * each for each in vectors(513, 513)]
    given = decaying(513), AttentionContext(513, 513), 0.3, 11, MASKS[mask](513)
    expected = dropped_out(tensors, *given)
    tensors[0][1] *= 100
    out = dropped_out([*tensors[:2], tensors[2].requires_grad_()], *given)
    torch.testing.assert_close(out[0], expected[0], rtol=0, atol=1e-12)
    gradient = torch.randn_like(out)
    (of_values,) = torch.autograd.grad(out, tensors[2], gradient)
    torch.testing.assert_close((of_values * tensors[2]).sum(), (out * gradient).sum())


@pytest.mark.parametrize("mask", ["none", "window", "attention window"])
def test_dropout_is_replayed_in_the_backward(mask):
    """Gradients are those of the formula with the weights that the forward dropped."""
    length = 63
    terms, _ = random_terms(ALL, shared=False)
    terms, leaves = converted(terms, torch.float64)
    tensors, context, seen = vectors(length, length), AttentionContext(length, length), MASKS[mask](length)
    shown = [*tensors[:2], torch.eye(length, dtype=torch.float64).expand(BATCH, HEADS, -1, -1)]
    kept = dropped_out(shown, Terms(scale=0.3), context, 0.3, 5, seen).transpose(1, 2) != 0
    tensors = [x.requires_grad_() for x in tensors]
    out = dropped_out(tensors, terms, context, 0.3, 5, seen)
    _, weights = attend(*tensors, terms, context, getattr(seen, "dense", seen))
    weights = weights * kept / (1 - round(0.3 * 65536) / 65536)
    (table,) = terms.value_table
    values = tensors[2][:, :, None] + table.rows[:, table.row_of(context.matrix(out.device))]
    expected = (weights[..., None] * values).sum(-2).transpose(1, 2)
    assert (out - expected).abs().max() <= 1e-12
    gradient = torch.randn_like(out)
    got = torch.autograd.grad(out, [*tensors, *leaves], gradient)
    assert largest(got, torch.autograd.grad(expected, [*tensors, *leaves], gradient)) <= 1e-11


# Models, and what is chosen --------------------------------------------------------------------------------------


def gradients(model, **inputs):
    torch.manual_seed(3)
    model.zero_grad()
    outputs = model(**inputs)
    outputs.loss.backward()
    return [outputs.logits.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("name", ON_TOKENS)
def test_every_scheme_trains_as_with_eager(name):
    model = stir(RelPosBertForMaskedLM(tiny_config(name))).double().train()
    ids, real = torch.randint(1, 50, (2, 63)), padding([63, 30], 63).long()
    if name == "absolute":
        ids, real = ids[:, :16], real[:, :16]
    results = []
    for backend in (model.config._attn_implementation, "eager"):
        model.set_attn_implementation(backend)
        results.append(gradients(model, input_ids=ids, attention_mask=real, labels=ids.masked_fill(real == 0, -100)))
    assert largest(*results) <= 1e-10


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("name", thinned(SCHEMES))
def test_transforms_of_functions_are_eagers(name, window, monkeypatch):
    monkeypatch.setattr(window_blocks, "QUERIES", 1)
    monkeypatch.setattr(window_blocks, "FEWEST", 1)
    model = tiny_model(RelPosBertModel, name, attention_window=window).double()
    inputs = {"input_ids": torch.randint(1, 50, (2, 16)), **extra_inputs(name, 2, 16)}
    weights = {key: value.detach() for key, value in model.named_parameters()}
    change = {key: torch.cos(7 * value) for key, value in weights.items()}
    several = {key: torch.stack([value, 1.1 * value]) for key, value in weights.items()}

    def total(weights):
        return torch.func.functional_call(model, weights, (), inputs)[0].sin().sum()

    results = []
    for backend in (model.config._attn_implementation, "eager"):
        model.set_attn_implementation(backend)
        gradients, products = torch.func.jvp(torch.func.grad(total), (weights,), (change,))
        found = [torch.func.jvp(total, (weights,), (change,))[1], torch.func.vmap(total)(several)]
        results.append([*found, *gradients.values(), *products.values()])
    assert largest(*results) <= 1e-9


def test_a_second_derivative_is_an_error():
    """Also where the loss is linear, for which `once_differentiable` gives constants without a word."""
    terms, _ = random_terms(ALL, shared=False)
    tensors = [tensor.requires_grad_() for tensor in vectors(63, 63)]
    call = AttentionCall(*tensors, terms, AttentionContext(63, 63))
    assert choose(call)[0].name == "chunked"
    for mask in (None, SlidingWindowMask(63, 63, 5, CPU)):
        out, _ = run_attention("relpos", dataclasses.replace(call, mask=mask))
        with raises(NotImplementedError, "create_graph=True", "eager", "undo_optimize"):
            torch.autograd.grad(out.sum(), tensors, create_graph=True)
        torch.autograd.grad(out.sum(), tensors)


def test_gradient_checkpointing_replays_dropout():
    model = tiny_model(RelPosBertForMaskedLM, "shaw", attention_probs_dropout_prob=0.3).double().train()
    ids = torch.randint(1, 50, (2, 40))
    plain = gradients(model, input_ids=ids, labels=ids)
    model.gradient_checkpointing_enable()
    assert largest(gradients(model, input_ids=ids, labels=ids), plain) <= 1e-12


def described(terms=None, length=64, dtype=torch.float32, device=CPU, size=64, context=None, **changes):
    """A call of BERT-base's heads that holds no data."""
    terms = Terms(scaled_bias=random_terms(frozenset("c"), True)[0].scaled_bias) if terms is None else terms
    vectors = torch.empty(4, 12, length, size, dtype=dtype, device="meta")
    context = AttentionContext(length, length) if context is None else context
    return AttentionCall(vectors, vectors, vectors, terms, context, runs_on=device, **changes)


VALUE_TERM = random_terms(frozenset("V"), True)[0]


CHOICES = [
    ("chunked", "", {}),
    ("chunked", "", {"terms": VALUE_TERM}),
    ("chunked", "", {"terms": Terms(), "dropout": 0.1}),
    ("sdpa", "too few", {"length": 32}),
    ("eager", "too few", {"terms": VALUE_TERM, "length": 32}),
    ("eager", "returns attention weights", {"output_weights": True}),
    ("sdpa", "float16", {"dtype": torch.float16}),
    ("sdpa", "not a boolean tensor", {"mask": torch.zeros(4, 1, 512, 512)}),
    ("sdpa", "too close to 1", {"dropout": 1.0}),
    ("sdpa", "no terms", {"terms": Terms()}),
    ("sdpa", "chunks are for the CPU", {"device": torch.device("mps")}),
    ("eager", "chunks are for the CPU", {"terms": VALUE_TERM, "device": torch.device("mps")}),
]


@pytest.mark.parametrize("taken, why, changes", CHOICES)
def test_what_is_chosen(taken, why, changes, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(backend_chunked, "bmm_library", lambda: Library(100.0, 90.0, 1e-7, 1e-7))
    backend, rejected = choose(described(**{"length": 512, **changes}))
    assert backend.name == taken and why in "; ".join(rejected.get("chunked", []))


def test_fast_products_are_faster_than_sdpa(monkeypatch):
    monkeypatch.setattr(backend_chunked, "bmm_library", lambda: Library(100.0, 200.0, 1e-7, 1e-7))
    assert choose(described(Terms(), length=512))[0].name == "chunked"
    assert choose(described(Terms(), length=512, dtype=torch.bfloat16))[0].name == "sdpa"


@pytest.mark.parametrize("name", ["t5", "kerple"])
def test_shared_terms_under_activation_checkpointing_from_outside(name):
    """The first layer is computed again in the backward."""
    model, ids = tiny_model(RelPosBertForMaskedLM, name).train(), torch.randint(1, 50, (2, 9))
    gradients = []
    for wrap in (False, True):
        if wrap:
            for number, layer in enumerate(model.bert.encoder.layer):
                model.bert.encoder.layer[number] = checkpoint_wrapper(layer)
        torch.manual_seed(1)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert largest(*gradients) <= 1e-6


def test_a_layer_with_another_scheme_makes_its_own_terms():
    config = tiny_config("alibi", num_attention_heads=4)
    model, ids = RelPosBertModel(config).eval(), torch.randint(1, 50, (2, 9))
    with torch.no_grad():
        before = model(ids).last_hidden_state
        other = tiny_config("alibi", num_attention_heads=4, position_options={"variant": "offset"})
        model.encoder.layer[1].attention.self.distance_embedding = build_scheme(other)
        assert (model(ids).last_hidden_state - before).abs().max() > 1e-4


@pytest.mark.parametrize("backend", ["relpos", "sdpa", "eager"])
def test_hidden_offsets_and_gaps_in_a_decoder(backend):
    """Causality, a scheme that hides keys, and positions of each row's own."""
    model = tiny_model(RelPosBertLMHeadModel, "disan", is_decoder=True, attn_implementation=backend)
    ids, positions = torch.randint(1, 50, (2, 4)), torch.tensor([[0, 2, 3, 4], [0, 1, 2, 5]])
    with torch.no_grad():
        both = model(ids, position_ids=positions).logits
        alone = [model(ids[i : i + 1], position_ids=positions[i : i + 1]).logits for i in range(2)]
    assert (both - torch.cat(alone)).abs().max() <= 1e-5


def test_explanations_under_a_window():
    """Which backend a call takes, and whether it reads the window alone: as the model does."""
    alone, whole = "time and memory grow with L·window", "has the mask of all pairs"
    text = explain_backend(tiny_config("absolute", attention_window=4), 2, 700)
    assert "takes chunked" in text and "attention_window = 4: chunked reads the keys in it and the global" in text
    shaw = tiny_config("shaw", attention_window=4)
    assert alone in explain_backend(shaw, 2, 700) and whole in explain_backend(shaw, 2, 700, output_attentions=True)
    assert alone in explain_backend(tiny_config("t5", attention_window=4), 2, 700, "mps")
    short = explain_backend(tiny_config("huang_m1", attention_window=4), 2, 544)
    assert whole in short
    assert alone in explain_backend(tiny_config("huang_m1", attention_window=4), 2, 545)
    for name, said in {"eager": whole, "sdpa": alone, "flex_attention": whole}.items():
        model = tiny_model(RelPosBertModel, "t5", attention_window=4, attn_implementation=name)
        assert said in explain_backend(model, 2, 700)


def test_doctor(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = run_command("doctor")
    assert result.exit_code == 0 and torch.__version__ in result.output
    assert all(name in result.output for name in SCHEMES) and "chunked" in result.output
    assert "not flex_attention" not in result.output and "GFLOP" not in result.output
    why = run_command("doctor", "--why")
    assert "takes chunked" in why.output and "not flex_attention" in why.output and "GFLOP" in why.output
