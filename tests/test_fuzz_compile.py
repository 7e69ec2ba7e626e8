"""`torch.compile` of random models, as one graph: outputs and gradients beside those of the same model as it stands.

An example compiles one model and gives it batches of several sizes in a row, some of which need another graph.
"""

import warnings

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from errors import raises
from fuzzing import attempt, examples
from hypothesis import given, reject, strategies as st
from oracles import stir, tiny_model
from test_fuzz_numbers import batches, check_close, configurations, run
from test_optimize import MODELS, build

import hf_relpos
from hf_relpos import RelPosBertModel
from hf_relpos.attention.backends import chunked, flex_attention as flex_backend


# How many examples `make test` tries, and the share of them in `make fuzz`: by what a compilation takes.
COMPILERS = [
    pytest.param("eager", 1, 0.02, id="eager"),
    pytest.param("aot_eager", 1, 0.005, id="aot_eager", marks=pytest.mark.slow),
    pytest.param("inductor", 1, 0.003, id="inductor", marks=pytest.mark.slow),
]
by_every_compiler = pytest.mark.parametrize("compiler, few, share", COMPILERS)
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05}  # of the largest number in a tensor
# of outputs in a precision of `optimize`, beside the same without a graph
PRECISIONS = {"float32": None, "bfloat16": 0.05, "int8": 0.05}


def compiled(data, model, compiler):
    """The model, compiled for sizes that vary, for those of each call, or as PyTorch decides."""
    torch._dynamo.reset()
    dynamic = data.draw(st.sampled_from([True, None, False]), label="dynamic")
    return torch.compile(model, backend=compiler, fullgraph=True, dynamic=dynamic)


@pytest.mark.parametrize("scheme, memory_length", [("t5", 0), ("harmonic", 4)])
def test_gaps_of_positions_in_a_graph_are_an_error(scheme, memory_length):
    """And positions that begin anew are followed."""
    model = tiny_model(RelPosBertModel, scheme, num_hidden_layers=1, memory_length=memory_length)
    torch._dynamo.reset()
    graph = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    ids, packed = torch.randint(50, (1, 6)), torch.tensor([[0, 1, 2, 0, 1, 2]])
    expected = model(ids, position_ids=packed).last_hidden_state
    assert (graph(ids, position_ids=packed).last_hidden_state - expected).abs().max() <= 1e-5
    with raises(RuntimeError, "position_ids", "gaps"):
        graph(ids, position_ids=torch.tensor([[0, 1, 2, 4, 5, 6]]))


@by_every_compiler
def test_own_models(compiler, few, share):
    @examples(few, share, shrink=False)
    @given(data=st.data())
    def check(data):
        config = data.draw(configurations())
        config.num_hidden_layers = 1
        torch.manual_seed(data.draw(st.integers(0, 2**32), label="seed"))
        dtype = data.draw(st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16]))
        implementation = data.draw(st.sampled_from(["relpos", "relpos", "eager"]))
        gradients = dtype != torch.bfloat16 and data.draw(st.booleans(), label="gradients")
        model = stir(RelPosBertModel(config, add_pooling_layer=False)).eval().to(dtype)
        graph = compiled(data, model, compiler)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chunked, "FEWEST_SCORES", data.draw(st.sampled_from([0, chunked.FEWEST_SCORES])))
            for _ in range(3):
                inputs, real = data.draw(batches(config, dtype))
                expected = run(model, inputs, real, "eager", gradients)
                steps = inputs.get("position_ids", torch.zeros(1)).diff(dim=-1)
                refused = [RuntimeError] if (steps > 1).any() else []  # distances in a graph know nothing of gaps
                with attempt(f"compiled by {compiler}: own models", *refused, names=["position_ids"]):
                    got = run(model, inputs, real, implementation, gradients, graph)
                    check_close(got, expected, TOLERANCES[dtype])

    check()


@by_every_compiler
def test_live_models(compiler, few, share):
    """Stock models after `optimize` beside themselves before; in a lower precision, beside those without a graph."""

    @examples(few, share, shrink=False)
    @given(data=st.data())
    def check(data):
        name = data.draw(st.sampled_from(sorted(MODELS)))
        dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
        gradients = data.draw(st.booleans(), label="gradients")
        precision = data.draw(st.sampled_from(["float32", *([] if gradients else PRECISIONS)]))
        model = build(name, torch.float32 if precision != "float32" else dtype)
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32), label="seed"))
        calls, sizes = [], st.tuples(st.integers(1, 3), st.integers(2, 40))
        for rows, length in data.draw(st.lists(sizes, min_size=2, max_size=3)):
            ends = torch.randint(1, length + 1, (rows, 1), generator=generator)
            real = torch.arange(length)[None] < ends
            mask = data.draw(st.sampled_from(["none", "right", "right", "left"]))
            real = {"none": torch.ones_like(real), "right": real, "left": real.flip(1)}[mask]
            ids = torch.randint(3, 50, (rows, length), generator=generator)
            calls.append(({"input_ids": ids, **({} if mask == "none" else {"attention_mask": real.long()})}, real))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chunked, "FEWEST_SCORES", data.draw(st.sampled_from([0, chunked.FEWEST_SCORES])))
            expected = [states_of(model, *call, gradients) for call in calls]
            hf_relpos.optimize(model, precision, sample=calls[0][0] if precision == "int8" else None)
            if precision != "float32":
                expected = [states_of(model, *call, gradients) for call in calls]
            graph = compiled(data, model, compiler)
            for call, each in zip(calls, expected, strict=True):
                with attempt(f"compiled by {compiler}: stock models, optimized"):
                    got = states_of(model, *call, gradients, graph)
                    check_close(got, each, PRECISIONS[precision] or max(TOLERANCES[model.dtype], 1e-5))

    check()


def states_of(model, inputs, real, gradients, graph=None):
    """The states of the real tokens, and the gradients of all parameters; by the graph, if there is one."""
    model.zero_grad()
    with torch.set_grad_enabled(gradients):
        states = (model if graph is None else graph)(**inputs)[0][real]
        if gradients:
            (states * torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states)).sum().backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {"states": states.detach(), **found}


@pytest.mark.slow
@examples(few=3, share=0.01, shrink=False)
@given(data=st.data())
def test_flex_attention(data):
    """Its kernel as Inductor makes it for the CPU, which has no backward there."""
    fields = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = data.draw(configurations(**fields))
    torch.manual_seed(data.draw(st.integers(0, 2**32), label="seed"))
    model = stir(RelPosBertModel(config, add_pooling_layer=False)).eval()
    inputs, real = data.draw(batches(config, torch.float32))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?s).*flex_attention called without torch.compile")
        torch._dynamo.reset()
        patch.setattr(flex_backend, "flex_attention", torch.compile(flex.flex_attention))
        try:
            got = run(model, inputs, real, "flex_attention", gradients=False)
        except ValueError as error:
            assert "flex_attention" in str(error)
            reject()
    with attempt("compiled by inductor: Flex attention"):
        check_close(got, run(model, inputs, real, "eager", gradients=False), TOLERANCES[torch.float32])
