"""Every way to compute attention against `eager`, in float64: random schemes, masks, positions, windows, memories."""

import contextlib

import pytest
import torch
from fuzzing import attempt, examples
from hypothesis import given, reject, strategies as st
from oracles import ON_TOKENS, stir, tiny_config

from hf_relpos import RelPosBertModel
from hf_relpos.attention import dispatch as backends
from hf_relpos.attention.backends import chunked as backend_chunked
from hf_relpos.attention.backends.chunked import Chunked, chunks as skewed
from hf_relpos.models import modeling_relpos_bert


TRAINED = 16  # max_position_embeddings of `tiny_config`
TOLERANCE = 1e-9  # of the largest number in a tensor; what differs is the order of sums in float64


@contextlib.contextmanager
def backend(name: str, queries: int, keys: int):
    """The default backend is this one where it can be; chunks have this size. Gives the names of those taken."""
    first = Chunked() if name == "chunked" else None
    taken = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_chunked, "FEWEST_SCORES", 0)
        patch.setattr(modeling_relpos_bert, "FEWEST_PADDING", 0)
        patch.setattr(skewed, "QUERIES", queries)
        patch.setattr(skewed, "BLOCK", keys)
        patch.setattr(backends, "BACKENDS", [*([] if first is None else [first]), *backends.BY_NAME.values()])
        choose = backends._first_capable

        def noted(call):
            chosen = choose(call)
            taken.add(chosen[0].name)
            return chosen

        patch.setattr(backends, "_first_capable", noted)
        yield taken


@st.composite
def configurations(draw, **given):
    """Tiny configurations: any scheme on tokens or two of them, with window, memory, decoder or not.

    Args:
        given: fields that are not drawn.
    """
    names = draw(st.lists(st.sampled_from(ON_TOKENS), min_size=1, max_size=2, unique=True))
    fields = {"is_decoder": draw(st.booleans()), "unpad_inputs": draw(st.booleans())}
    if draw(st.booleans()):
        fields["attention_window"] = draw(st.integers(1, 3 * TRAINED))
        fields["global_tokens"] = draw(st.none() | st.lists(st.integers(0, 2 * TRAINED), max_size=2))
    if draw(st.integers(0, 3)) == 0:
        fields |= {"memory_length": draw(st.integers(1, TRAINED))}
    try:
        return tiny_config(names if len(names) > 1 else names[0], **fields | given)
    except ValueError:  # two schemes that do not combine, or no memory for this one
        reject()


@st.composite
def batches(draw, config, dtype=torch.float64):
    """Arguments of `forward` for one segment, or two where there is a memory; and which tokens to compare."""
    longest = TRAINED if config.has_absolute_table else 4 * TRAINED
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, longest))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    real = torch.ones(batch, length, dtype=torch.bool)
    inputs = {"input_ids": torch.randint(50, (batch, length), generator=generator)}
    mask = draw(st.sampled_from(["none", "right", "left", "holes", "prepared", "additive"]))
    if mask in ("right", "left"):
        ends = torch.tensor(draw(st.lists(st.integers(1, length), min_size=batch, max_size=batch)))
        real = torch.arange(length)[None] < ends[:, None]
        real = real.flip(1) if mask == "left" else real
        inputs["attention_mask"] = real.long()
        inputs["input_ids"] *= real  # else it is not taken out
    elif mask == "holes":
        real = torch.rand(batch, length, generator=generator) < 0.7
        real[:, draw(st.integers(0, length - 1))] = True
        inputs["attention_mask"] = real.long()
    elif mask in ("prepared", "additive") and not config.memory_length:
        seen = torch.rand(batch, 1, length, length, generator=generator) < 0.5
        seen |= torch.eye(length, dtype=torch.bool)
        additive = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        inputs["attention_mask"] = seen if mask == "prepared" else additive
    positions = draw(st.sampled_from(["none", "none", "packed", "packed", "gaps"]))
    if positions != "none" and not (config.has_absolute_table and positions == "gaps"):
        steps = torch.randint(1, 4 if positions == "gaps" else 2, (batch, length), generator=generator)
        ids = steps.cumsum(-1) - steps[:, :1]
        if positions == "packed":
            cut = draw(st.integers(0, length - 1))
            ids[:, cut:] -= ids[:, cut : cut + 1].clone()
        inputs["position_ids"] = ids
    return inputs, real


def run(model, inputs, real, implementation, gradients=True, compiled=None):
    """The states of the real tokens, and the gradients of all parameters; by the compiled model, if there is one."""
    model.config._attn_implementation = implementation
    model.zero_grad()
    with torch.set_grad_enabled(gradients):
        states = []
        memory = None
        for _ in range(2 if model.config.memory_length else 1):
            outputs = (model if compiled is None else compiled)(**inputs, memory=memory, use_cache=False)
            memory = outputs.get("memory")
            states.append(outputs.last_hidden_state[real])
        out = torch.cat(states)
    if gradients:
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out).cos()
        (out * weights).sum().backward()
    parameters = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"states": out.detach(), **{name: grad.clone() for name, grad in parameters.items()}}


def check_close(got, expected, tolerance=TOLERANCE):
    """Every tensor is there, finite, and equal up to the tolerance."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].isfinite().all() and tensor.isfinite().all(), name
        error = float((got[name] - tensor).abs().max()) if tensor.numel() else 0.0
        scale = max(1.0, float(tensor.abs().max())) if tensor.numel() else 1.0
        assert error <= tolerance * scale, f"{name}: {error} of {scale}"


@pytest.mark.parametrize("name", ["chunked", "sdpa"])
@examples(few=15)
@given(data=st.data())
def test_equals_eager(name, data):
    config = data.draw(configurations())
    inputs, real = data.draw(batches(config))
    torch.manual_seed(data.draw(st.integers(0, 2**32), label="seed"))
    model = stir(RelPosBertModel(config, add_pooling_layer=False)).double().eval()
    expected = run(model, inputs, real, "eager")
    with backend(name, data.draw(st.sampled_from([3, 16, 48])), data.draw(st.sampled_from([8, 16]))) as taken:
        got = run(model, inputs, real, "relpos")
    assert taken
    if taken == {"eager"}:  # which is no comparison
        check_close(got, expected)
        return
    with attempt(f"numbers: {' and '.join(sorted(taken))} against eager"):
        check_close(got, expected)
