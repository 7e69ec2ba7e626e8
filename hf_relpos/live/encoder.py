"""The forward of an optimized encoder: which calls are computed without their padding, or by our attention."""

import functools
import inspect
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from ..attention.unpadding import UnpaddedBatch
from ..host.tracing import has_contents, is_traced
from ..host.transformers import CACHE_NAMES, collects_outputs
from ..models.sequence import Rows
from . import by_length, contract
from .arguments import parameters_of, wants
from .attention import prefer_backend
from .batch import MismatchError, padded_batch, running
from .calls import CALLS
from .foreign import foreign_part, has_stock_attention, is_watched
from .own import OwnParts


Level = Literal["contract", "own", "by length"]
# Fewer padding tokens than these cost less than taking them out. See docs/results/benchmarks/cpu-encoder.md.
FEWEST = 16
SETUP = "_hf_relpos"  # the attribute that holds an encoder's `Setup`
# Arguments that are tokens or embeddings, and those that make a call Transformers' own.
TOKENS = ("input_ids", "inputs_embeds")
OTHERS = (
    *CACHE_NAMES,
    "encoder_hidden_states",
    "encoder_attention_mask",
    "cu_seq_lens_q",
    "entity_ids",
    "head_mask",
    "is_causal",
    "mems",
    "perm_mask",
    "target_mapping",
    "input_mask",
    "output_router_logits",
)
# Arguments that mean the same in the code of others. By any other it may read padding, or return what has no rows.
SWITCHES = ("use_cache", "use_mems", "return_dict", "output_hidden_states", "output_attentions")
FAMILIAR = {*TOKENS, *SWITCHES, "attention_mask", "token_type_ids", "position_ids"}


@dataclass(frozen=True)
class Setup:
    """How the calls of an encoder are computed.

    Attributes:
        level: of docs/live.md.
        own: the parts of the encoder that are replaced, and compute calls with padding, too; None for none.
        sides: where a row's padding may stand to be taken out: "right", "left".
        pads: ids of the padding token; a position is padding if its mask is 0 and it has one of them.
        trusts_mask: whether the mask alone says what is padding.
        positions: the position ids that the encoder is told where the caller gives none. "columns": those of a row's
            columns; "counted": those of RoBERTa, which counts tokens from the one after the padding id on; None for
            encoders that are not told.
        returns_cache: whether it returns keys and values, or XLNet's memory, where it is not told to do without.
        window: of local layers, whose rows of many windows are computed by window; None for none.
        trained: the length of a batch from which on rotations, chosen keys or code of others depend on that length;
            None if they never do.
        checked: the length of batches up to which an encoder with code of others was compared with itself; longer ones
            are compared when they come. None for an encoder of Transformers alone.
        recheck: the function of encoder, setup, rows and length that compares them, and returns the next setup.
        trains: whether its outputs in training depend on each row alone, dropout aside.
        trusted: classes, and code of others, that were inside when the level was checked.
        is_trial: whether the setup is tried on a few rows: these are cut into several parts, and code of others is
            passed over.
        difference: from Transformers at tokens, as a share of the largest value.
    """

    level: Level
    own: OwnParts | None = None
    sides: tuple[str, ...] = ("right", "left")
    pads: tuple[int, ...] = ()
    trusts_mask: bool = False
    positions: str | None = "columns"
    returns_cache: bool = False
    window: int | None = None
    trained: int | None = None
    checked: int | None = None
    recheck: Any = None
    trains: bool = True
    trusted: frozenset[Any] = frozenset()
    is_trial: bool = False
    difference: float = 0.0

    def __deepcopy__(self, memo: Any) -> "Setup":
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Without code, of which there are no pickles."""
        return {**vars(self), "trusted": frozenset(filter(inspect.isclass, self.trusted))}


def optimized_forward(encoder: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of an encoder whose calls are computed as its `Setup` says.

    Args:
        forward: of its class.
    """
    if is_traced():
        return forward(*args, **kwargs)
    with CALLS.inside():
        setup = vars(encoder).get(SETUP)  # there is none in calls that waited for `undo`
        return forward(*args, **kwargs) if setup is None else run(encoder, forward, setup, args, kwargs)


