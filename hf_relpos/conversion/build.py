"""Build the result in memory: a RelPosBert model with the tensors of the source; keep, drop or fold its positions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..families.family import TASK_TYPES, TOKEN_TYPES, Family
from ..families.names import is_scheme
from ..families.tensors import Checkpoint
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..models.modeling_relpos_bert import HEADS, RelPosBertPreTrainedModel
from .configurations import same_positions
from .plan import Conversion


# Stock class to ours: BertForMaskedLM to RelPosBertForMaskedLM, and so on.
ARCHITECTURES = {head.__name__.removeprefix("RelPos"): head for head in HEADS.values()}
Noted = tuple[RelPosBertPreTrainedModel, dict[str, str]]  # a model, and notes on some of its tensors
# A method changes the model in place, which has zeros in the scheme's parameters, and returns the names of changed
# tensors with a note on each.
Apply = Callable[[RelPosBertPreTrainedModel, Conversion], dict[str, str]]


def expected_shapes(spec: Family, config: RelPosBertConfig) -> dict[str, torch.Size]:
    """Shapes by stock name of all tensors that a source with this configuration must have."""
    with torch.device("meta"):
        model = ARCHITECTURES[spec.architecture](config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if not spec.has_token_types:
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith(TOKEN_TYPES)}
    return shapes | spec.folded_shapes(base=spec.architecture == "BertModel")


def rename_relative(source: Checkpoint, own_config: RelPosBertConfig, config: RelPosBertConfig) -> Checkpoint:
    """The source with its relative positions under the names of the result, or in `extra` if they are replaced."""
    if same_positions(own_config, config):
        return source
    own, types = own_config.position_embedding_type, config.position_embedding_type
    if isinstance(own, list) and isinstance(types, list) and types[: len(own)] == own:
        return source
    part = types.index(own) if isinstance(types, list) and own in types else None
    tensors, origin, extra = dict(source.tensors), dict(source.origin), dict(source.extra)
    for name in filter(is_scheme, source.tensors):
        tensor = tensors.pop(name)
        if part is None:
            extra[name] = tensor
        else:
            renamed = name.replace(".distance_embedding.", f".distance_embedding.parts.{part}.")
            tensors[renamed], origin[renamed] = tensor, origin.pop(name)
    return replace(source, tensors=tensors, origin=origin, extra=extra)


@torch.no_grad()
def assemble(architecture: str, config: RelPosBertConfig, source: Checkpoint) -> Noted:
    """Build a model with the tensors of the source, in the source's dtype and in eval mode.

    The scheme's other parameters are zero, and so are token types that the source lacks.

    Returns:
        The model, and notes on tensors to which another one was added: ERNIE's task type 0, the default of all tokens.
    """
    with torch.random.fork_rng(devices=[]):
        # makes the initialisation of a missing pooler reproducible; torch.manual_seed would also seed other devices
        torch.default_generator.manual_seed(0)
        model: Any = ARCHITECTURES[architecture](config)
        model = model.to(source.dtype).eval()
    for name, parameter in model.named_parameters():
        if is_scheme(name) or name.endswith(TOKEN_TYPES):
            parameter.zero_()
    for name, tensor in model.state_dict().items():
        if name in source.tensors:
            tensor.copy_(source.tensors[name])
    tasks = [tensor for name, tensor in source.tensors.items() if name.endswith(TASK_TYPES)]
    return model, {add_to_token_types(model, tasks[0][0]): "plus the vector of task type 0"} if tasks else {}


def build_teacher(conversion: Conversion) -> RelPosBertPreTrainedModel:
    """A RelPosBert model with the outputs of the source, in its dtype and in eval mode."""
    return assemble(conversion.spec.architecture, conversion.source_config, conversion.source)[0]


@torch.no_grad()
def build_model(conversion: Conversion, apply: Apply | None) -> Noted:
    """Build the result by the function of its method, if it has one; also returns a note on each changed tensor."""
    model, folded = assemble(conversion.spec.architecture, conversion.config, conversion.renamed)
    changed = apply(model, conversion) if apply else {}
    notes = {name: ", ".join(each[name] for each in (folded, changed) if name in each) for name in folded | changed}
    return model, notes


def drop(model: RelPosBertPreTrainedModel, conversion: Conversion) -> dict[str, str]:
    """Replace the position vectors by their mean."""
    name = add_to_token_types(model, conversion.source_table.double().mean(0))
    return {name: "plus the mean of the position vectors"}


def fold(model: RelPosBertPreTrainedModel, table: torch.Tensor, counts: torch.Tensor, first_token: int | None) -> None:
    """Add position vectors to the embeddings of a model without them: their mean to all tokens, p₀ to [CLS].

    Args:
        model: changed in place.
        table: absolute position embeddings, (P, D).
        counts: how often each position occurs, (P,).
        first_token: id of the token at position 0 of every text; position vector 0 is added to its word embedding.
            None if texts begin with different tokens; the mean is then over all positions.
    """
    weight = counts.double().clone()
    if first_token is not None:
        weight[0] = 0
    mean = (table.double() * (weight / weight.sum())[:, None]).sum(0)
    add_to_token_types(model, mean)
    if first_token is not None:
        embeddings: Any = model.get_input_embeddings()
        words = embeddings.weight
        words[first_token] = (words[first_token].double() + table[0].double() - mean).to(words.dtype)


@torch.no_grad()
def add_to_token_types(model: RelPosBertPreTrainedModel, vector: torch.Tensor) -> str:
    """Add a vector (D,) to the embeddings of all tokens: each has one token type, and no output layer is tied to it.

    Returns:
        The name of the table of token types.
    """
    base: Any = model.base_model
    types = base.embeddings.token_type_embeddings.weight
    types.copy_(types.double() + vector.double())
    return next(name for name, parameter in model.named_parameters() if parameter is types)
