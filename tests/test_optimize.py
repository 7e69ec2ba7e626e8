"""`optimize`: a live model without its padding and with other products, beside what it was before the call."""

import importlib

import pytest
import torch
from oracles import tiny_model
from test_live import MODELS as RELATIVE_MODELS
from test_live import SIZES, assert_equal_numbers, tolerance
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    CamembertConfig,
    CamembertModel,
    DistilBertConfig,
    DistilBertModel,
    ElectraConfig,
    ElectraModel,
    ErnieConfig,
    ErnieModel,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from hf_relpos import RelPosBertModel, optimize
from hf_relpos.attention import products
from hf_relpos.attention.backends import chunked as backend_chunked
from hf_relpos.attention.products import Library


optimize_module = importlib.import_module(optimize.__module__)
DISTIL = dict(vocab_size=50, dim=32, n_layers=2, n_heads=4, hidden_dim=24, max_position_embeddings=64)
MODELS = RELATIVE_MODELS | {
    "BERT": (BertModel, BertConfig, SIZES),
    "RoBERTa": (RobertaModel, RobertaConfig, SIZES),
    "XLM-RoBERTa": (XLMRobertaModel, XLMRobertaConfig, SIZES),
    "CamemBERT": (CamembertModel, CamembertConfig, SIZES),
    "ELECTRA": (ElectraModel, ElectraConfig, {**SIZES, "embedding_size": 24}),
    "ERNIE": (ErnieModel, ErnieConfig, SIZES),
    "DistilBERT": (DistilBertModel, DistilBertConfig, DISTIL | {"initializer_range": 0.3}),
}
COPIES = ("BERT", "RoBERTa", "XLM-RoBERTa", "CamemBERT", "ELECTRA", "ERNIE", "DistilBERT")
STOCK = ("v3", "v2 with projections of its own", "v2 absolute", "v1", "v1 absolute", "MPNet", "RoFormer")
STOCK = (*COPIES, *STOCK, "RoFormer with rotated values", "T5", "mT5")
# Padding matters to a convolution, and XLNet is not unpadded.
KEPT = ("v2 with a convolution", "XLNet")
OWN = ("absolute", "relative_key", "deberta", "harmonic")
EAGER = {"attn_implementation": "eager"}
# One each: BERT's code, DistilBERT's, and the families with code of their own.
FEW = ("BERT", "DistilBERT", "v3", "v1", "MPNet", "RoFormer", "T5")
FAST = Library(100.0, 200.0, 1e-7, 3e-7)
SLOW = Library(100.0, 50.0, 1e-7, 3e-7)
# Groups with and without padding, of one row and of several; two groups without a mask; only short rows.
LENGTHS = {
    "groups": [9, 40, 22, 26, 38, 17, 30, 3, 16],
    "equal": [30, 40, 30, 30, 12],
    "short": [5, 1, 7],
}


@pytest.fixture(autouse=True)
def own_products(monkeypatch):
    """PyTorch's own products, whatever is faster on this machine."""
    monkeypatch.setattr(optimize_module, "linear_library", lambda: SLOW)
    monkeypatch.setattr(products, "linear_library", lambda: SLOW)


@pytest.fixture
def onednn(monkeypatch):
    """oneDNN's, on any machine."""
    monkeypatch.setattr(optimize_module, "linear_library", lambda: FAST)
    monkeypatch.setattr(products, "linear_library", lambda: FAST)


def build(name: str, dtype: torch.dtype = torch.float64, **changes) -> nn.Module:
    if name in OWN:
        return tiny_model(RelPosBertModel, name, **{"max_position_embeddings": 64} | changes).to(dtype)
    head, config, fields = MODELS[name]
    torch.manual_seed(0)
    model = head(config(**fields | changes)).to(dtype).eval()
    for parameter in model.parameters():  # biases and LayerNorms begin as zeros and ones
        nn.init.normal_(parameter, std=0.3) if parameter.dim() == 1 else None
    return model


def real_tokens(lengths: list[int], length: int | None = None) -> torch.Tensor:
    return torch.arange(length or max(lengths)) < torch.tensor(lengths)[:, None]


def batch(real: torch.Tensor | str = "groups", seed: int = 1) -> dict[str, torch.Tensor]:
    """Inputs under a mask (B, L), or of rows of these lengths."""
    real = real_tokens(LENGTHS[real]) if isinstance(real, str) else real
    torch.manual_seed(seed)
    return {"input_ids": torch.randint(3, 50, real.shape), "attention_mask": real.long()}


