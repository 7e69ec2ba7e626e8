"""T5, mT5 and UMT5 at level `contract`: a bias by offset, (H, 2L − 1), instead of (1, H, T, T)."""

from typing import Any

from ..attention.unpadding import Batch, running, take_batch


class ByOffset:
    """Attention of each of them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As stock; the batch runs here, since gradient checkpointing calls layers in the backward."""
        mask = kwargs.get("mask", kwargs.get("attention_mask"))
        if not isinstance(mask, Batch):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with running(mask):
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def compute_bias(self, query_length: int, key_length: int, *args: Any, **kwargs: Any) -> Any:
        """The bias of every offset, (H, 2L − 1), in the order of `AttentionContext.offsets`; else as stock."""
        batch = take_batch()
        if batch is None:
            return super().compute_bias(query_length, key_length, *args, **kwargs)  # type: ignore[misc]
        longest = batch.groups[0].length
        # that of one query, which has L − 1 keys on either side
        bias = super().compute_bias(1, 2 * longest - 1, past_seen_tokens=longest - 1)  # type: ignore[misc]
        return bias[0, :, 0]
