"""ModernBERT, NomicBERT, GTE, EuroBERT, Jina v3, ESM-2, UMT5: unpadding of models with positions in attention alone.

Such a model runs unchanged on one row with the real tokens of all rows, (1, T), each with its own position. Only its
attention has to know where rows begin: those of about the same length are computed together, in ModernBERT's local
layers inside the window. ESM-2 looks at padding before its layers, so that there the encoder runs on one row.

The subclasses are made when they are asked for, by the name that a pickle has, too: the modules of Transformers that a
model does not come from are not imported.
"""

import functools
import inspect
import sys
from typing import Any, NamedTuple

import torch
from torch import nn

from ..attention.formula import Terms, toeplitz_table
from ..attention.sliding_window import SlidingWindowMask
from ..attention.unpadding import RowGroup, UnpaddedBatch
from ..host.live import records_of
from .attention import attend_as_stock, offsets_of, split_heads
from .unpadding import UnpaddingEncoder, subclass_of_stock, unpadded


# Inputs with an entry for each token, (B, L) or (B, L, D).
BY_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids")


# Rows of so many windows are computed by window without padding, too. See docs/results/benchmarks/cpu-encoder.md.
MANY_WINDOWS = 8


class Rows(NamedTuple):
    """What the attention has to know of a batch that is one row."""

    batch: UnpaddedBatch
    # for each of its groups the mask of a local layer; None where a row is no longer than the window
    windows: tuple[SlidingWindowMask | None, ...]


def _stock_of(module: nn.Module) -> Any:
    """The class of Transformers that the class of a module is made of."""
    return next(kind for kind in type(module).__mro__ if kind.__module__.startswith("transformers."))


@functools.cache
def _parameters(kind: Any) -> tuple[str, ...]:
    """The arguments of a forward, in their order."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


class _Model:
    """The model around the layers, to be put before a stock class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As stock; the states of padding are zeros."""
        model: Any = self
        records_of(model)
        stock: Any = super()
        given = dict(zip(_parameters(_stock_of(model)), args, strict=False)) | kwargs
        batch = _batch(model, given)
        if batch is None:
            return stock.forward(*args, **kwargs)
        tokens = given["input_ids"] if given.get("inputs_embeds") is None else given["inputs_embeds"]
        if given.get("position_ids") is None and "position_ids" in _parameters(_stock_of(model)):
            given["position_ids"] = torch.arange(batch.length, device=tokens.device)[None]
        for name in BY_TOKEN:
            if given.get(name) is not None:
                shape = (batch.batch, batch.length, *given[name].shape[2:])
                given[name] = batch.remove(given[name].expand(shape))
        as_tuple = given.pop("return_dict", None) is False or not model.config.return_dict
        rows = Rows(batch, _windows(model, batch))
        outputs = stock.forward(**{**given, "attention_mask": None, "return_dict": True}, unpadded=rows)
        outputs["last_hidden_state"] = batch.restore(outputs["last_hidden_state"])
        if outputs.get("pooler_output") is not None:
            outputs["pooler_output"] = model.pooler(outputs["last_hidden_state"])
        return outputs.to_tuple() if as_tuple else outputs


def _batch(model: Any, given: dict[str, Any]) -> UnpaddedBatch | None:
    """The batch of a call without its padding; None for a call that keeps it."""
    tokens, mask = given.get("inputs_embeds"), given.get("attention_mask")
    if tokens is None:
        tokens = given.get("input_ids")
    window = getattr(model.config, "sliding_window", None)
    whole = window is not None and isinstance(tokens, torch.Tensor) and tokens.shape[1] >= MANY_WINDOWS * window
    if not isinstance(tokens, torch.Tensor) or not ((mask is None and whole) or isinstance(mask, torch.Tensor)):
        return None
    if mask is not None and mask.dim() != 2:
        return None
    positions = given.get("position_ids")
    if positions is not None and (positions.dim() != 2 or positions.shape[0] not in (1, tokens.shape[0])):
        return None
    wanted = {name: getattr(model.config, name, False) for name in ("output_hidden_states", "output_attentions")}
    said = {name: value for name, value in given.items() if value is not None}
    return unpadded(model, tokens, mask, wanted | said, by_row=True, whole=whole)


def _windows(model: Any, batch: UnpaddedBatch) -> tuple[SlidingWindowMask | None, ...]:
    """As of `Rows`. ModernBERT's configuration has the largest distance between two tokens that see each other."""
    window = getattr(model.config, "sliding_window", None)

    def mask(group: RowGroup) -> SlidingWindowMask | None:
        if window is None or group.length <= window + 1:
            return None
        is_token = None if group.visible is None else group.visible[:, 0, 0]
        device = batch.indices.device
        return SlidingWindowMask(group.length, group.length, window, device, global_tokens=(), is_token=is_token)

    return tuple(map(mask, batch.groups))