def is_unpadded(states: torch.Tensor, inputs: dict[str, torch.Tensor]) -> bool:
    return not states[inputs["attention_mask"] == 0].any()


def results(model, inputs) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """States and what the pooler made of them; gradients of a loss that looks at the real tokens."""
    model.zero_grad()
    outputs = model(**inputs)
    states = outputs[0]
    mask = inputs["attention_mask"][..., None] if "attention_mask" in inputs else 1
    loss = (states * torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states) * mask).sum()
    found = [states.detach()]
    if outputs.get("pooler_output") is not None:
        loss = loss + (outputs.pooler_output * torch.linspace(-1, 1, outputs.pooler_output.shape[1])).sum()
        found.append(outputs.pooler_output.detach())
    loss.backward()
    return found, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours, theirs, inputs, bound: float) -> None:
    """Equal results, states compared at real tokens."""
    real = inputs["attention_mask"] != 0
    (states, *pooled), gradients = ours
    (their_states, *their_pooled), their_gradients = theirs
    assert_equal_numbers(states[real], their_states[real], bound)
    for one, other in zip(pooled, their_pooled, strict=True):
        assert_equal_numbers(one, other, bound)
    assert gradients.keys() == their_gradients.keys()
    for name, gradient in their_gradients.items():
        assert_equal_numbers(gradients[name], gradient, bound)


def layers_of(model) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


@pytest.fixture
def chunks(monkeypatch):
    """Every call is large enough for our backends."""
    monkeypatch.setattr(backend_chunked, "FEWEST_SCORES", 0)


# Numbers of float64 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", (*STOCK, *OWN))
def test_real_tokens_poolers_and_gradients_are_those_of_before(name, lengths):
    model, inputs = build(name), batch(lengths)
    before = results(model, inputs)
    handle = optimize(model)
    assert [each.layers for each in handle.encoders] == [2] and not handle.left
    after = results(model, inputs)
    assert is_unpadded(after[0][0], inputs) and not is_unpadded(before[0][0], inputs)
    assert_same(after, before, inputs, tolerance(name))


@pytest.mark.parametrize("name", FEW)
def test_chunks_of_queries(name, chunks):
    model, inputs = build(name), batch()
    before = results(model, inputs)
    optimize(model)
    after = results(model, inputs)
    assert is_unpadded(after[0][0], inputs)
    assert_same(after, before, inputs, tolerance(name))


def padded_elsewhere() -> dict[str, dict[str, torch.Tensor]]:
    """Batches that are not rows with padding on the right, and masks that say more."""
    right = real_tokens(LENGTHS["groups"])
    holes, empty = right.clone(), right.clone()
    holes[1, 3] = False
    empty[4] = False
    found = {name: batch(real) for name, real in (("left", right.flip(1)), ("hole", holes), ("empty row", empty))}
    found |= {"no padding": batch(torch.ones(3, 20) != 0), "one row": batch(real_tokens([20], 30))}
    found["hardly any padding"] = batch(real_tokens([30, 30, 29]))
    found["no mask"] = {"input_ids": batch()["input_ids"]}
    return found


ELSEWHERE = padded_elsewhere()


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("name", (*STOCK, *KEPT))
def test_other_batches_are_as_before_everywhere(name, long, request):
    if long:
        request.getfixturevalue("chunks")
    model = build(name)
    cases = ELSEWHERE | ({"right": batch()} if name in KEPT else {})
    with torch.no_grad():
        before = {case: model(**inputs)[0] for case, inputs in cases.items()}
        optimize(model)
        for case, inputs in cases.items():
            assert_equal_numbers(model(**inputs)[0], before[case], tolerance(name))


@pytest.mark.parametrize("name", OWN)
def test_own_models_in_other_batches(name):
    model = build(name)
    with torch.no_grad():
        before = {case: model(**inputs)[0] for case, inputs in ELSEWHERE.items()}
        optimize(model)
        for case, inputs in ELSEWHERE.items():
            after = model(**inputs)[0]
            real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])) != 0
            assert_equal_numbers(after[real], before[case][real], 1e-10)
            if case in ("left", "empty row"):
                assert_equal_numbers(after, before[case], 1e-10)


def additive(visible: torch.Tensor) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, torch.finfo(torch.float64).min)


