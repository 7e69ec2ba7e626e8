"""What must hold for any scheme: finite numbers, gradients that finite differences confirm, true declarations."""

import ast
import math
from importlib import import_module
from pathlib import Path

import pytest
import torch
from errors import raises
from oracles import extra_context, extra_inputs, layer_error, padding, tiny_attention, tiny_config, tiny_model
from selection import thinned
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

import hf_relpos
from hf_relpos import RelPosBertModel
from hf_relpos.schemes import SCHEMES
from hf_relpos.schemes.registry import scheme_parts
from hf_relpos.schemes.scheme import Scheme, SharedScheme, choice, integer


PACKAGE = Path(hf_relpos.__file__).parent
# Files besides a scheme's own that may name it: the formats of other projects' checkpoints, and the demo's default.
MAY_NAME_SCHEMES = {
    *(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.glob("families/*.py")),
    "schemes/registry.py",  # the default ones
    "conversion/verify.py",
    "cli/checkpoints.py",
    "demo/__init__.py",
}
NOT_SCHEMES = {  # names of other things
    "cli/information.py": {"tables"},  # a field of what `inspect` finds
    "conversion/inspect_checkpoint.py": {"tables", "rope", "alibi"},  # a field of what it finds, and of configurations
    "conversion/plan.py": {"absolute"},  # positions, beside relative ones
    "live/check.py": {"rope"},  # in names of classes
    "live/own.py": {"deberta", "relative_key", "t5", "xlnet"},  # files of Transformers, a field of speech encoders
    "machine.py": {"deberta", "t5", "xlnet"},  # a model_type of Transformers each
}
# Options on which order depends; fire knows no order as long as every position is below its threshold.
ORDER_OPTIONS = {
    "alibi": [{"variant": variant} for variant in ("symmetric", "offset")],
    "cable": [{"gate": gate} for gate in ("path", "key")],
    "fire": [{"threshold": 2}],
    "disan": [{"direction": direction} for direction in ("split", "forward", "backward", "diag")],
}

# The tests of these load the tensors of an original by name.
WITH_NAMES_OF_ORIGINALS = {"cable", "deberta", "fire", "hop", "kerple", "log_cpb", "music", "pope", "relative_2d"}
WITH_NAMES_OF_ORIGINALS |= {"relative_key", "shaw", "t5", "tener", "transformer_xl", "tupe", "xlnet"}
# Names and shapes of parameters with D = 24, H = 3, P = 16 and the default options; of other schemes: none.
PARAMETERS = {
    "grape_m": "log_rate (4,)",
    "harmonic": "A (3, 16, 8); B (3, 16, 8); c (3, 16); V (3, 16, 8)",
    "huang_m1": "weight (16,)",
    "huang_m2": "weight (31,)",
    "huang_m3": "weight (31, 8)",
    "relation": "key (2, 8); value (2, 8)",
    "relative_key_query": "weight (31, 8)",
    "tables": "A (3, 31, 8); B (3, 31, 8); c (3, 31); V (3, 31, 8)",
}
NETWORK = "shared.mlp.0.weight (32, 1); shared.mlp.0.bias (32,); shared.mlp.2.weight (3, 32); shared.mlp.2.bias (3,)"
VARIANTS = [
    ("fire", {"shared": True}, f"shared.c (1,); shared.L_multiplier (1,); {NETWORK}"),
    ("relation", {"num_relations": 5, "per_head": True, "values": False}, "key (3, 5, 8)"),
    ("relative_key", {"clip": 4}, "weight (31, 8)"),
    ("xlnet", {"segments": False}, "r (24, 3, 8); r_w_bias (3, 8); r_r_bias (3, 8)"),
]
OTHERS = [(name, {}, PARAMETERS.get(name, "")) for name in SCHEMES if name not in WITH_NAMES_OF_ORIGINALS]
WRONG_KINDS = [{"pos_att_type": kinds} for kinds in ("c2p|p2p", ["c2p", "c2p"], "")]
# Options that a scheme does not take, or not together; the error names the first.
REFUSED = {
    "alibi": [{"variant": "asymmetric"}],  # half of three heads
    "cape": [{"max_global_shift": -1}, {"max_local_shift": math.inf}, {"max_global_scaling": 0.9}, {"freq_scale": 0}],
    "deberta": [{"buckets": 1}, {"buckets": 32}, {"max_distance": 0}, *WRONG_KINDS],
    "harmonic": [{"period": 3}, {"terms": "AC"}],
    "log_cpb": [{"window": 1}],
    "nezha": [{"max_relative_position": 2**24}],
    "relation": [{"num_relations": 1}, {"num_relations": 5, "none_label": 5}, {"none_label": -1}],
    "relative_key": [{"clip": 16}],
    "pope": [{"base": 0}],
    "rope": [{"rope_parameters": 10000.0}, {"layer_types": []}],
    "sandwich": [{"dim": 3}, {"dim": 2**24}],
    "t5": [{"buckets": 6}, {"max_distance": 8}],  # three for each side; 8 distances have buckets: log(8/8) = 0
    "tables": [{"terms": "AA"}],
}


