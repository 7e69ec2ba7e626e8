"""A module's parameters are read during its call and never outside of it.

Offloading (accelerate), layers on several devices, and sharding (FSDP) all bring parameters when a module is called
and take them away after it. Whatever is read at another time has no data, is on another device, or was freed.
"""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, attach_execution_device_hook
from oracles import extra_context, stir, tiny_config, tiny_model
from parallel_models import VARIANTS
from selection import FEATURE_SCHEMES, with_full
from test_loading_features import assert_same, first_output, words
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_relpos import RelPosBertForMaskedLM, RelPosBertForSequenceClassification, RelPosBertModel
from hf_relpos.attention.context import LayerInputs
from hf_relpos.schemes import SCHEMES, Terms
from hf_relpos.schemes.registry import build_scheme, build_shared


CPU = torch.device("cpu")
# Options by which terms come from other modules or parameters than by default, too.
OPTIONS = [each for name, each in VARIANTS.items() if name != "alibi, asymmetric"]  # which is for four heads
OPTIONS += [("shaw", {"out_of_range": "zero"}), ("relation", {"none_label": None})]
EVERY_SCHEME = [*((name, {}) for name in SCHEMES), *OPTIONS]


@pytest.mark.parametrize("scheme, options", EVERY_SCHEME)
def test_no_scheme_reads_a_parameter_outside_of_a_call(scheme, options):
    fields = {"position_options": options} if options else {}
    model, inputs = tiny_model(RelPosBertModel, scheme, **fields), words(scheme)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        cpu_offload(model, execution_device=CPU)
        assert_same(model(**inputs).last_hidden_state, expected)


def on_disk(config):
    """A device map with the layers, and what they share, on the disk, and the rest on the CPU."""
    layers = {f"bert.encoder.layer.{number}": "disk" for number in range(config.num_hidden_layers)}
    shared = {"bert.encoder.distance_embedding": "disk"} if build_shared(config) is not None else {}
    return {**layers, **shared, **dict.fromkeys(("bert.embeddings", "bert.pooler", "classifier"), "cpu")}


@pytest.mark.parametrize("scheme", FEATURE_SCHEMES)
def test_device_maps_give_the_same_outputs(tmp_path, scheme):
    model, inputs = tiny_model(RelPosBertForSequenceClassification, scheme), words(scheme)
    expected = first_output(model, inputs)
    model.save_pretrained(tmp_path / "model")
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    arguments = {
        "cpu": {"device_map": {"": "cpu"}},
        "layers": {"device_map": on_disk(model.config), "offload_folder": tmp_path / "layers"},
        "auto": {"device_map": "auto", "max_memory": {"cpu": size // 2}, "offload_folder": tmp_path / "auto"},
    }
    for name, given in arguments.items():
        loaded = RelPosBertForSequenceClassification.from_pretrained(tmp_path / "model", **given)
        assert any(parameter.is_meta for parameter in loaded.parameters()) == (name != "cpu")
        assert_same(first_output(loaded, inputs), expected)


PADDED = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
# What `forward` may be given, beside the tokens, that the layers must find on their own device.
ARGUMENTS = {
    "tokens": ({}, {}),
    "padding": ({"attention_mask": PADDED}, {}),
    "unpadded": ({"attention_mask": PADDED, "input_ids": 7 * PADDED}, {"unpad_inputs": True}),
    "positions": ({"position_ids": torch.tensor([[0, 1, 2, 5, 6, 7, 9, 10, 13]] * 2)}, {}),
    "documents": ({"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)}, {}),
    "token types": ({"token_type_ids": torch.tensor([[0] * 4 + [1] * 5] * 2)}, {}),
}


@pytest.mark.usefixtures("any_padding")
@pytest.mark.parametrize("scheme", with_full(FEATURE_SCHEMES, SCHEMES))
def test_a_layer_on_another_device_finds_everything_there(scheme):
    """Here the meta device, which no tensor of the CPU can be computed with."""
    for kind, (given, fields) in ARGUMENTS.items():
        if {"grid"} <= tiny_config(scheme).required_inputs and "position_ids" in given:
            continue
        model = tiny_model(RelPosBertModel, scheme, **fields)
        model.pooler = None
        layer = model.encoder.layer[1]
        attach_execution_device_hook(layer, "meta")
        add_hook_to_module(layer, AlignDevicesHook("meta", place_submodules=True))
        with torch.no_grad():
            states = model(**words(scheme) | given).last_hidden_state
        assert states.is_meta and states.shape == (2, 9, 24), kind


def tensors_of(terms: Terms):
    for value in vars(terms).values():
        for each in value if isinstance(value, tuple) else (value,):
            each = getattr(each, "rows", each)
            if isinstance(each, torch.Tensor):
                yield each


@pytest.mark.parametrize("scheme, options", EVERY_SCHEME)
def test_terms_hold_no_memory_of_a_parameter(scheme, options):
    """It is freed when the call of a sharded module ends, and terms are used after it."""
    config = tiny_config(scheme, **({"position_options": options} if options else {}))
    module, shared = stir(build_scheme(config)), build_shared(config)
    layer, context = torch.nn.Linear(config.hidden_size, config.hidden_size), extra_context(scheme, 1, 6)
    inputs = LayerInputs(None, torch.rand(1, 3, 6), layer, layer)
    modules = [module] if shared is None else [module, stir(shared)]
    found = None if shared is None else shared(replace(context, layer=inputs))
    terms = module(replace(context, layer=inputs._replace(shared=found)))
    owned = {parameter.untyped_storage().data_ptr() for each in modules for parameter in each.parameters()}
    assert not owned & {tensor.untyped_storage().data_ptr() for tensor in tensors_of(terms)}


@pytest.fixture(scope="module")
def mesh():
    """One process that shards as several would."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # no view is changed in place
@pytest.mark.parametrize("scheme", with_full(["shaw", "transformer_xl", "t5"], FEATURE_SCHEMES))
def test_modules_may_be_sharded_one_by_one(mesh, scheme):
    """Outputs and gradients; the word embeddings, which the head is tied to, belong to the whole model."""
    model = tiny_model(RelPosBertForMaskedLM, scheme)
    whole, inputs = copy.deepcopy(model), words(scheme)
    expected = whole(**inputs, labels=inputs["input_ids"]).loss
    expected.backward()
    for name, module in reversed(list(model.named_modules())):
        owns = any(True for _ in module.parameters(recurse=False))
        if owns and not name.startswith("cls") and "word_embeddings" not in name:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    assert_same(loss, expected)
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name, parameter in model.named_parameters():
        if gradients[name] is not None:
            torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name], rtol=1e-6, atol=1e-8)


class Doubled(torch.nn.Module):
    def forward(self, table):
        return 2 * table


@pytest.mark.parametrize("scheme, name", [("shaw", "key"), ("tables", "A"), ("transformer_xl", "r_w_bias")])
def test_tables_take_parametrizations(scheme, name):
    """PyTorch makes a subclass of the scheme for one, which is no new scheme; PEFT adapts parameters in this way."""
    known = dict(SCHEMES)
    model, inputs = tiny_model(RelPosBertModel, scheme), words(scheme)
    doubled = copy.deepcopy(model)
    with torch.no_grad():
        for layer, other in zip(model.encoder.layer, doubled.encoder.layer, strict=True):
            own, doubles = layer.attention.self.distance_embedding, other.attention.self.distance_embedding
            getattr(doubles, name).mul_(2)
            torch.nn.utils.parametrize.register_parametrization(own, name, Doubled())
        assert_same(model(**inputs).last_hidden_state, doubled(**inputs).last_hidden_state)
    assert known == SCHEMES
