"""Build the result in memory: a RelPosBert model with the tensors of the source."""

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
    """Shapes by stock name of all tensors that the source must have.

    Args:
        spec: description of the source.
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
    """Rename the relative positions of the source as in the result, or move them to `extra`.

    Args:
        source: the source, with stock names.
        source_config: its configuration as a RelPosBertConfig.
        config: configuration of the result.
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
    """Build a model with the tensors of the source, in the source's dtype and in eval mode.

    The scheme's other parameters are zero, and so are token types that the source lacks.

    Returns:
        The model, and notes on tensors to which another one was added: ERNIE's task type 0, the default of all tokens.
    """
    with torch.random.fork_rng(devices=[]):
        # makes the initialisation of a missing pooler reproducible; torch.manual_seed would also seed other devices
        torch.default_generator.manual_seed(0)
        model = ARCHITECTURES[source.architecture](config).to(source.dtype).eval()
    for name, parameter in model.named_parameters():
        if is_scheme(name) or name.endswith(TOKEN_TYPES):
            parameter.zero_()
    for name, tensor in model.state_dict().items():
        if name in source.tensors:
            tensor.copy_(source.tensors[name])
    tasks = [tensor for name, tensor in source.tensors.items() if name.endswith(TASK_TYPES)]
    return model, {add_to_token_types(model, tasks[0][0]): "plus the vector of task type 0"} if tasks else {}


@torch.no_grad()
def build_model(
    config: RelPosBertConfig, source: Checkpoint, apply: Apply, run: ConversionRun
) -> tuple[RelPosBertPreTrainedModel, dict[str, str]]:
    """Build the result; also returns a note on each changed tensor.

    Args:
        config: configuration of the result.
        source: the source, with the names of the result.
        apply: function of the method.
        run: inputs of the method.
    """
    model, folded = assemble(config, source)
    changed = apply(model, run)
    notes = {name: ", ".join(each[name] for each in (folded, changed) if name in each) for name in folded | changed}
    return model, notes


def same_positions(one: RelPosBertConfig, other: RelPosBertConfig) -> bool:
    """Whether two configurations have the same scheme with tables of the same shapes."""
    return all(
        value(one) == value(other)
        for value in (
            lambda config: config.position_embedding_type,
            lambda config: config.max_position_embeddings,
            lambda config: [settings for _, settings in scheme_parts(config)],
        )
    )


@torch.no_grad()
def add_to_token_types(model: RelPosBertPreTrainedModel, vector: torch.Tensor) -> str:
    """Add a vector (D,) to the embeddings of all tokens: each has one token type, and no output layer is tied to it.

    Returns:
        The name of the table of token types.
    """
    types = model.base_model.embeddings.token_type_embeddings.weight
    types.copy_(types.double() + vector.double())
    return next(name for name, parameter in model.named_parameters() if parameter is types)