# Files of schemes by the largest error against the original code that `parity` in them may find.
ORIGINALS = {
    0: ["disan"],
    1e-12: ["grape_m", "pope", "tupe"],
    5e-7: ["tener", "xlnet"],
    1e-6: ["alibi", "deberta", "kerple", "rope", "sinusoidal_2d", "t5"],
    2e-6: ["absolute", "cape", "fire", "music", "nezha", "relative_2d", "shaw"],
    5e-6: ["log_cpb", "sinusoidal"],  # angles of float32
    1e-5: ["cable", "relative_key", "transformer_xl"],
    2e-5: ["hop", "sandwich"],  # sums of products of size 30
}
WITH_ORIGINALS = [(import_module(f"test_{name}"), error) for error, names in ORIGINALS.items() for name in names]


@pytest.mark.parametrize(
    "parity, case, error",
    [(module.parity, case, error) for module, error in WITH_ORIGINALS for case in module.CASES],
    ids=lambda value: value.__module__ if callable(value) else str(value),
)
def test_equals_the_original_code(parity, case, error):
    assert parity(case) <= error


def test_every_original_is_among_those_compared():
    comparing = {path.stem for path in Path(__file__).parent.glob("test_*.py") if "\ndef parity(" in path.read_text()}
    assert comparing == {module.__name__ for module, _ in WITH_ORIGINALS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("mask", ["boolean", "additive"])
@pytest.mark.parametrize("name", SCHEMES)
def test_finite_also_where_every_key_is_hidden(name, mask, dtype):
    layer = tiny_attention(name, dtype=dtype)
    hidden = (4 * torch.randn(2, 12, 24)).to(dtype).requires_grad_()
    allowed = padding([7, 0], 12)[:, None, None, :]
    if mask == "additive":
        allowed = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    out, weights = layer(hidden, attention_mask=allowed, context=extra_context(name, 2, 12))
    out.float().square().sum().backward()
    assert out.dtype == dtype
    assert out.isfinite().all() and weights.isfinite().all()
    assert hidden.grad.isfinite().all()
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name


@pytest.mark.parametrize("name", thinned(SCHEMES))
def test_gradients_by_finite_differences(name):
    layer = tiny_attention(name, hidden_size=12, max_position_embeddings=4)
    names = [name for name, _ in layer.named_parameters() if "distance_embedding" in name]
    tensors = [layer.get_parameter(name) for name in names]
    hidden = torch.randn(1, 5, 12, dtype=torch.float64, requires_grad=True)
    mask, context = padding([4], 5)[:, None, None, :], extra_context(name, 1, 5)

    def run(hidden, *tensors):
        return functional_call(layer, dict(zip(names, tensors, strict=True)), (hidden, mask, None, context))[0]

    assert gradcheck(run, (hidden, *tensors))
    assert gradgradcheck(run, (hidden, *tensors), fast_mode=True)


@pytest.mark.parametrize("name", SCHEMES)
def test_describes_itself(name):
    scheme = SCHEMES[name]
    assert scheme.name == name and scheme.source and scheme.out_of_range
    for option in scheme.options.values():
        assert option.help and option.accepts(option.default)
    assert not list(tiny_attention(name).distance_embedding.buffers())


@pytest.mark.parametrize("name, options, expected", [*OTHERS, *VARIANTS], ids=str)
def test_names_and_shapes_of_parameters(name, options, expected):
    """Those of the published checkpoints; parameters that all layers share begin with `shared`."""
    layer = tiny_attention(name, position_options=options)
    parameters = dict(layer.distance_embedding.named_parameters())
    if layer.shared_distance_embedding is not None:
        parameters |= {f"shared.{key}": each for key, each in layer.shared_distance_embedding.named_parameters()}
    found = {f"{key} {tuple(each.shape)}" for key, each in parameters.items()}
    assert found == set(filter(None, expected.split("; ")))


def test_integers_and_choices_take_nothing_else():
    number, perhaps = integer(3, "size"), integer(None, "size", none="all", least=2, most=9)
    word = choice("a", True, help="")
    assert not any(map(number.accepts, (0, -1, True, 2.5, "4", None, 2**24 + 1, 10**25)))
    assert number.accepts(1) and number.accepts(2**24)
    assert [each for each in (None, 0, 1, 2, 9, 10, False) if perhaps.accepts(each)] == [None, 2, 9]
    assert [each for each in ("b", 1, None, "a", True) if word.accepts(each)] == ["a", True]


@pytest.mark.parametrize("name, options", [(name, each) for name in REFUSED for each in REFUSED[name]], ids=str)
def test_options_that_are_refused(name, options):
    with raises(ValueError, f"position_options[{next(iter(options))!r}] = ", repr(next(iter(options.values())))):
        tiny_config(name, position_options=options)


@pytest.mark.parametrize("name", ["cape", "hop", "nezha", "sinusoidal", "tener", "transformer_xl", "xlnet"])
def test_odd_sizes_are_refused_by_sinusoids(name):
    with raises(ValueError, "hidden_size = 15", name):
        tiny_config(name, hidden_size=15)


@pytest.mark.parametrize("name", ["absolute", "cape", "sinusoidal", "sinusoidal_2d"])
def test_schemes_of_the_input_leave_attention_as_it_is(name, hidden):
    layer = tiny_attention(name)
    assert layer_error(layer, hidden, padding([9, 5], 9), lambda q, k, h, i, j: q @ k / math.sqrt(8)) <= 1e-10


@pytest.mark.parametrize("name", [name for name in SCHEMES if SCHEMES[name].zero_init_is_identity])
def test_zero_init_is_identity(name):
    """With its parameters at zero the layer is a plain one, and at least one of them has a gradient to leave by."""
    layer, plain = tiny_attention(name), tiny_attention("absolute")
    plain.load_state_dict({key: value for key, value in layer.state_dict().items() if "distance" not in key})
    parameters = [parameter for name, parameter in layer.named_parameters() if "distance_embedding" in name]
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    hidden, mask = torch.randn(2, 8, 24, dtype=torch.float64), padding([8, 6], 8)[:, None, None, :]
    out, _ = layer(hidden, attention_mask=mask, context=extra_context(name, 2, 8))
    assert (out - plain(hidden, attention_mask=mask)[0]).abs().max() <= 1e-12
    out.square().sum().backward()
    assert not parameters or any(parameter.grad.abs().max() > 1e-6 for parameter in parameters)


@pytest.mark.parametrize("name", SCHEMES)
def test_is_symmetric_with(name):
    """Reversed tokens give reversed outputs under a scheme that says so, and under no other."""
    for options in ORDER_OPTIONS.get(name, [{}]):
        model = tiny_model(RelPosBertModel, name, "eager", position_options=options).double()
        ids, inputs = torch.randint(5, 50, (2, 8)), extra_inputs(name, 2, 8)
        with torch.no_grad():
            out, reverse = (model(tokens, **inputs).last_hidden_state for tokens in (ids, ids.flip(1)))
        difference = (reverse.flip(1) - out).abs().max()
        settings = scheme_parts(model.config)[0][1]
        assert difference <= 1e-12 if SCHEMES[name].is_symmetric_with(settings) else difference > 1e-4, options


def test_only_its_own_file_knows_the_name_of_a_scheme():
    named = []
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE).as_posix()
        if path in MAY_NAME_SCHEMES or file.parent.name == "schemes":
            continue
        strings = {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}
        named += [(path, name) for name in SCHEMES if name in strings - NOT_SCHEMES.get(path, set())]
    assert not named


@pytest.mark.parametrize("name", SCHEMES)
def test_fresh_parameters_are_those_of_the_scheme(name, monkeypatch):
    """Every module of the scheme initialises itself in a new model, also one whose parameters are all in layers."""
    model = RelPosBertModel(tiny_config(name))
    modules = [module for module in model.modules() if isinstance(module, Scheme | SharedScheme)]
    begun = []
    for kind in {type(module) for module in modules}:
        monkeypatch.setattr(kind, "init_weights", lambda self, std: begun.append((type(self).__name__, std)))
    RelPosBertModel(tiny_config(name))
    assert sorted(set(begun)) == sorted({(type(module).__name__, 0.2) for module in modules})
