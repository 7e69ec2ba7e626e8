"""The result against its source: every tensor that was written, and the outputs where they must be the same."""

from collections.abc import Callable

import torch
import transformers
from transformers import BertConfig, PreTrainedModel

from .names import inverse, is_table
from .report import Step
from .source import ConversionError, Source


# Outputs are compared in float64, where a difference is an error and not rounding.
TOLERANCE = 1e-6
# Except that a sum of tensors is rounded to the weights' dtype: this many times its precision.
ROUNDING = 32


def compare_tensors(
    model: PreTrainedModel, reloaded: PreTrainedModel, source: Source, steps: tuple[Step, ...]
) -> None:
    """Every tensor read back is the one written, and every reused one is the source's, under its stock name.

    Raises:
        ConversionError: names the first one that is not.
    """
    written, read = model.state_dict(), reloaded.state_dict()
    restored = {**read, **inverse(read)}
    reused = {step.target for step in steps if step.kind == "reused"}
    for name in written.keys() | read.keys():
        right = name in written and name in read and same(written[name], read[name])
        if not right or (name in reused and not same(restored[name], source.tensors[name])):
            raise ConversionError(
                f"{name} came back from the disk different from what was written, so the result was removed; check "
                "the disk, and report this if it happens again"
            )


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Same type, shape and values."""
    return one.dtype == other.dtype and torch.equal(one, other)


@torch.no_grad()
def compare_outputs(
    model: PreTrainedModel,
    source: Source,
    stock: Callable[[PreTrainedModel, Source], PreTrainedModel],
    rounded: bool,
) -> float:
    """Run the source and the result on one random batch, both in float64.

    Args:
        model: the result; comes back in float64.
        stock: makes the source's model, in float64 and eval mode, from the result and the source's tensors.
        rounded: sums of tensors are in the result, which are rounded to the dtype of the source.

    Returns:
        Largest difference of an output, relative to the largest value of that output.

    Raises:
        ConversionError: for one that rounding does not explain.
    """
    tolerance = max(TOLERANCE, ROUNDING * torch.finfo(source.dtype).eps) if rounded else TOLERANCE
    config = model.config
    tables = [len(tensor) for name, tensor in source.tensors.items() if is_table(name)]  # the result's may be longer
    length = min(16, config.max_position_embeddings, *tables)
    # the last row is padded
    shape = (1, 2, length) if source.architecture == "BertForMultipleChoice" else (2, length)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        original = stock(model, source)
        batch = {
            "input_ids": torch.randint(config.vocab_size, shape),
            "token_type_ids": torch.randint(config.type_vocab_size, shape),
            "attention_mask": torch.ones(shape, dtype=torch.long),
            # whatever the configuration asks for
            "return_dict": True,
            "output_attentions": False,
            "output_hidden_states": False,
        }
        batch["attention_mask"][..., -1, length // 2 + 1 :] = 0
        if config.is_decoder:
            batch["use_cache"] = False
            if config.add_cross_attention:
                batch["encoder_hidden_states"] = torch.randn(2, 5, config.hidden_size, dtype=torch.float64)
    wanted = original(**batch)
    del original  # so that only one model in float64 is held at a time
    found = model.double().eval()(**batch)
    worst = max(
        float((one - found[name]).abs().max() / one.abs().max().clamp_min(1e-30)) for name, one in wanted.items()
    )
    if not worst <= tolerance:
        raise ConversionError(
            f"the result's outputs differ from the source's by {worst:.1e}, relative, although the method keeps them, "
            "so it was removed; please report this"
        )
    return worst


def stock_model(config: BertConfig, model: PreTrainedModel, source: Source) -> PreTrainedModel:
    """Stock BERT with the source's tensors, and the result's where the source has none; in float64, eval mode."""
    stock = getattr(transformers, source.architecture)(config).double().eval()
    stock.load_state_dict({**inverse(model.state_dict()), **source.tensors})
    return stock
