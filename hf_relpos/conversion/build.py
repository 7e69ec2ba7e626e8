"""The result in memory: a RelPosBert model with the tensors of the source."""

from dataclasses import replace

import torch

from ..families.checkpoint import Checkpoint
from ..families.family import TASK_TYPES, TOKEN_TYPES
from ..families.names import is_scheme
from ..families.recognition import CheckpointSpec
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..models.modeling_relpos_bert import HEADS, RelPosBertPreTrainedModel
from ..schemes.registry import scheme_parts
from .run import Apply, ConversionRun


# Stock class to ours: BertForMaskedLM to RelPosBertForMaskedLM, and so on.
ARCHITECTURES = {head.__name__.removeprefix("RelPos"): head for head in HEADS.values()}


def expected_shapes(spec: CheckpointSpec, architecture: str, source_config: RelPosBertConfig) -> dict[str, torch.Size]:
    """Stock name to shape of every tensor that the source must have.

    Args:
        spec: of the source.
        architecture: class of stock BERT.
        source_config: the configuration of the source as a RelPosBertConfig.
    """
    with torch.device("meta"):
        model = ARCHITECTURES[architecture](source_config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if not spec.has_token_types:
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith(TOKEN_TYPES)}
    return shapes | spec.folded_shapes(base=architecture == "BertModel")


def rename_relative(source: Checkpoint, source_config: RelPosBertConfig, config: RelPosBertConfig) -> Checkpoint:
    """The source with its relative positions under their names in the result, or among its `extra`.

    Args:
        source: under stock names.
        source_config: its configuration as a RelPosBertConfig.
        config: that of the result.
    """
    if same_positions(source_config, config):
        return source
    own, types = source_config.position_embedding_type, config.position_embedding_type
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
def assemble(config: RelPosBertConfig, source: Checkpoint) -> tuple[RelPosBertPreTrainedModel, dict[str, str]]:
    """A model with all tensors of the source that it has parameters for, in the source's dtype and in eval mode.

    The scheme's other parameters are zero, and so are the token types of a source that has none. A table of another
    length is left to the method.

    Returns:
        The model, and a note on each tensor into which another one was folded: ERNIE's task type 0, which every token
        gets when none is given.
    """
    with torch.random.fork_rng(devices=[]):
        # a pooler that the source lacks is the same each time; torch.manual_seed would seed other devices, too
        torch.default_generator.manual_seed(0)
        model = ARCHITECTURES[source.architecture](config).to(source.dtype).eval()
    for name, parameter in model.named_parameters():
        if is_scheme(name) or name.endswith(TOKEN_TYPES):
            parameter.zero_()
    for name, tensor in model.state_dict().items():
        if name in source.tensors and source.tensors[name].shape == tensor.shape:
            tensor.copy_(source.tensors[name])
    tasks = [tensor for name, tensor in source.tensors.items() if name.endswith(TASK_TYPES)]
    return model, {add_to_token_types(model, tasks[0][0]): "plus the vector of task type 0"} if tasks else {}


@torch.no_grad()
def build_model(
    config: RelPosBertConfig, source: Checkpoint, apply: Apply, run: ConversionRun
) -> tuple[RelPosBertPreTrainedModel, dict[str, str]]:
    """The result, and a note on each tensor that was changed.

    Args:
        config: of the result.
        source: under the names of the result.
        apply: of the method.
        run: for the method.
    """
    model, folded = assemble(config, source)
    changed = apply(model, run)
    notes = {name: ", ".join(each[name] for each in (folded, changed) if name in each) for name in folded | changed}
    return model, notes


def same_positions(one: RelPosBertConfig, other: RelPosBertConfig) -> bool:
    """Whether two configurations have the same scheme, down to the shapes of its tables."""
    return all(
        value(one) == value(other)
        for value in (
            lambda config: config.position_embedding_type,
            lambda config: config.max_position_embeddings,
            lambda config: [settings for _, settings in scheme_parts(config)],
        )
    )


def parameter_name(model: RelPosBertPreTrainedModel, parameter: torch.Tensor) -> str:
    """The name of a parameter in its model."""
    return next(name for name, candidate in model.named_parameters() if candidate is parameter)


def add_to_token_types(model: RelPosBertPreTrainedModel, vector: torch.Tensor) -> str:
    """Add a vector to the embedding of every token, in the table of token types; the name of that table."""
    embeddings = model.base_model.embeddings
    embeddings.add_everywhere(vector.double())
    return parameter_name(model, embeddings.token_type_embeddings.weight)
