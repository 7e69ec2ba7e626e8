"""Products through oneDNN: the numbers of PyTorch's own, forward and backward, and when they are not used."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from errors import raises
from fuzzing import examples, strided
from hypothesis import HealthCheck, given, settings, strategies as st
from launching import run_code
from torch import nn
from torch.autograd import forward_ad

from hf_relpos.products import cpu_gemm
from hf_relpos.products.cpu_gemm import FastLinear, Library, fast_bmm, linear


FAST, SLOW = Library(100.0, 200.0, 1e-7, 3e-7), Library(100.0, 90.0, 1e-7, 3e-7)


@pytest.fixture(autouse=True)
def used(monkeypatch):
    """oneDNN is used on any machine; the list has an entry for each of its products."""
    monkeypatch.setattr(cpu_gemm, "linear_library", lambda: FAST)
    monkeypatch.setattr(cpu_gemm, "bmm_library", lambda: FAST)
    monkeypatch.setattr(cpu_gemm, "packed_rows", lambda: 0)
    seen, operator = [], cpu_gemm.onednn_linear
    monkeypatch.setattr(cpu_gemm, "onednn_linear", lambda *given: seen.append(len(given)) or operator(*given))
    return seen


def layer_and_rows(*shape):
    return FastLinear(96, 160), torch.randn(*shape, 96, requires_grad=True)


@pytest.mark.parametrize("shape", [(64,), (2, 33), (2, 3, 5)], ids=str)
def test_outputs_and_gradients_of_first_and_second_order(shape, used):
    layer, rows = layer_and_rows(*shape)
    leaves = [rows, layer.weight, layer.bias]
    found = []
    for run in (layer, lambda x: nn.functional.linear(x, layer.weight, layer.bias)):
        out = run(rows).transpose(-1, -2)
        out /= 3  # in place, as stock DeBERTa v1 does with a view
        first = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), leaves)
        found.append([out, *first, *second])
    assert len(used) >= 3
    for got, expected in zip(*found, strict=True):
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_changed_weight_is_seen(used):
    layer, rows = layer_and_rows(8)
    with torch.no_grad():
        before = layer(rows)
        for change in (lambda w: w.mul_(2), lambda w: w.data.mul_(2), lambda w: w.numpy().__imul__(2)):
            change(layer.weight)
        after = layer(rows) - layer.bias
    assert torch.allclose(after, 8 * (before - layer.bias), rtol=1e-5, atol=1e-5) and len(used) == 2


OTHER = ["float64", "bfloat16", "one row", "no row", "autocast", "subclass", "jvp", "dual", "vmap", "slow", "compiled"]


@pytest.mark.parametrize("case", OTHER)
def test_other_calls_are_pytorchs_own(case, used, monkeypatch):
    layer, rows = layer_and_rows(0 if case == "no row" else 1 if case == "one row" else 8)
    if case in ("float64", "bfloat16"):
        layer, rows = layer.to(getattr(torch, case)), rows.to(getattr(torch, case))
    if case == "subclass":
        layer.weight = nn.Parameter(layer.weight.data.as_subclass(type("Own", (torch.Tensor,), {})))
    if case == "slow":
        monkeypatch.setattr(cpu_gemm, "linear_library", lambda: SLOW)
    if case == "compiled":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    tangent = torch.ones_like(layer.weight)
    with torch.autocast("cpu", enabled=case == "autocast"):
        if case == "jvp":
            out = torch.func.jvp(lambda w: linear(rows, w), (layer.weight.detach(),), (tangent,))[1]
        elif case == "vmap":
            out = torch.func.vmap(lambda w: linear(rows, w))(torch.stack([layer.weight.detach()] * 2))
        elif case == "dual":
            with forward_ad.dual_level():
                out = forward_ad.unpack_dual(linear(rows, forward_ad.make_dual(layer.weight, tangent))).tangent
        else:
            out = layer(rows)
    assert out.shape[-1] == 160 and not used
    if case in ("jvp", "dual"):
        assert torch.allclose(out, nn.functional.linear(rows, tangent))


@st.composite
def products(draw):
    """Rows, weight and bias of a linear layer, some of shapes that do not fit each other."""
    size, features = (draw(st.sampled_from([1, 3, 8, 0])) for _ in range(2))
    rows = strided(draw, *draw(st.sampled_from([(4,), (1,), (2, 3), (9,), (), (0,)])), size)
    weight = strided(draw, *draw(st.sampled_from([(features, size)] * 6 + [(size,), (features, size + 1)])))
    shapes = [None, (), (1,), (1, features), (features + 1,), *[(features,)] * 8]
    shape = draw(st.sampled_from(shapes))
    return rows, weight, None if shape is None else strided(draw, *shape)


def outcome(run, *tensors):
    """The output and the gradients of a function, or the type of its error."""
    leaves = [None if each is None else each.detach().requires_grad_() for each in tensors]
    with torch.no_grad():
        try:
            found = [run(*tensors)]
        except (RuntimeError, IndexError) as error:
            return type(error)
    out = run(*leaves)
    wanted = [each for each in leaves if each is not None]
    return [*found, out, *torch.autograd.grad(out.sin().sum(), wanted, materialize_grads=True)]


@settings(parent=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given=products())
def test_linear_of_any_strides_and_shapes(given):
    expected, found = outcome(nn.functional.linear, *given), outcome(linear, *given)
    if isinstance(expected, type):
        assert found is expected
    else:
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_batches_of_products_switch_and_restore():
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    left, right = torch.randn(3, 40, 24), torch.randn(3, 24, 56)
    with pytest.raises(KeyError), fast_bmm(left):
        assert setting.fp32_precision == "bf16"
        with fast_bmm(left):
            got = torch.bmm(left, right)
        assert setting.fp32_precision == "bf16"
        raise KeyError
    assert setting.fp32_precision == before
    rounds = torch.cpu.get_capabilities().get("amx_bf16", False)  # where `bmm_library` finds the error, and leaves it
    largest = (got.double() - torch.bmm(left.double(), right.double())).abs().max()
    assert largest <= (0.2 if rounds else 1e-4)
    with fast_bmm(left.double()):
        assert setting.fp32_precision == before


def test_batches_of_products_leave_a_setting_that_the_user_makes_meanwhile():
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    try:
        with fast_bmm(torch.empty(1)):
            setting.fp32_precision = "ieee"
        assert setting.fp32_precision == "ieee"
    finally:
        setting.fp32_precision = before


def test_fast_linears_gives_back_the_classes(used):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Bilinear(2, 2, 2))
    classes = [type(module) for module in model]
    with pytest.raises(KeyError), cpu_gemm.fast_linears(model):
        model[0](torch.randn(4, 8))
        assert used and isinstance(model[0], nn.Linear)
        raise KeyError
    assert [type(module) for module in model] == classes


def test_threads_restore_the_setting_together():
    setting = torch.backends.mkldnn.matmul
    before, inside = setting.fp32_precision, threading.Barrier(4)
    after = []

    def work(order):
        with fast_bmm(torch.empty(1)):
            inside.wait()
            after.append(setting.fp32_precision)
        for _ in range(200):
            with fast_bmm(torch.empty(1)):
                pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert after == ["bf16"] * 4 and setting.fp32_precision == before


def test_measured_and_chosen(monkeypatch):
    monkeypatch.undo()
    for library in (cpu_gemm.linear_library(), cpu_gemm.bmm_library()):
        assert library.torch_rate > 0 and 0 < library.torch_error < 1e-5
    assert cpu_gemm.packed_rows() in (0, *cpu_gemm.PACKED_ROWS)
    assert FAST.is_used and not SLOW.is_used
    assert not Library(100.0, 900.0, 1e-7, 2e-3).is_used  # it rounds to bfloat16, as on a processor with AMX


def test_the_environment_decides(monkeypatch):
    monkeypatch.undo()
    uncached = {name: getattr(cpu_gemm, name).__wrapped__ for name in ("linear_library", "bmm_library")}
    products = {"off": (False, False), "linear": (True, False), "no-prepack": (True, True), "on": (True, True)}
    for value, allowed in products.items():
        monkeypatch.setenv(cpu_gemm.SETTING, value)
        assert tuple(measure().allowed for measure in uncached.values()) == allowed
        if value in ("off", "no-prepack"):
            assert cpu_gemm.packed_rows.__wrapped__() == 0
    monkeypatch.setenv(cpu_gemm.SETTING, "yes")
    with raises(ValueError, cpu_gemm.SETTING, "yes"):
        uncached["linear_library"]()


GROWTH = """
from pathlib import Path
import torch
from hf_relpos.products import cpu_gemm

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

torch.set_num_threads(1)
cpu_gemm.limit_caches()
cpu_gemm.linear_library()
weight = torch.randn(64, 64)
with torch.inference_mode():
    for count in range(4, 904):
        if count == 304:
            before = resident()
        cpu_gemm.onednn_linear(torch.randn(count, 64), weight, None)
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the resident size from /proc")
def test_memory_does_not_grow_with_the_number_of_shapes():
    """600 further shapes, each half a megabyte if all are kept."""
    settings = {name for names in cpu_gemm.CACHE_SETTINGS for name in names}
    variables = {name: value for name, value in os.environ.items() if name not in settings}
    assert float(run_code(GROWTH, env=variables).stdout) < 60


def test_capacities_of_the_user_stay(monkeypatch):
    for names in cpu_gemm.CACHE_SETTINGS:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DNNL_PRIMITIVE_CACHE_CAPACITY", "7")
    cpu_gemm.limit_caches()
    assert "ONEDNN_PRIMITIVE_CACHE_CAPACITY" not in os.environ
    assert os.environ["LRU_CACHE_CAPACITY"] == str(cpu_gemm.CACHED_SHAPES)
    monkeypatch.delenv("LRU_CACHE_CAPACITY")
