"""Sinusoids added to the input (Vaswani et al., arXiv 1706.03762, §3.5)."""

import torch

from .encodings import sinusoid_concat, sinusoid_interleaved, sinusoid_t2t
from .scheme import InputScheme, Option, Scheme, choice, is_number


LAYOUTS = {"interleaved": sinusoid_interleaved, "concat": sinusoid_concat, "t2t": sinusoid_t2t}

AMPLITUDE = Option(
    default=1.0,
    help="factor of the sinusoid; a positive number. A LayerNorm follows, so that hidden_size**-0.5 does what the "
    "paper's factor √D on the word embeddings does",
    accepts=is_number,
)


class Sinusoid(InputScheme):
    """Sinusoids of positions. No parameters."""

    def forward(
        self, position_ids: torch.Tensor, content: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        precise = torch.promote_types(content.dtype, torch.float32)
        waves = LAYOUTS[self.settings["layout"]](position_ids, content.shape[-1], precise)
        return self.settings["amplitude"] * waves


class Sinusoidal(Scheme, name="sinusoidal"):
    """x_i = LayerNorm(word + type + PE_i) with PE_i the sinusoid of i; nothing inside attention. No parameters.

    There are three layouts. `interleaved` is the paper's formula (and DistilBERT's). `concat` has the same columns in
    another order (Transformer-XL). `t2t` also has other frequencies (tensor2tensor, fairseq). The paper multiplies the
    word embeddings by √D. Here they are unchanged, and `amplitude` sets the balance.

    On longer inputs, by its source: may extrapolate; Press et al. find that it does not.
    """

    summary = "Fixed waves of the position, added to the words"
    source = "Vaswani et al. 2017, arXiv 1706.03762, §3.5"
    out_of_range = ("extrapolate",)
    zero_init_is_identity = False  # the input has positions from the start
    even_size = "hidden_size"
    input_class = Sinusoid
    options = {
        "layout": choice("interleaved", "concat", "t2t", help="order and frequencies of sines and cosines"),
        "amplitude": AMPLITUDE,
    }
