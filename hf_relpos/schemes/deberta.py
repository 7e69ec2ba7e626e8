"""DeBERTa's disentangled attention (He et al., arXiv 2006.03654, §3.1; v2 and v3: arXiv 2111.09543)."""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..attention.context import AttentionContext
from ..attention.formula import Clipped, Table, Terms
from ..host.tracing import is_traced
from .projection_cache import project
from .scheme import Option, Scheme, SharedScheme, choice, integer


KINDS = ("c2p", "p2c")
Projection = Callable[[torch.Tensor], torch.Tensor]


def kinds_of(value: Any) -> tuple[str, ...]:
    """Return the terms that `pos_att_type` names as a list or a string with bars; an empty tuple if it is invalid."""
    names = value.split("|") if isinstance(value, str) else value if isinstance(value, list | tuple) else ()
    return tuple(names) if all(name in KINDS for name in names) and len(set(names)) == len(names) else ()


def in_float32(number: float) -> float:
    return float(struct.unpack("f", struct.pack("f", number))[0])


def log_bucket(distance: torch.Tensor, buckets: int, max_distance: int) -> torch.Tensor:
    """Return buckets of signed distances: exact up to buckets/2, logarithmic beyond.

    Args:
        distance: integers, any shape.
        max_distance: distance max_distance − 1 gets the last number, buckets − 1.

    Returns:
        Numbers with the sign and shape of `distance`. They continue to grow past `max_distance`.
    """
    middle = buckets // 2
    size = distance.abs()
    # float32 as in Transformers, since rounding decides the bucket of some distances
    last = in_float32(math.log(in_float32((max_distance - 1) / middle)))
    far = (torch.log(size.clamp(min=middle).float() / middle) / last * (middle - 1)).ceil().to(distance.dtype)
    # the last distance falls on a whole number, which another device's rounding must not push to the next one
    far = middle + torch.where(size < max_distance, far.clamp(max=max(middle - 1, 0)), far)
    return torch.where(size <= middle, distance, far * distance.sign())


@dataclass(frozen=True)
class RowsOfP(Clipped):
    """`Clipped` of the offsets, or of their `log_bucket`. Row δ of P is that of offset span − δ."""

    buckets: int | None = None
    max_distance: int = 0

    def __call__(self, relation: torch.Tensor) -> torch.Tensor:
        return Clipped.__call__(
            self, log_bucket(relation, self.buckets, self.max_distance) if self.buckets else relation
        )

    def ends(self, low: int, high: int) -> tuple[int, int]:
        far = self.max_distance + self.max_distance // 1000  # rounding may give those before another bucket
        return (Clipped(-far, far) if self.buckets else Clipped(self.low, self.high)).ends(low, high)


class Deberta(Scheme, name="deberta"):
    """score = s · [q_i·k_j + q_i·K_δ + k_j·Q_δ], δ = clip(i − j + span, 0, 2·span − 1), s = 1/√(d·(1 + terms)).

    "c2p" is the term with K = W_K P, "p2c" the one with Q = W_Q P. P holds 2·span relative embeddings, shared by all
    layers (`RelativeEmbeddings`). δ is δ(i, j) in both terms, as released; the paper writes δ(j, i) in the third term.
    The table is lopsided: i − j = −span has its own row, while span shares the row of span − 1.

    DeBERTa v1: span is `max_distance`. v1 also cuts the table for short inputs, which only removes unused rows.
    v2 and v3: `buckets`=256, `share_att_key`=True, `norm_rel_ebd`="layer_norm". span is `buckets`, and i − j goes
    through `log_bucket` first.

    Parameters: pos_key_proj.weight (D, D), pos_query_proj.{weight, bias} (D, D) and (D,), per layer. With
    `share_att_key` there are none: W_K and W_Q of the layer itself project P. A bias of pos_key_proj adds the same
    number to all scores of a query, so it has no effect. `pos_key_bias` adds it anyway, for v2's checkpoints.

    On longer inputs, by its source: distances are clipped, so longer inputs run.
    """

    summary = "Content to position and back, in a window of distances"
    source = "He et al. 2021, arXiv 2006.03654, eq. 4 as released in microsoft/DeBERTa; v3: arXiv 2111.09543"
    out_of_range = ("clip",)
    zero_init_is_identity = False  # because of the scale
    options = {
        "pos_att_type": Option(
            default="c2p|p2c",
            help="which terms there are, 'c2p', 'p2c' or both: a string with a bar, or a list; [] for none",
            accepts=lambda value: len(kinds_of(value)) > 0 or value == [],
        ),
        "max_distance": integer(None, "largest distance with an embedding of its own", none="max_position_embeddings"),
        "buckets": integer(
            None,
            "half the number of logarithmic buckets (256 in v2 and v3)",
            none="one row for each distance (v1)",
            least=2,
        ),
        "share_att_key": choice(False, True, help="project P with the layer's own W_K and W_Q"),
        "norm_rel_ebd": choice("none", "layer_norm", help="normalise P first"),
        "pos_key_bias": choice(
            False, True, help="give pos_key_proj a bias, as v2 has, though it moves all scores of a query alike"
        ),
        "relative_attention": choice(
            True, False, help="whether there are P and its terms; without them, the scale alone counts pos_att_type"
        ),
    }

    def build(self, config: Any) -> None:
        self.kinds = kinds_of(self.settings["pos_att_type"]) if self.settings["relative_attention"] else ()
        size = config.hidden_size
        own = not self.settings["share_att_key"]
        bias = self.settings["pos_key_bias"]
        self.pos_key_proj = nn.Linear(size, size, bias=bias) if own and "c2p" in self.kinds else None
        self.pos_query_proj = nn.Linear(size, size) if own and "p2c" in self.kinds else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    @classmethod
    def complete(cls, settings: dict[str, Any], config: Any) -> None:
        if settings["max_distance"] is None:
            settings["max_distance"] = config.max_position_embeddings
        buckets, max_distance = settings["buckets"], settings["max_distance"]
        if buckets is not None and max_distance - 1 <= buckets // 2:
            raise ValueError(
                f"position_options['buckets'] = {buckets} gives each distance up to {buckets // 2} a row of its own, "
                f"which leaves nothing for the logarithmic scale up to max_distance = {max_distance}; choose fewer "
                "buckets, or None"
            )

    @classmethod
    def scale_of(cls, settings: Mapping[str, Any], config: Any) -> float | None:
        head_size = config.hidden_size // config.num_attention_heads
        return (head_size * (1 + len(kinds_of(settings["pos_att_type"])))) ** -0.5

    @classmethod
    def shared_module(cls, config: Any, settings: Mapping[str, Any]) -> SharedScheme | None:
        if not settings["relative_attention"] and settings["norm_rel_ebd"] == "none":
            return None
        return RelativeEmbeddings(config, settings)

    def forward(self, context: AttentionContext) -> Terms:
        if not self.settings["relative_attention"]:
            return Terms(scale=self.scale)
        embeddings, row_of = context.layer.shared
        key_projection = self.pos_key_proj or context.layer.key_projection if "c2p" in self.kinds else None
        query_projection = self.pos_query_proj or context.layer.query_projection if "p2c" in self.kinds else None
        if len(self.kinds) > (key_projection is not None) + (query_projection is not None):
            raise ValueError("share_att_key = True: the context needs the query and key projections of the layer")
        rows, heads = self.dropout(embeddings), self.num_heads
        tables = disentangled_terms(rows, row_of, heads, key_projection, query_projection)
        return replace(tables, scale=self.scale)