@pytest.mark.parametrize("name", ["BERT", "DistilBERT", "MPNet", "RoFormer", "T5"])
def test_masks_by_pairs_are_as_before_everywhere(name, chunks):
    model, ids = build(name), batch()["input_ids"]
    right = real_tokens(LENGTHS["groups"])[:, None, None, :]
    causal = torch.ones(40, 40).tril().bool() & right
    pairs = (torch.rand(9, 1, 40, 40) < 0.7) | torch.eye(40).bool()
    masks = [additive(causal), additive(pairs), torch.randn(9, 1, 40, 40, dtype=torch.float64)]
    if name not in ("MPNet", "RoFormer"):  # these add what they get
        masks += [causal, pairs]
    with torch.no_grad():
        before = [model(input_ids=ids, attention_mask=mask)[0] for mask in masks]
        optimize(model)
        for mask, expected in zip(masks, before, strict=True):
            assert_equal_numbers(model(input_ids=ids, attention_mask=mask)[0], expected, tolerance(name))


@pytest.mark.parametrize("name", ["BERT", "DistilBERT", "T5"])
def test_a_causal_call_is_as_before(name, chunks):
    model = build(name)
    with torch.no_grad():
        for inputs in (batch(), {"input_ids": batch()["input_ids"]}):
            before = model(**inputs, is_causal=True)[0]
            with optimize(model):
                assert_equal_numbers(model(**inputs, is_causal=True)[0], before, tolerance(name))


def flat(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [each for part in value for each in flat(part)] if isinstance(value, list | tuple) else []


@pytest.mark.parametrize("said", ["argument", "config"])
@pytest.mark.parametrize("wanted", ["output_hidden_states", "output_attentions"])
@pytest.mark.parametrize("name", (*STOCK, *OWN))
def test_calls_for_states_and_weights_are_as_before_everywhere(name, wanted, said, chunks):
    asked = {wanted: True}
    model = build(name, **EAGER, **(asked if said == "config" else {}))
    for inputs in (batch(), {"input_ids": batch()["input_ids"]}):
        inputs |= asked if said == "argument" else {}
        with torch.no_grad():
            before = flat(model(**inputs).to_tuple())
            with optimize(model):
                after = flat(model(**inputs).to_tuple())
        assert len(before) > 2
        for ours, theirs in zip(after, before, strict=True):
            assert_equal_numbers(ours, theirs, tolerance(name))


@pytest.mark.parametrize("name", ["v3", "v1"])
def test_deberta_hears_its_caller_whatever_came_before(name):
    """The stock model asks its encoder for hidden states in every call."""
    model, inputs = build(name), batch()
    optimize(model)
    with torch.no_grad():
        model(**inputs, output_hidden_states=True)
        assert is_unpadded(model(**inputs)[0], inputs)
        assert is_unpadded(model(**inputs, return_dict=False)[0], inputs)
        positional = model(inputs["input_ids"], inputs["attention_mask"], None, None, None, None, True)
        assert len(positional.hidden_states) == 3 and not is_unpadded(positional[0], inputs)
        states = torch.randn(9, 40, 32, dtype=torch.float64)
        assert len(model.encoder(states, inputs["attention_mask"]).hidden_states) == 3


def hidden(values) -> list[torch.Tensor]:
    return [each for each in flat(values) if each.dim() == 3]


@pytest.mark.parametrize("kind", ["forward", "forward before", "backward", "backward before", "of all modules"])
@pytest.mark.parametrize("name", FEW)
def test_hooks_see_what_they_saw(name, kind, chunks):
    model, inputs, seen = build(name), batch(), []
    layer = layers_of(model)[1]

    def note(module, *values):
        if module is layer:
            seen.append(hidden(values))

    handle = {
        "forward": layer.register_forward_hook,
        "forward before": layer.register_forward_pre_hook,
        "backward": layer.register_full_backward_hook,
        "backward before": layer.register_full_backward_pre_hook,
        "of all modules": nn.modules.module.register_module_forward_hook,
    }[kind](note)
    try:
        results(model, inputs)
        optimize(model)
        results(model, inputs)
    finally:
        handle.remove()
    before, after = seen
    assert before
    for ours, theirs in zip(after, before, strict=True):
        assert_equal_numbers(ours, theirs, tolerance(name))
    assert is_unpadded(model(**inputs)[0], inputs) and len(seen) == 2
