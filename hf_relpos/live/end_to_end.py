"""Find where padding can be removed without other outputs of the whole object, called as its user calls it."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from .arguments import parameters_of
from .call import Setup
from .check import LENGTHS, apply_to
from .foreign import kinds_in
from .guard import WriteError
from .probe import SIDES, Probe, outputs_of, without_dropout
from .shadow import shadow


# In the class names of heads that find spans: their softmax and loss are over all positions of a row.
SPANS = "ForQuestionAnswering"
MAY_READ = "the program may read outputs at padding, which would change; padding='zeros' takes it out all the same"


def sides_that_heads_allow(
    root: nn.Module, inside: Mapping[str, Setup], everywhere: bool = False
) -> tuple[tuple[str, ...], bool, str]:
    """Where padding may be taken out of without another output of an object.

    Args:
        inside: how calls of the encoders in it are to be computed, by their names in it; at least one.
        everywhere: whether outputs at padding are to stay, too.

    Returns:
        The sides, whether they hold in training, and who reads padding, in words; "" if nobody does.
    """
    kind = type(root).__name__
    reader = f"{kind} reads states at padding, and computes other outputs without"
    for module in root.modules():
        if SPANS in type(module).__name__:
            return (), False, f"{type(module).__name__} compares all states of a row, padding too"
    # on other sides one of them would leave padding to Transformers, and its outputs would be those of before
    common = tuple(side for side in SIDES if all(side in each.sides for each in inside.values()))
    if not common:
        return (), False, reader
    limit = min((each.limit - 1 for each in inside.values() if each.limit is not None), default=LENGTHS[0])
    name, first = next(iter(inside.items()))
    probe = Probe(root.get_submodule(name), [min(each, limit) for each in LENGTHS], first.pads, common)
    stock, trial = shadow(root, has_memory=False), shadow(root, has_memory=False)
    for inputs in _inputs(type(root), probe):
        try:
            expected = outputs_of(stock, *inputs)
        except WriteError as error:
            return (), False, str(error)
        except Exception:  # another signature; the code of others raises what it likes
            continue
        for name, setup in inside.items():
            apply_to(trial.get_submodule(name), setup.for_check())
        sides, _ = probe.agreement(trial, expected, *inputs)
        if everywhere and sides != probe.agreement(trial, expected, *inputs, everywhere=True)[0]:
            return (), False, MAY_READ
        trains = _agree_in_training(stock, trial, probe, inputs, {*sides})
        return sides, trains, "" if sides == common else reader
    if everywhere:
        return (), False, MAY_READ
    return common, True, f"whether {kind} reads states at padding is not known: if it does, pass padding='stock'"


def _agree_in_training(stock: Any, trial: Any, probe: Probe, inputs: tuple[Any, ...], sides: set[str]) -> bool:
    """Whether outputs are the same in training, too, as far as they can be compared."""
    known, foreign = kinds_in(stock)
    has_batch_norm = any(issubclass(kind, nn.modules.batchnorm._BatchNorm) for kind in known)
    if not (foreign or has_batch_norm):  # they read what they read in evaluation
        return True
    stock, trial = without_dropout(stock), without_dropout(trial)
    with suppress(Exception):  # of models that ask for labels then
        expected = outputs_of(stock, *inputs)
        ours, _ = probe.agreement(trial, expected, *inputs)
        if not sides <= {*ours}:
            again, _ = probe.agreement(stock, expected, *inputs)
            return not sides <= {*again}  # random outputs cannot be compared
    return True


def _inputs(kind: Any, probe: Probe) -> Iterator[tuple[Any, ...]]:
    """Arguments that modules around encoders take, one after the other: by name, as a dict, or by position."""
    ids, mask = probe.ids, probe.real.long()
    names, takes_others = parameters_of(kind.forward)
    if "MultipleChoice" in kind.__name__:
        ids, mask = ids[:, None], mask[:, None]
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if "decoder_input_ids" in names:
        given["decoder_input_ids"] = ids[:, :2]
    if "input_ids" in names or takes_others:
        yield (given,)
    yield ({}, {"input_ids": ids, "attention_mask": mask})
    yield ({}, ids, mask)
    yield ({}, ids, mask.sum(-1))  # lengths
    yield ({}, ids)
