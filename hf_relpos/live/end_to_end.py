"""Find the padding sides that the outputs and losses of a whole model do not depend on."""

import itertools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .arguments import parameters_of
from .call import Setup
from .check import LENGTHS, apply_to
from .foreign import kinds_in
from .guard import WriteError
from .labels import tried_labels
from .probe import SIDES, Probe, outputs_of, without_dropout
from .shadow import first_layers, shadow


# In the class names of heads that find spans: their softmax and loss are over all positions of a row.
SPANS = "ForQuestionAnswering"
MAY_READ = "the program may read outputs at padding, which would become zeros; unpad=True removes it all the same"
SHORT = (6, 4, 3)  # tokens of the rows whose losses are compared


def sides_that_heads_allow(
    root: nn.Module, inside: Mapping[str, Setup], everywhere: bool = False
) -> tuple[tuple[str, ...], bool, str]:
    """Find the sides on which padding can be removed without changing the outputs of a model.

    Args:
        inside: how calls of the encoders in it are to be computed, by their names in it; at least one.
        everywhere: whether outputs at padding are to stay, too.

    Returns:
        The sides, whether they hold in training, and who reads padding, in words; "" if nobody does.
    """
    kind = type(root).__name__
    reader = f"outputs of {kind} depend on hidden states at padding"
    for module in root.modules():
        if SPANS in type(module).__name__:
            return (), False, f"the softmax of {type(module).__name__} includes padding"
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
        except Exception:  # another signature; third-party code raises what it likes
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
    return common, True, f"whether {kind} depends on padding is not known: if it does, pass unpad=False"


def _agree_in_training(stock: Any, trial: Any, probe: Probe, inputs: tuple[Any, ...], sides: set[str]) -> bool:
    """Whether outputs also agree in training mode, as far as they can be compared."""
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


def losses_over_padding(
    root: nn.Module, inside: Mapping[str, Setup], sides: tuple[str, ...]
) -> tuple[tuple[str, ...], list[nn.Module]]:
    """Find the sides on which padding can be removed without changing losses, and heads that use labels at padding.

    Each head gets labels of rows and of tokens by the arguments that an encoder does not have, in evaluation and, if
    it has third-party code, in training. Outputs are compared on a few tokens and the first layers of each kind.

    Args:
        sides: those that are left.

    Returns:
        The sides, and the heads whose loss is another with labels at padding alone.
    """
    read: set[str] = set()
    readers: set[nn.Module] = set()
    for path, head in root.named_modules():
        start = f"{path}." if path else ""
        own = {name.removeprefix(start): each for name, each in inside.items() if name.startswith(start)}
        if own and (head is root or isinstance(head, PreTrainedModel)):
            name, first = next(iter(own.items()))
            for side in sides:
                probe = Probe(head.get_submodule(name), SHORT, first.pads, (side,), length=SHORT[0] + 1)
                found = {asks for asks, agrees in _losses(head, own, probe) if not agrees}
                read |= {side} if False in found else set()
                readers |= {head} if True in found else set()
    return tuple(side for side in sides if side not in read), [*readers]


def _losses(head: Any, inside: Mapping[str, Setup], probe: Probe) -> Iterator[tuple[bool, bool]]:
    """For labels that a head takes: whether they ask for states at padding, and whether all outputs agree."""
    for copy_of in (first_layers, partial(shadow, has_memory=False)):  # code may count layers
        stock, trial = copy_of(head), copy_of(head)
        for inputs in _inputs(type(head), probe):
            with suppress(Exception):  # another signature
                outputs_of(stock, *inputs)
                break
        else:
            continue
        break
    else:
        return
    for name, setup in inside.items():
        apply_to(trial.get_submodule(name), setup.for_check())
    pairs = [(stock, trial)]
    if kinds_in(head)[1]:
        pairs.append((without_dropout(stock), without_dropout(trial)))
    known = {name for path in inside for name in parameters_of(type(head.get_submodule(path)).forward)[0]}
    for (labels, asks), (one, other) in itertools.product(tried_labels(head, known, probe.real), pairs):
        given = ({**inputs[0], **labels}, *inputs[1:])
        with suppress(Exception), warnings.catch_warnings(action="ignore"):  # of labels with another shape
            expected = outputs_of(one, *given)
            agrees = bool(probe.agreement(other, expected, *given)[0])
            yield asks, agrees or not probe.agreement(one, expected, *given)[0]  # random losses cannot be compared


def _inputs(kind: Any, probe: Probe) -> Iterator[tuple[Any, ...]]:
    """Yield inputs in the forms that models around encoders take: by name, as a dict, or by position."""
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