def disentangled_terms(
    embeddings: torch.Tensor,
    row_of: Clipped,
    num_heads: int,
    key_projection: Projection | None,
    query_projection: Projection | None,
) -> Terms:
    """Compute the tables A = W_K P ("c2p") and B = W_Q P ("p2c") of one layer, without the scale.

    Args:
        embeddings: the rows of P that this call uses, (N, D).
        row_of: the map from offsets to these rows.
        num_heads: H.
        key_projection: W_K, D to H·d; None for a layer without "c2p".
        query_projection: W_Q, D to H·d; None for a layer without "p2c".
    """

    def table(projection: Any) -> tuple[Table, ...]:  # torch.compile cannot trace an alias of Callable | None
        if projection is None:
            return ()
        rows = project(projection, embeddings).unflatten(-1, (num_heads, -1)).transpose(0, 1)  # (H, N, d)
        return (Table(rows, row_of),)

    return Terms(query_table=table(key_projection), key_table=table(query_projection))


def rows_in_use(context: AttentionContext, span: int, one_to_one: int, dropout: nn.Dropout) -> tuple[int, int]:
    """Return the first and last of the 2·span rows that offsets of this call can use.

    A graph uses all rows, since it must work for any length. Without gradients and dropout, the largest distance is
    rounded up to a power of two. Inputs of similar lengths then use the same rows, whose projections are cached
    (`projection_cache`).

    Args:
        one_to_one: distances up to this one have a row each; logarithmic buckets begin after it.
        dropout: of the rows. What it draws must not depend on whether there are gradients: a pass without them is
            repeated with them from the same random state, by activation checkpointing and gradient caching.
    """

    def within(distance: int) -> int:
        if is_traced() or distance > one_to_one:
            return span
        if dropout.training or torch.is_grad_enabled() or distance == 0:
            return distance
        return min(1 << (distance - 1).bit_length(), span)

    return span - within(context.high), min(span + within(-context.low), 2 * span - 1)


class RelativeEmbeddings(SharedScheme):
    """P, and the map from offsets to its rows.

    Parameters: rel_embeddings.weight (2·span, D), unless `relative_attention` is False; LayerNorm, if `norm_rel_ebd`
    asks for it, even without rel_embeddings.
    """

    def __init__(self, config: Any, settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        self.buckets, self.max_distance = settings["buckets"], settings["max_distance"]
        self.span = self.max_distance if self.buckets is None else self.buckets
        relative = settings["relative_attention"]
        self.rel_embeddings = nn.Embedding(2 * self.span, config.hidden_size) if relative else None
        normed = settings["norm_rel_ebd"] == "layer_norm"
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if normed else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)  # not called, but in training with those of the layers

    def forward(self, context: AttentionContext) -> tuple[Any, ...]:
        """Return the rows that this call uses, (N, D), and the map from offsets to them."""
        if self.rel_embeddings is None:
            return ()
        one_to_one = self.span if self.buckets is None else self.buckets // 2
        first, last = rows_in_use(context, self.span, one_to_one, self.dropout)
        if torch.compiler.is_exporting() and type(self.rel_embeddings) is nn.Embedding:
            rows = self.rel_embeddings.weight  # all rows; without a look-up, runtimes fold constants
        else:
            rows = self.rel_embeddings(torch.arange(first, last + 1, device=context.device))
        rows = rows if self.LayerNorm is None else self.LayerNorm(rows)
        return rows, RowsOfP(self.span - last, self.span - first, False, True, self.buckets, self.max_distance)
