"""Stock classes of relative encoders as oracles. They round some constants to float32, whatever their dtype."""

import contextlib
import json
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers.models.deberta import modeling_deberta
from transformers.models.deberta_v2 import modeling_deberta_v2

from hf_relpos.families.recognition import recognise


def older_than(release: str) -> bool:
    """Whether the installed Transformers is older than, say, "5.14"."""
    one, other = (tuple(map(int, each.split(".")[:2])) for each in (transformers.__version__, release))
    return one < other


def _scale(query_layer, scale_factor):
    return torch.sqrt(torch.tensor(query_layer.size(-1) * scale_factor, dtype=torch.float64))


def _normalised(self, hidden_states):
    size = hidden_states.shape[-1:]
    return nn.functional.layer_norm(hidden_states, size, self.weight, self.bias, self.variance_epsilon)


def _sinusoids(positions, width):
    angles = positions.double()[:, None] * 10000 ** (-torch.arange(0, width, 2).double() / width)
    return torch.cat([angles.sin(), angles.cos()], 1)


@contextlib.contextmanager
def in_float64(model):
    """A stock model that computes everything in float64, as long as the context lasts.

    DeBERTa rounds the scale of the scores, and in v1 what it normalises; RoFormer and XLNet their sinusoids.
    """
    base = model.base_model
    kind = model.config.model_type
    with contextlib.ExitStack() as stack:
        set_in = lambda owner, name, value: stack.enter_context(_replaced(owner, name, value))  # noqa: E731
        if kind == "deberta":
            set_in(modeling_deberta, "scaled_size_sqrt", _scale)
            set_in(modeling_deberta.DebertaLayerNorm, "forward", _normalised)
        elif kind == "deberta-v2":
            set_in(modeling_deberta_v2, "scaled_size_sqrt", _scale)
        model.double()
        if kind == "roformer":
            table = base.encoder.embed_positions.weight
            exact = _sinusoids(torch.arange(len(table)), table.shape[1])
            assert (table - exact).abs().max() < 1e-7
            table.data = exact
        elif kind == "xlnet":
            stock_table = base.relative_positional_encoding

            def exact_table(qlen, klen, bsz=None, **options):
                distances = torch.arange(klen, -qlen, -1).double()
                if base.clamp_len > 0:
                    distances = distances.clamp(-base.clamp_len, base.clamp_len)
                table = _sinusoids(distances, base.d_model)[:, None].expand(-1, bsz or 1, -1)
                assert (table - stock_table(qlen, klen, bsz=bsz, **options)).abs().max() < 1e-6
                return table

            set_in(base, "relative_positional_encoding", exact_table)
        yield model


@contextlib.contextmanager
def _replaced(owner, name, value):
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def random_model(kind, name, folder=None, spread=0.2, **fields):
    """A stock model, every parameter of which is random, saved if there is a folder.

    Args:
        kind: its `model_type`.
        name: of the class.
        folder: where to.
        spread: of what is added to each parameter.
        fields: of its configuration.
    """
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **fields)
    config._attn_implementation = "eager"
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "embed_positions" not in key:
                parameter.add_(torch.randn_like(parameter), alpha=spread)
    if folder is not None:
        model.save_pretrained(folder)
    return model


# Outputs that are compared, and the bias of a projection that stock XLNet does not have.
OUTPUTS = ("last_hidden_state", "logits", "start_logits", "end_logits")
ADDED = ".attention.output.dense.bias"


def outputs_of(model, inputs, real):
    """All that tells, at real tokens, as one vector."""
    outputs = model(**inputs)
    values = [outputs[key] for key in OUTPUTS if outputs.get(key) is not None]
    return torch.cat([(each[real] if each.shape[: real.dim()] == real.shape else each).flatten() for each in values])


def errors(stock, ours, inputs, real, least=0.0):
    """Largest difference of the outputs and of the gradients of stock parameters, relative to the largest.

    Args:
        real: which tokens are compared.
        least: what the largest output counts as, if it is smaller.
    """
    found = []
    for model in (stock, ours):
        model.zero_grad()
        values = outputs_of(model, inputs, real)
        (values * torch.linspace(-1, 1, len(values), dtype=values.dtype)).sum().backward()
        found.append(values.detach())
    spec = recognise(Path(), json.loads(stock.config.to_json_string(use_diff=False)))
    expected, own = (
        {key: torch.zeros_like(each) if each.grad is None else each.grad for key, each in tensors.items()}
        for tensors in (stock.state_dict(keep_vars=True), ours.state_dict(keep_vars=True))
    )
    learned = {key: each for key, each in expected.items() if "embed_positions" not in key}  # fixed sinusoids
    unpacked = {key: each for key, each in spec.unpack(learned).items() if not (spec.name == "xlnet" and ADDED in key)}
    gradients = {key: own[spec.rename(key, base=ours.base_model is ours)[0]] for key in unpacked}
    largest = max(float(each.abs().max()) for each in unpacked.values())
    worst = max(float((gradients[key] - each).abs().max()) for key, each in unpacked.items())
    return float((found[1] - found[0]).abs().max() / found[0].abs().max().clamp_min(least)), worst / largest
