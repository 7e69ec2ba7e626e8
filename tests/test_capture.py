"""`optimize(model, capture=True)`: calls of few tokens without padding run a graph with Transformers' outputs."""

import copy
import pickle
import threading

import pytest
import torch
from encoders import ARCHITECTURES, build, difference, tensors_of, tokens
from test_weight_cache import CHANGES
from torch import nn

import hf_relpos
from hf_relpos.host.torch import has_packed_weights
from hf_relpos.live.foreign import CAPTURE


SWITCHES = {"Qwen3": {"use_cache": False}}
CAPTURED = ["BERT", "RoBERTa", "DistilBERT", "MPNet", "ModernBERT", "NomicBERT", "GTE", "Qwen3", "EuroBERT", "ALBERT"]

pytestmark = pytest.mark.skipif(not has_packed_weights(), reason="this PyTorch does not pack weights")


def captured(name="BERT", **fields):
    """A model, its twin of Transformers, and the handle."""
    model = build(name, torch.float32, **fields)
    stock = copy.deepcopy(model)
    handle = hf_relpos.optimize(model, capture=True, verify="load")
    assert CAPTURE in vars(model), handle.captured
    return model, stock, handle


def rows(count, length):
    return tokens(torch.ones(count, length, dtype=torch.bool))


def level_of(handle, **inputs):
    return handle.explain(**inputs)[0].level


def agree(model, stock, **inputs):
    with torch.no_grad():
        return difference(model(**inputs)[0], stock(**inputs)[0]) < 1e-5


@pytest.mark.parametrize("name", [each for each in CAPTURED if each in ARCHITECTURES])
def test_captured_calls_have_the_outputs_of_transformers(name):
    model, stock, handle = captured(name)
    switches = SWITCHES.get(name, {})
    for count, length in ((1, 2), (1, 3), (1, 17), (3, 11), (2, 40), (1, 61)):
        inputs = {**rows(count, length), **switches}
        with torch.inference_mode():
            found, expected = model(**inputs), stock(**inputs)
            bare = model(inputs["input_ids"], return_dict=False, **switches)
        assert type(found) is type(expected) and isinstance(bare, tuple)
        theirs = dict(tensors_of(expected))
        assert dict(tensors_of(found)).keys() == theirs.keys()
        assert all(difference(each, theirs[key]) < 1e-5 for key, each in tensors_of(found))
        assert difference(bare[0], expected[0]) < 1e-5
    assert handle.counts().calls == {"captured": 12}
    assert "run a captured graph" in str(handle)


def test_captured_calls_read_token_types():
    model, stock, handle = captured()
    inputs = {**rows(2, 9), "token_type_ids": torch.arange(18).view(2, 9) % 2}
    assert agree(model, stock, **inputs) and level_of(handle, **inputs) == "captured"
    assert difference(model(**inputs)[0], model(**rows(2, 9))[0]) > 1e-3
    model, stock, handle = captured("MPNet")  # which has none, and ignores them
    inputs = {**rows(1, 9), "token_type_ids": torch.arange(9)[None] % 2}
    assert agree(model, stock, **inputs) and level_of(handle, **inputs) != "captured"
    assert agree(model, stock, **rows(1, 9)) and level_of(handle, **rows(1, 9)) == "captured"


def test_other_calls_are_not_captured():
    model, _, handle = captured()
    real = torch.arange(20) < torch.tensor([[20], [3], [2]])
    assert level_of(handle, **rows(1, 9), output_hidden_states=True) != "captured"
    assert level_of(handle, **tokens(real)) == "contract"
    assert level_of(handle, **rows(1, 1)) != "captured"
    assert level_of(handle, **rows(1, 9), position_ids=torch.arange(9)[None] + 1) != "captured"
    assert level_of(handle, inputs_embeds=torch.randn(1, 9, 16)) != "captured"
    inputs = rows(1, 9)
    before = handle.counts().calls["captured"]
    model(**inputs)[0].sum().backward()
    assert handle.counts().calls["captured"] == before
    assert all(each.grad is not None for each in model.encoder.parameters())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(**inputs)
    assert handle.counts().calls["captured"] == before
    handle.explain(**inputs)
    assert handle.counts().calls["captured"] == before + 1


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_captured_calls_follow_writes_to_weights(change):
    model, stock, handle = captured(hidden_size=300, num_attention_heads=2, intermediate_size=300)
    for place in ("attention.self.query", "intermediate.dense"):  # joined with others, and by itself
        before = model(**rows(1, 9))[0]
        for each in (model, stock):
            torch.manual_seed(5)
            CHANGES[change](each.get_submodule(f"encoder.layer.1.{place}"))
        for _ in range(3):  # the graph computes from the second call on
            assert agree(model, stock, **rows(1, 9))
        assert level_of(handle, **rows(1, 9)) == "captured"
        assert difference(model(**rows(1, 9))[0], before) > 0


