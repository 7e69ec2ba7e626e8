"""Projections of position rows are kept in inference, and never outlive what they were made from."""

import copy
import gc
import pickle

import pytest
import torch
from oracles import tiny_model
from torch import nn
from torch.autograd import forward_ad

from hf_relpos import RelPosBertModel
from hf_relpos.products.cpu_gemm import FastLinear
from hf_relpos.products.low_precision import Bfloat16Linear, Int8Linear
from hf_relpos.schemes import projection_cache as kept_projections
from hf_relpos.schemes.projection_cache import MOST_RESULTS, MOST_ROWS, project


ROWS, SIZE = 10, 6


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(SIZE, SIZE, bias=bias).eval()


def rows_of(count: int = ROWS) -> torch.Tensor:
    return torch.randn(count, SIZE, generator=torch.Generator().manual_seed(1))


def is_kept(projection: nn.Module, rows: torch.Tensor) -> bool:
    """Whether a second call has the result of the first."""
    return project(projection, rows) is project(projection, rows)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_second_call_of_inference_has_the_result_of_the_first(bias, dtype):
    projection, rows = linear(bias).to(dtype), rows_of().to(dtype)
    with torch.no_grad():
        assert torch.equal(project(projection, rows), projection(rows))
        assert is_kept(projection, rows)
        assert is_kept(projection, rows.clone())  # the contents decide


def step(projection: nn.Linear) -> None:
    projection.weight.grad = torch.ones_like(projection.weight)
    torch.optim.SGD([projection.weight], lr=0.1).step()


def swap(projection: nn.Linear) -> None:
    torch.utils.swap_tensors(projection.weight, nn.Parameter(projection.weight.detach() * 2))


def exchange(projection: nn.Linear) -> None:
    projection.weight.data = projection.weight.data.flip(0)


WRITES = {
    "data": lambda projection: projection.weight.data.mul_(2),
    "one number by one bit": lambda projection: projection.weight.data.view(torch.int32)[3, 4].bitwise_xor_(1 << 12),
    "numpy": lambda projection: projection.weight.detach().numpy().fill(0.5),
    "the order of rows": exchange,
    "optimizer": step,
    "swapped tensors": swap,
    "another dtype there and back": lambda projection: projection.bfloat16().float(),
}


@pytest.mark.parametrize("way", WRITES)
def test_no_way_of_writing_to_the_layer_is_overlooked(way):
    projection, rows = linear(), rows_of()
    with torch.no_grad():
        before = project(projection, rows)
        with torch.enable_grad():
            WRITES[way](projection)
        after = project(projection, rows)
        assert torch.equal(after, nn.functional.linear(rows, projection.weight, projection.bias))
        assert not torch.equal(after, before)


@pytest.mark.parametrize("way", ["data", "in place", "numpy", "inference mode"])
def test_no_way_of_writing_to_the_rows_is_overlooked(way):
    """One number of rows too large for a sample to hold it."""
    projection = nn.Linear(300, 8).eval()
    projection.__class__ = FastLinear
    with torch.inference_mode() if way == "inference mode" else torch.no_grad():
        rows = torch.randn(300, 300)
        before = project(projection, rows)
        written = {"data": rows.data, "numpy": rows.numpy()}.get(way, rows)
        written[123, 45] += 10
        after = project(projection, rows)
        assert torch.equal(after, projection(rows)) and not torch.equal(after, before)


@pytest.mark.parametrize("kind", [nn.Linear, FastLinear, Bfloat16Linear, Int8Linear])
def test_projections_of_live_layers_follow_a_row(kind):
    projection, rows = kind(300, 300).eval(), torch.randn(20, 300)
    with torch.no_grad():
        assert is_kept(projection, rows)
        projection.weight.data[123].add_(1)
        assert torch.equal(project(projection, rows), projection(rows))


def test_tensors_of_a_model_are_swapped_after_a_call():
    """As `to` and `load_state_dict` do under this setting, and not where a tensor has a weak reference."""
    ids = torch.arange(20)[None]
    model, other = deberta(), deberta()
    twice = {name: 2 * tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    other.load_state_dict(twice, strict=False)
    with torch.no_grad():
        expected = other(ids)[0]
        model(ids)
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.load_state_dict(other.state_dict())
            assert torch.equal(model(ids)[0], expected)
            assert model.double()(ids)[0].dtype == torch.float64
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)