class _Attention:
    """An attention module, to be put before a stock class."""

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, unpadded: Rows | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As stock; with `unpadded`, from the model, the hidden states are those of one row, (1, T, D)."""
        module: Any = self
        if unpadded is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        query, key, value = self.project(hidden_states)
        cosines, sines = kwargs["position_embeddings"]
        rotate = sys.modules[_stock_of(module).__module__].apply_rotary_pos_emb
        query, key = rotate(query, key, cosines, sines, unsqueeze_dim=2)
        is_local = getattr(module, "sliding_window", None) is not None
        windows = iter(unpadded.windows)

        def attend(group: RowGroup, *rows: torch.Tensor) -> torch.Tensor:
            window = next(windows)
            mask = window if is_local and window is not None else group.visible
            query, key, value = (each.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for each in rows)
            repeats = query.shape[1] // key.shape[1]  # of keys and values that several queries share
            if repeats > 1:
                key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
            terms = Terms(scale=module.head_dim**-0.5)
            return attend_as_stock(module, query, key, value, terms, mask, module.attention_dropout)[0]

        out = unpadded.batch.by_group(attend, *(each.flatten(2) for each in (query, key, value)))
        return self.project_back(out), None

    def project(self, states: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values, (1, T, H, d) each."""
        module: Any = self
        layers = (module.q_proj, module.k_proj, module.v_proj)
        return [layer(states).unflatten(-1, (-1, module.head_dim)) for layer in layers]

    def project_back(self, out: torch.Tensor) -> torch.Tensor:
        """The output of the module, (1, T, D)."""
        module: Any = self
        projected: torch.Tensor = module.o_proj(out)
        return projected


class _ModernBertAttention(_Attention):
    """The same with ModernBERT's one projection, and dropout after it."""

    def project(self, states: torch.Tensor) -> list[torch.Tensor]:
        module: Any = self
        return list(module.Wqkv(states).unflatten(-1, (3, -1, module.head_dim)).unbind(2))

    def project_back(self, out: torch.Tensor) -> torch.Tensor:
        module: Any = self
        projected: torch.Tensor = module.out_drop(module.Wo(out))
        return projected


class _EsmSelfAttention:
    """ESM's, which scales queries before they are rotated; its encoder hands it the batch in place of a mask."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As stock."""
        module: Any = self
        if not isinstance(attention_mask, UnpaddedBatch):
            return super().forward(hidden_states, attention_mask, *args, **kwargs)  # type: ignore[misc]
        rotate = sys.modules[_stock_of(module).__module__].apply_rotary_pos_emb
        is_rotary = module.position_embedding_type == "rotary"

        def attend(group: RowGroup, *rows: torch.Tensor) -> torch.Tensor:
            query, key, value = (split_heads(each, module.num_attention_heads) for each in rows)
            query = query * module.attention_head_size**-0.5
            if is_rotary:
                cosines, sines = (each[:, : group.length] for each in kwargs["position_embeddings"])
                query, key = rotate(query, key, cosines, sines, unsqueeze_dim=1)
            terms = Terms(scale=module.scaling)
            return attend_as_stock(module, query, key, value, terms, group.visible, module.dropout)[0]

        vectors = (layer(hidden_states) for layer in (module.query, module.key, module.value))
        return attention_mask.by_group(attend, *vectors), None


class _UMT5Attention:
    """UMT5's: each layer has a bias by offset of its own."""

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, unpadded: Rows | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As stock; with `unpadded`, from the stack, the hidden states are those of one row, (1, T, D)."""
        module: Any = self
        if unpadded is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        longest = offsets_of(hidden_states, unpadded.batch.groups[0].length)
        bucket = module._relative_position_bucket(longest.offsets(hidden_states.device))
        bias = toeplitz_table(module.relative_attention_bias(bucket).transpose(0, 1), longest)

        def attend(group: RowGroup, *rows: torch.Tensor) -> torch.Tensor:
            query, key, value = (split_heads(each, module.n_heads) for each in rows)
            terms = Terms(scale=1.0, bias=(bias,))
            return attend_as_stock(module, query, key, value, terms, group.visible, module.dropout)[0]

        out = unpadded.batch.by_group(attend, *(layer(hidden_states) for layer in (module.q, module.k, module.v)))
        return module.o(out), None


# ESM's model looks at padding; its encoder is called as BERT's.
_EsmEncoder = UnpaddingEncoder


def __getattr__(name: str) -> type[nn.Module]:
    return subclass_of_stock(globals(), name, _Model, _Attention)
