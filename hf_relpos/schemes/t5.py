"""T5's bucketed bias (Raffel et al., arXiv 1910.10683, §2.1), one table for all layers; MPNet has it too."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..attention.context import AttentionContext
from ..attention.formula import Terms, toeplitz_table
from .encodings import t5_bucket
from .scheme import Scheme, SharedScheme, choice, integer


class BucketedBias(SharedScheme):
    """The bias of every offset of the call.

    Parameters: relative_attention_bias.weight (buckets, H), as in the T5 and MPNet checkpoints.
    """

    def __init__(self, config: Any, settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        self.bidirectional = not config.is_decoder
        self.relative_attention_bias = nn.Embedding(settings["buckets"], self.num_heads)

    def forward(self, context: AttentionContext) -> torch.Tensor:
        """Return the bias, (H, N), in the order of `context.offsets`."""
        r = context.offsets(context.device)
        bucket = t5_bucket(r, self.settings["buckets"], self.settings["max_distance"], self.bidirectional)
        return self.relative_attention_bias(bucket).transpose(0, 1)


class T5(Scheme, name="t5"):
    """score = s · q_i·k_j + b^h_{bucket(r)}: the scale does not apply to the bias.

    By default s is BERT's 1/√d, as in MPNet and TUPE, the BERT-like models with this bias. With b = 0 the layer is
    then a plain one, so pretrained BERT weights stay valid. T5 itself has s = 1 and compensates in the initialisation
    of its queries. Use scaling="t5" for weights from a T5.

    Buckets distinguish left and right, so half of them serve each side; in a decoder, all serve the left. The table is
    `encoder.distance_embedding.relative_attention_bias.weight`, shared by all layers.

    On longer inputs, by its source: nothing; Press et al. find that perplexity stays low slightly beyond the trained
    length.
    """

    summary = "A score per head and bucket of distances"
    source = "Raffel et al. 2019, arXiv 1910.10683, §2.1; MPNet: Song et al. 2020, arXiv 2004.09297"
    out_of_range = ("clip",)
    shared_class = BucketedBias
    options = {
        "buckets": integer(32, "size of the table, a multiple of 4 (of 2 in a decoder)"),
        "max_distance": integer(
            128,
            "all distances from it on share the last bucket; larger than the distances that have one of their "
            "own, buckets/4 (buckets/2 in a decoder)",
        ),
        "scaling": choice("bert", "t5", help="s: 1/√d (bert, MPNet) or 1 (t5)"),
    }

    @classmethod
    def complete(cls, settings: dict[str, Any], config: Any) -> None:
        sides = 1 if config.is_decoder else 2
        if settings["buckets"] % (2 * sides):
            raise ValueError(
                f"position_options['buckets'] = {settings['buckets']} is not a multiple of {2 * sides}; half of the "
                f"buckets {'' if sides == 1 else 'of each side '}are for single distances, half for ranges"
            )
        exact = settings["buckets"] // (2 * sides)
        if settings["max_distance"] <= exact:
            raise ValueError(
                f"position_options['max_distance'] = {settings['max_distance']} leaves nothing for the ranges: with "
                f"{settings['buckets']} buckets the distances below {exact} have one each; choose a larger one"
            )

    @classmethod
    def scale_of(cls, settings: Mapping[str, Any], config: Any) -> float | None:
        return 1.0 if settings["scaling"] == "t5" else None

    def forward(self, context: AttentionContext) -> Terms:
        scale = self.scale if self.settings["scaling"] == "t5" else None
        return Terms(scale=scale, bias=(toeplitz_table(context.layer.shared, context),))