class Half(nn.Linear):
    def forward(self, states):
        return super().forward(states) / 2


def observed() -> nn.Linear:
    projection = linear()
    projection.register_forward_hook(lambda module, inputs, output: output + 1)
    return projection


def replaced() -> nn.Linear:
    projection = linear()
    projection.forward = lambda states: states + 1
    return projection


PASSED_BY = {
    "another class": lambda: Half(SIZE, SIZE).eval(),
    "a hook": observed,
    "a replaced forward": replaced,
    "training": lambda: linear().train(),
    "a parametrization": lambda: nn.utils.parametrizations.weight_norm(linear()),
    "no linear layer": lambda: nn.Sequential(linear()),
}


@pytest.mark.parametrize("what", PASSED_BY)
def test_layers_that_are_no_plain_inference_are_called(what):
    projection, rows = PASSED_BY[what](), rows_of()
    with torch.no_grad():
        assert not is_kept(projection, rows)
        assert torch.equal(project(projection, rows), projection(rows))


def test_gradients_and_autocast_are_passed_by():
    projection, rows = linear(), rows_of()
    with torch.no_grad():
        project(projection, rows)
    assert project(projection, rows).requires_grad
    with torch.no_grad(), torch.autocast("cpu"):
        assert project(projection, rows).dtype == torch.bfloat16
    assert is_kept(projection.requires_grad_(False), rows)


def test_forward_mode_and_transforms_are_passed_by():
    """What is kept has no derivative by rows or weights, whether parameters are frozen or gradients are off."""
    projection, rows = linear().requires_grad_(False), rows_of()
    change = torch.cos(rows)
    with torch.no_grad():
        project(projection, rows)
        expected = nn.functional.linear(change, projection.weight)
        assert torch.equal(torch.func.jvp(lambda rows: project(projection, rows), (rows,), (change,))[1], expected)
        with forward_ad.dual_level():
            out = project(projection, forward_ad.make_dual(rows, change))
            assert torch.equal(forward_ad.unpack_dual(out).tangent, expected)
        several = torch.stack([rows, 2 * rows])
        assert torch.allclose(torch.func.vmap(lambda rows: project(projection, rows))(several), projection(several))
        assert is_kept(projection, rows)


def test_what_inference_mode_keeps_serves_autograd():
    projection, rows = linear().requires_grad_(False), rows_of()
    with torch.inference_mode():
        project(projection, rows.clone())
    states = torch.randn(SIZE, requires_grad=True)
    (project(projection, rows) @ states).sum().backward()
    assert torch.allclose(states.grad, projection(rows).sum(0))


def test_few_and_small_results_are_kept_and_go_with_their_layer():
    gc.collect()
    before = len(kept_projections._cached)
    projection = linear()
    with torch.no_grad():
        for count in range(1, 2 * MOST_RESULTS):
            project(projection, rows_of(count))
        assert len(kept_projections._cached[projection][1]) == MOST_RESULTS
        assert not is_kept(projection, rows_of(MOST_ROWS + 1))
    del projection
    gc.collect()
    assert len(kept_projections._cached) == before


def deberta() -> RelPosBertModel:
    torch.manual_seed(0)
    options = {"buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
    return tiny_model(RelPosBertModel, "deberta", max_position_embeddings=64, position_options=options)


def test_outputs_of_a_model_do_not_depend_on_the_calls_before():
    ids = torch.randint(50, (1, 40), generator=torch.Generator().manual_seed(2))
    lengths = [3, 40, 5, 17, 3, 40]
    with torch.no_grad():
        fresh = [deberta()(ids[:, :length])[0] for length in lengths]
        model = deberta()
        assert all(torch.equal(model(ids[:, :length])[0], out) for length, out in zip(lengths, fresh, strict=True))


def test_copies_of_a_model_share_nothing_with_it():
    ids = torch.arange(20)[None]
    model = deberta()
    with torch.no_grad():
        expected = model(ids)[0]
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert other.state_dict().keys() == state.keys()
            other.encoder.layer[1].attention.self.key.weight.data.mul_(2)
            assert not torch.equal(other(ids)[0], expected)
            assert torch.equal(model(ids)[0], expected)
        model.encoder.distance_embedding.LayerNorm.bias.data.add_(1)
        assert not torch.equal(model(ids)[0], expected)
        model.load_state_dict(state)
        assert torch.equal(model(ids)[0], expected)
