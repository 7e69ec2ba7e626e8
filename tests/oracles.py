"""Attention as a slow loop over pairs in float64, and the tiny models the tests run.

The loops are NumPy and share no code with the package. A test writes the equation of a paper as two plain functions of
(b, h, i, j), batch, head, query position and key position, and `attention_by_loop` does the rest. Letters are those of
the package: B batch, H heads, L queries, K keys, d head size.
"""

import contextlib
import io
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch.export import Dim
from transformers import initialization as init

from hf_relpos import RelPosBertConfig
from hf_relpos.attention.context import AttentionContext, LayerInputs, TokenInputs
from hf_relpos.attention.unpadding import Batch, RowGroup
from hf_relpos.models.layers import RelPosBertSelfAttention
from hf_relpos.schemes import SCHEMES
from hf_relpos.schemes.registry import build_shared
from hf_relpos.schemes.scheme import Scheme, SharedScheme


def attention_by_loop(
    score: Callable, value: Callable, batch: int, heads: int, length: int, keys: int, start: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """out_i = Σ_j softmax_j(score(b, h, i, j)) · value(b, h, i, j), one pair at a time.

    Args:
        score: a number; −inf where the key is hidden.
        value: a vector of any length.
        start: position of the first query: i runs from `start` to `start` + `length` − 1, j from 0 to `keys` − 1.

    Returns:
        out (B, H, L, d) and the weights (B, H, L, K). A row with every key hidden is left at NaN.
    """
    out = weights = None
    for b in range(batch):
        for h in range(heads):
            for row in range(length):
                i = start + row
                scores = [float(score(b, h, i, j)) for j in range(keys)]
                highest = max(scores)
                powers = [math.exp(s - highest) if highest > -math.inf else math.nan for s in scores]
                total = sum(powers)
                vector = 0.0
                for j in range(keys):
                    vector = vector + powers[j] / total * np.asarray(value(b, h, i, j), dtype=np.float64)
                if out is None:
                    out = np.empty((batch, heads, length, len(vector)))
                    weights = np.empty((batch, heads, length, keys))
                out[b, h, row] = vector
                weights[b, h, row] = np.array(powers) / total
    return out, weights


def nothing(h: int, i: int, j: int) -> float:
    """No vector, or no number, for any pair."""
    return 0.0


def with_vectors(
    A: Callable, V: Callable = nothing, B: Callable = nothing, c: Callable = nothing
) -> tuple[Callable, Callable]:
    """Score [q·(k + A) + k·B + c] / √d and value v + V; A, B, V to a vector and c to a number for each (h, i, j)."""

    def score(q, k, h, i, j):
        return (q @ (k + A(h, i, j)) + (k * B(h, i, j)).sum() + c(h, i, j)) / math.sqrt(len(q))

    def value(v, h, i, j):
        return v + V(h, i, j)

    return score, value


def formula_by_loop(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    scale: float,
    A: Callable | None = None,
    B: Callable | None = None,
    u: np.ndarray | None = None,
    c: Callable | None = None,
    c_outer: Callable | None = None,
    V: Callable | None = None,
    rotate: Callable | None = None,
    mask: Callable | None = None,
    start: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """The general formula, from plain functions.

        inner_ij = q_i·k_j + q_i·A(h, r) + k_j·B(h, r) + u_h·k_j + c(h, r)
        score_ij = scale · inner_ij + c_outer(h, r) + mask(b, h, i, j)
        out_i = Σ_j softmax_j(score)_ij · (v_j + V(h, r)),    r = j − i

    Args:
        query: (B, H, L, d), float64.
        key: (B, H, K, d).
        value: (B, H, K, d).
        u: (H, d).
        rotate: (vector, position) to vector; applied to every q and k.
        start: position of the first query.

    Returns:
        out (B, H, L, d) and the weights (B, H, L, K).
    """
    batch, heads, length, _ = query.shape
    keys = key.shape[2]

    def turned(vector, position):
        return vector if rotate is None else rotate(vector, position)

    def score(b, h, i, j):
        q, k, r = turned(query[b, h, i - start], i), turned(key[b, h, j], j), j - i
        inner = q @ k
        if A is not None:
            inner += q @ A(h, r)
        if B is not None:
            inner += k @ B(h, r)
        if u is not None:
            inner += u[h] @ k
        if c is not None:
            inner += c(h, r)
        total = scale * inner
        if c_outer is not None:
            total += c_outer(h, r)
        if mask is not None:
            total += mask(b, h, i, j)
        return total

    def weighed(b, h, i, j):
        return value[b, h, j] if V is None else value[b, h, j] + V(h, j - i)

    return attention_by_loop(score, weighed, batch, heads, length, keys, start)


def sine_cosine(position: float, width: int) -> np.ndarray:
    """[sin pω₀ … sin pω_{n−1} | cos pω₀ … cos pω_{n−1}], ω_m = 10000^(−2m/width), n = width/2."""
    angles = [position / 10000 ** (2 * m / width) for m in range(width // 2)]
    return np.array([math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles])


def golden(name: str, folder: str = "schemes") -> tuple[dict, dict[str, torch.Tensor]]:
    """Configuration and tensors of fixtures/<folder>/<name>.safetensors (scripts/maintenance/golden/<name>.py)."""
    with safe_open(Path(__file__).parent / "fixtures" / folder / f"{name}.safetensors", "pt") as file:
        return json.loads(file.metadata()["config"]), {key: file.get_tensor(key) for key in file.keys()}


def array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as a float64 array."""
    return tensor.detach().double().numpy()


def tiny_sizes(**changed) -> dict:
    """Fields of a tiny BERT's configuration: D = 24, H = 3, two layers, 50 words, P = 16."""
    usual = {"vocab_size": 50, "hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2}
    return {**usual, "intermediate_size": 32, "max_position_embeddings": 16, **changed}


def tiny_config(name: str, **overrides) -> RelPosBertConfig:
    """Tiny sizes, no dropout, weights large enough to matter."""
    fields = tiny_sizes(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2)
    return RelPosBertConfig(**{**fields, "position_embedding_type": name, **overrides})


@torch.no_grad()
def stir(module: torch.nn.Module, amount: float = 0.1) -> torch.nn.Module:
    """Add noise to every parameter, so that none is left at the zeros or ones it began with."""
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter) * amount)
    return module


def tiny_model(head: type, name: str, attn_implementation: str | None = None, **overrides):
    """A head on a tiny BERT of that scheme, in eval mode, every parameter random."""
    config = tiny_config(name, **overrides)
    if attn_implementation is not None:
        config._attn_implementation = attn_implementation
    return stir(head(config)).eval()


# options of schemes that draw random positions in training, with which they do not
STILL = {"cape": {"max_global_shift": 0.0, "max_local_shift": 0.0, "max_global_scaling": 1.0}}
# schemes that need nothing but tokens
ON_TOKENS = [name for name, scheme in SCHEMES.items() if not scheme.required_inputs]


def extra_inputs(name: str | list[str], batch: int, length: int) -> dict[str, torch.Tensor]:
    """What `forward` must be given for this scheme beside the tokens.

    Labels of edges depend on offsets alone, so that cutting, moving and packing texts leaves them right.
    """
    required, index, inputs = tiny_config(name).required_inputs, torch.arange(length), {}
    if "relation_ids" in required:
        labels = (index[None, :] - index[:, None]) % 3 % 2  # an edge where j − i = 1, 4, −2, …
        inputs["relation_ids"] = labels.expand(batch, -1, -1)
    if "grid" in required:
        inputs["position_ids"] = torch.stack([index // 4, index % 4], dim=-1).expand(batch, -1, -1)
    return inputs


def grid_ids(height: int, width: int, outside: int = 0) -> torch.Tensor:
    """Row and column of every token of an image, row by row, after `outside` tokens that have none: (1, L, 2)."""
    inside = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    return torch.cat([torch.full((outside, 2), -1), inside])[None]


def on_grid(grid: torch.Tensor) -> AttentionContext:
    """For a single attention layer, of tokens with these rows and columns (B, L, 2)."""
    return AttentionContext(grid.shape[1], grid.shape[1], tokens=TokenInputs(grid=grid))


def extra_context(name: str | list[str], batch: int, length: int) -> AttentionContext:
    """The same, for a single attention layer."""
    inputs = extra_inputs(name, batch, length)
    tokens = TokenInputs(grid=inputs.get("position_ids"), relation_ids=inputs.get("relation_ids"))
    return AttentionContext(length, length, tokens=tokens)


class LayerWithShared(RelPosBertSelfAttention):
    """A self-attention layer with `shared_distance_embedding`, which the encoder would hold for all of its layers."""

    def __init__(self, config: RelPosBertConfig, is_causal: bool = False, layer_idx: int | None = None):
        super().__init__(config, is_causal=is_causal, layer_idx=layer_idx)
        self.shared_distance_embedding = build_shared(config)

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, context=None, **kwargs):
        if context is None and self.shared_distance_embedding is None:
            return super().forward(hidden_states, attention_mask, past_key_values, **kwargs)
        if context is None:
            context = AttentionContext(hidden_states.shape[1], hidden_states.shape[1])
        if self.shared_distance_embedding is not None:
            context = replace(context, layer=LayerInputs(shared=self.shared_distance_embedding(context)))
        batch = Batch(*hidden_states.shape[:2], (RowGroup(context, attention_mask),))
        return super().forward(hidden_states, None, past_key_values, batch, **kwargs)


@torch.no_grad()
def tiny_attention(name: str, dtype: torch.dtype = torch.float64, **overrides) -> RelPosBertSelfAttention:
    """One self-attention layer of that scheme on the eager backend, in eval mode, every parameter random."""
    config = tiny_config(name, **overrides)
    config._attn_implementation = "eager"
    layer = LayerWithShared(config, is_causal=config.is_decoder, layer_idx=0)
    for module in reversed([*layer.modules()]):  # parts first, as in Transformers
        if isinstance(module, Scheme | SharedScheme):
            module.init_weights(config.initializer_range)
        elif isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            init.normal_(module.weight, std=config.initializer_range)
    return stir(layer).to(dtype).eval()


@torch.no_grad()
def load_projections(layer: RelPosBertSelfAttention, weights, biases=None) -> None:
    """Give `query`, `key` and `value`, in this order, these weights, and these biases or zeros."""
    for number, linear in enumerate((layer.query, layer.key, layer.value)):
        linear.weight.copy_(weights[number])
        linear.bias.copy_(torch.zeros_like(linear.bias) if biases is None else biases[number])


def projections(layer: RelPosBertSelfAttention, hidden: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v of every head, each (B, H, L, d), worked out in NumPy from the weights of the layer."""
    batch, length, width = hidden.shape
    heads = layer.num_attention_heads
    split = []
    for linear in (layer.query, layer.key, layer.value):
        rows = array(hidden) @ array(linear.weight).T + array(linear.bias)
        split.append(rows.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3))
    return tuple(split)


def padding(lengths: list[int], total: int) -> torch.Tensor:
    """True where a token is real: (B, L), padded on the right."""
    return torch.arange(total)[None] < torch.tensor(lengths)[:, None]


REAL = padding([9, 5], 9)  # of the fixture `hidden` in tests/schemes


def paper_attention(layer, hidden, real, score, value=None) -> tuple[np.ndarray, np.ndarray]:
    """A paper's layer by loop.

    Args:
        hidden: (B, L, D).
        real: (B, L), False where a key is padding.
        score: (q, k, h, i, j) to the score of one pair, q and k being the vectors of head h at i and j.
        value: (v, h, i, j) to what is averaged, v being the vector of head h at j; v itself if not given.

    Returns:
        out (B, L, D), heads side by side, and the weights (B, H, L, L).
    """
    q, k, v = projections(layer, hidden)
    batch, heads, length, _ = q.shape

    def pair(b, h, i, j):
        return score(q[b, h, i], k[b, h, j], h, i, j) if real[b, j] else -math.inf

    def weighed(b, h, i, j):
        return v[b, h, j] if value is None else value(v[b, h, j], h, i, j)

    out, weights = attention_by_loop(pair, weighed, batch, heads, length, length)
    return out.transpose(0, 2, 1, 3).reshape(batch, length, -1), weights


@torch.no_grad()
def layer_error(layer, hidden, real, score, value=None, context=None) -> float:
    """Largest difference between the layer and the paper, over outputs and weights; of a query without keys, zeros."""
    found = layer(hidden, attention_mask=real[:, None, None, :], context=context)
    expected = map(np.nan_to_num, paper_attention(layer, hidden, real, score, value))
    return max(np.abs(array(one) - other).max() for one, other in zip(found, expected, strict=True))


def onnx_program(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.onnx.ONNXProgram:
    """The graph of a model for inputs in the order of its forward; their first dimension and last may be any."""
    dims = {0: Dim("batch"), inputs["input_ids"].dim() - 1: Dim("length")}
    how = {"input_names": list(inputs), "dynamic_shapes": [dims] * len(inputs)}
    with contextlib.redirect_stdout(io.StringIO()):
        return torch.onnx.export(model, tuple(inputs.values()), dynamo=True, verbose=False, **how)


def onnx_runner(program: torch.onnx.ONNXProgram) -> Callable[..., torch.Tensor]:
    """Runs a graph by onnxruntime: inputs by name to the first output."""
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.intra_op_num_threads = 1
    session = InferenceSession(program.model_proto.SerializeToString(), options)

    def run(**inputs: torch.Tensor) -> torch.Tensor:
        feed = {each.name: inputs[each.name].numpy() for each in session.get_inputs()}
        return torch.from_numpy(session.run(None, feed)[0])

    return run


@contextlib.contextmanager
def uncompiled():
    """flex_attention always compiles, which takes half a minute; run its Python instead."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*flex_attention called without torch.compile")
        yield