def test_captured_calls_follow_training():
    model, stock, handle = captured()
    for each in (model, stock):
        each.train()
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            each(**rows(2, 9))[0].square().mean().backward()
            optimizer.step()
            each.eval()
            assert each is stock or agree(model, model, **rows(2, 9))
            each.train()
        each.eval()
    assert agree(model, stock, **rows(2, 9)) and agree(model, stock, **rows(1, 30))
    assert level_of(handle, **rows(1, 30)) == "captured"


def test_captured_calls_are_left_after_hooks_and_changes():
    model, stock, handle = captured()
    inputs, seen = rows(1, 9), []
    hook = model.encoder.layer[0].register_forward_hook(lambda *given: seen.append(1))
    assert level_of(handle, **inputs) == "Transformers" and seen
    hook.remove()
    assert level_of(handle, **inputs) == "captured"
    for each in (model, stock):
        each.encoder.layer[0].intermediate.intermediate_act_fn = nn.Tanh()
    assert agree(model, stock, **inputs) and level_of(handle, **inputs) != "captured"
    model, stock, handle = captured()
    for each in (model, stock):
        each.encoder.layer[1].output.LayerNorm.eps = 0.5
    assert agree(model, stock, **inputs) and level_of(handle, **inputs) != "captured"
    assert "changed since it was captured" in str(handle.explain(**inputs)[0])


def test_captured_calls_are_left_under_adapters():
    peft = pytest.importorskip("peft")
    model, stock, handle = captured()
    inputs = rows(1, 9)
    settings = peft.LoraConfig(target_modules=["query"], init_lora_weights=False)
    torch.manual_seed(0)
    ours = peft.get_peft_model(model, settings)
    torch.manual_seed(0)
    theirs = peft.get_peft_model(stock, settings)
    assert agree(ours.eval(), theirs.eval(), **inputs)
    assert handle.counts().calls["captured"] == 0
    assert agree(ours.merge_and_unload(), theirs.merge_and_unload(), **inputs)


def test_copies_of_captured_models_record_their_own():
    model, stock, handle = captured()
    state = copy.deepcopy(model.state_dict())
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert agree(made, stock, **rows(1, 9)) and vars(made)[CAPTURE].graph is not None
        with torch.no_grad():
            made.encoder.layer[0].output.dense.weight.mul_(2)
        assert not agree(made, stock, **rows(1, 9))
    assert agree(model, stock, **rows(1, 9))
    assert state.keys() == model.state_dict().keys() == stock.state_dict().keys()
    handle.refresh()
    assert agree(model, stock, **rows(1, 9)) and level_of(handle, **rows(1, 9)) == "captured"
    handle.undo()
    assert type(model) is type(stock) and vars(model).keys() == vars(stock).keys()


def test_captured_calls_of_threads():
    model, stock, handle = captured()
    wrong = []

    def work(seed):
        for length in range(2, 40):
            inputs = tokens(torch.ones(1, length, dtype=torch.bool), seed=seed)
            if not agree(model, stock, **inputs):
                wrong.append((seed, length))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong and handle.counts().calls["captured"] == 3 * 38


def test_optimize_says_why_it_does_not_capture():
    model = build("BERT", torch.float64)
    assert "not captured: it does not compute in float32" in str(hf_relpos.optimize(model, capture=True))
    model = build("remote code", torch.float32)
    assert "not captured: it has third-party code inside" in str(hf_relpos.optimize(model, capture=True))