def run(encoder: Any, forward: Any, setup: Setup, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of an encoder, without its padding and by our attention where nothing speaks against it.

    Args:
        forward: of its class, bound to it.
    """
    names, takes_others = parameters_of(type(encoder).forward)
    if len(args) > len(names):
        return forward(*args, **kwargs)
    given = dict(zip(names, args, strict=False)) | kwargs
    plan = plan_of(encoder, setup, names, given, takes_others or "return_dict" in names)
    if plan is not None and setup.checked is not None and plan.real.shape[1] > setup.checked and not setup.is_trial:
        setup = setup.recheck(encoder, setup, *plan.real.shape)
        plan = plan if plan.real.shape[1] <= (setup.checked or 0) else None
    if plan is None:
        return forward(*args, **kwargs)
    try:
        return plan.call(encoder, forward, setup, given)
    except Exception as error:
        # code of others may fail on parts as short as these; a trial must not compare Transformers with itself
        if setup.is_trial or not (plan.batch is None or isinstance(error, MismatchError)):
            raise
    return forward(*args, **kwargs)


@dataclass(frozen=True)
class Plan:
    """How a call is computed otherwise than by Transformers.

    Attributes:
        real: (B, L), True for tokens.
        batch: the batch at the levels `contract` and `own`; None to compute it by length.
        by_token: names of the arguments (B or 1, L, …); none where padding stays.
        by_row: names of the arguments (B, …).
        added: arguments besides those of the caller.
        as_tuple: whether the caller wants a tuple of an encoder that would return one.
    """

    real: torch.Tensor
    batch: UnpaddedBatch | None
    by_token: tuple[str, ...] = ()
    by_row: tuple[str, ...] = ()
    added: dict[str, Any] = field(default_factory=dict)
    as_tuple: bool = False

    def call(self, encoder: Any, forward: Any, setup: Setup, given: dict[str, Any]) -> Any:
        """The outputs of the encoder; states of padding that is taken out are zeros."""
        given, by_token, rows = given | self.added, self.by_token, self.real.shape[0]
        given |= {name: given[name].expand(rows, *given[name].shape[1:]) for name in by_token}
        if self.batch is not None and not by_token:
            with running(self.batch):
                outputs = forward(**given)
        elif self.batch is not None:
            outputs = contract.call(encoder, forward, given, by_token, self.batch)
        else:
            parts = by_length.parts_of(self.real, 0 if setup.is_trial else by_length.TOKENS_OF_A_CALL)
            inner = replace(setup, sides=(), is_trial=True)  # what padding a part has stays
            run_part = functools.partial(run, encoder, forward, inner, ())
            outputs = by_length.call(run_part, given, by_token, self.by_row, self.real, parts)
        return outputs.to_tuple() if self.as_tuple and hasattr(outputs, "to_tuple") else outputs


def plan_of(
    encoder: Any, setup: Setup, names: tuple[str, ...], given: dict[str, Any], takes_return_dict: bool = True
) -> Plan | None:
    """How a call is computed; None for Transformers' own forward."""
    tokens = [given[name] for name in TOKENS if given.get(name) is not None]
    if (
        len(tokens) != 1
        or not isinstance(tokens[0], torch.Tensor)
        or tokens[0].dim() < 2
        or not tokens[0].numel()
        or not has_contents(tokens[0])
    ):
        return None
    config: Any = getattr(encoder, "config", None)
    batch, length = tokens[0].shape[:2]
    mask = given.get("attention_mask")
    is_windowed = setup.window is not None and length >= contract.MANY_WINDOWS * setup.window
    attends = (
        setup.own is not None
        and reaches_attention(encoder, setup)
        and (setup.own.serves_short or prefer_backend(batch, config.num_attention_heads, length))
    )
    if mask is None and (is_windowed or attends):
        real = torch.ones(batch, length, dtype=torch.bool)
    elif isinstance(mask, torch.Tensor) and mask.shape == (batch, length) and has_contents(mask):
        real = mask != 0
        if mask.is_floating_point() and not bool((mask[real] == 1).all()):  # XLNet reads other numbers otherwise
            return None
    else:
        return None
    unpads = is_windowed or batch * length - int(real.sum()) >= (1 if setup.is_trial else FEWEST)
    if (
        not (unpads or attends)
        or any(given.get(name) is not None for name in OTHERS)
        or wants(encoder, given, "output_attentions")
        or wants(encoder, given, "chunk_size_feed_forward")
        or collects_outputs()
    ):
        return None
    asked = given.get("return_dict")
    asked = getattr(config, "return_dict", True) if asked is None else asked
    plan = _without_padding(encoder, setup, names, given, real, is_windowed) if unpads else None
    # stock attends to all keys of a row without a token; of ours only DeBERTa's parts do
    if plan is None and setup.own and attends and (setup.own.serves_short or bool(real.any(1).all())):
        plan = Plan(real, padded_batch(real))
    if plan is None or (not setup.is_trial and is_changed(encoder, setup)):
        return None
    if takes_return_dict and asked is False and plan.batch is not None:  # outputs of parts are joined as they come
        return replace(plan, added=plan.added | {"return_dict": True}, as_tuple=True)
    return plan


def reaches_attention(encoder: Any, setup: Setup) -> bool:
    """Whether the attention of an encoder gets a batch; not at level `contract` once another backend was chosen."""
    config = getattr(encoder, "config", None)
    return setup.level == "own" or getattr(config, "_attn_implementation", None) == contract.NAME


def is_changed(encoder: Any, setup: Setup) -> bool:
    """Whether code of others has come into an encoder."""
    is_others = setup.own is not None and not has_stock_attention(encoder)
    return is_others or foreign_part(encoder, setup.trusted) is not None


def _without_padding(
    encoder: Any, setup: Setup, names: tuple[str, ...], given: dict[str, Any], real: torch.Tensor, is_windowed: bool
) -> Plan | None:
    """How a call is computed without its padding; None where somebody may read it."""
    batch, length = real.shape
    if (
        (setup.returns_cache and wants(encoder, given, "use_cache"))
        or ("use_mems" in names and wants(encoder, given, "use_mems"))
        or (encoder.training and not setup.trains)
        or (setup.checked is not None and any(given[name] is not None for name in given.keys() - FAMILIAR))
        or (setup.trained is not None and (length >= setup.trained or given.get("position_ids") is not None))
        or not is_padding(setup, given.get("input_ids"), real)
    ):
        return None
    by_token, by_row = _by_shape(given, batch, length)
    sides = _sides_of(real)
    if by_token is None or sides is None or not sides <= set(setup.sides):
        return None
    found = None
    by_parts = setup.level == "by length" or by_row or wants(encoder, given, "output_hidden_states")
    by_parts = by_parts or (batch == 1 and not is_windowed)
    if not by_parts and reaches_attention(encoder, setup):
        found = UnpaddedBatch.of(real, slice(0))
    if found is None and not sides:
        return None
    added = {}
    if "position_ids" in names and given.get("position_ids") is None and setup.positions is not None:
        added["position_ids"] = _positions(encoder, setup, given, real)
    return Plan(real, found, (*by_token, *added), by_row, added)


def is_padding(setup: Setup, ids: torch.Tensor | None, real: torch.Tensor) -> bool:
    """Whether positions that the mask hides are padding that nobody reads."""
    if setup.trusts_mask:
        return True
    if ids is None or ids.shape != real.shape:
        return False
    hidden = ids[~real]
    return bool(torch.isin(hidden, torch.tensor(setup.pads, dtype=hidden.dtype)).all())


def may_unpad(setup: Setup, encoder: nn.Module, rows: Rows) -> bool:
    """Whether an encoder of this package's own models may take padding out of the call that is running."""
    if setup.is_trial:
        return True
    ids = rows.tokens if rows.tokens.dim() == 2 else None
    return (
        not is_traced()
        and (setup.trains or not encoder.training)
        and not collects_outputs()
        and rows.key_mask is not None
        and is_padding(setup, ids, rows.key_mask != 0)
        and not is_watched(encoder)
        and foreign_part(encoder, setup.trusted) is None
    )


def _by_shape(given: dict[str, Any], batch: int, length: int) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Names of the arguments with entries for tokens, and for rows; None where some are not understood."""
    by_token, by_row = [], []
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and value.dim():
            if value.dim() > 1 and value.shape[0] in (1, batch) and value.shape[1] == length:
                by_token.append(name)
            elif value.shape[0] == batch and batch != length and name != "position_ids":
                by_row.append(name)
            else:
                return None, ()
        elif not isinstance(value, torch.Tensor | bool | int | float | str | None):
            return None, ()
    return tuple(by_token), tuple(by_row)


def _sides_of(real: torch.Tensor) -> set[str] | None:
    """Where padding stands before or after a row's tokens; None for rows without a token."""
    if not bool(real.any(1).all()):
        return None
    sides = {"left"} if not bool(real[:, 0].all()) else set()
    return sides if bool(real[:, -1].all()) else sides | {"right"}


def _positions(encoder: Any, setup: Setup, given: dict[str, Any], real: torch.Tensor) -> torch.Tensor:
    """Position ids, (B or 1, L), as the encoder finds them in a padded batch."""
    columns = torch.arange(real.shape[1])[None]
    if setup.positions == "columns":
        return columns
    index = getattr(getattr(encoder, "embeddings", None), "padding_idx", None)  # MPNet's is always 1
    pad = setup.pads[0] if index is None else index
    if given.get("input_ids") is None:
        return columns + pad + 1
    is_counted = (given["input_ids"] != pad).long()
    return is_counted.cumsum(1) * is_counted + pad
