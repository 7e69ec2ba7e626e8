"""A graph of a model that `torch.export` recorded, as one flat function with oneDNN's products.

Linear layers multiply by packed weights, those of one input together, with an activation or a residual connection
inside the product. Arguments are named, so that weights are packed again where they have changed.
"""

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node as FxNode

from ..host.torch import binding_of, onednn_linear, onednn_linear_plus, pack_weight, writes_to_first


Node = Any  # an `FxNode`, whose arguments are of many types
aten = torch.ops.aten
NOTHING = (aten.alias.default, aten.dropout.default)  # in evaluation
GUARDS = ("_assert", "sym_constrain")
# By operator what oneDNN calls it, and its variant; "none" is the exact GELU.
ACTIVATIONS = {
    aten.gelu.default: ("gelu", "none"),
    aten.relu.default: ("relu", ""),
    aten.silu.default: ("swish", ""),
    aten.tanh.default: ("tanh", ""),
}


class Argument(NamedTuple):
    """Of a flat function.

    Attributes:
        names: of tensors of the model, which are joined in their first dimension; none for an input.
        is_packed: whether they are a weight in oneDNN's own layout.
    """

    names: tuple[str, ...] = ()
    is_packed: bool = False

    @property
    def is_copy(self) -> bool:
        """Whether it does not follow writes to the tensors."""
        return self.is_packed or len(self.names) > 1

    def of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Its value."""
        first, *others = [tensors[name] for name in self.names]
        if not self.is_copy:
            return first
        joined = torch.cat([first, *others]) if others else first.detach()
        return pack_weight(joined) if self.is_packed else joined


class FlatGraph(NamedTuple):
    """A function of a model's tensors and of inputs, which are the last arguments.

    Attributes:
        function: returns a tuple of tensors.
        arguments: of it.
        constants: tensors of the graph itself, by name.
    """

    function: Callable[..., Any]
    arguments: tuple[Argument, ...]
    constants: Mapping[str, torch.Tensor]

    @property
    def copied(self) -> tuple[str, ...]:
        """Names of the tensors of which there are copies in the arguments."""
        return tuple(dict.fromkeys(name for each in self.arguments if each.is_copy for name in each.names))

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The values of its arguments but for inputs, of tensors by name."""
        return [each.of(tensors) for each in self.arguments if each.names]


def flat_graph(program: Any) -> FlatGraph:
    """The flat function of a `torch.export.ExportedProgram` of a model in evaluation, which is used up.

    Raises:
        ValueError: if it writes to a tensor of the model, or if its graph is not flat.
    """
    signature, module = program.graph_signature, program.graph_module
    graph, constants = module.graph, signature.inputs_to_lifted_tensor_constants
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers, **constants}
    found = [node for node in graph.nodes if node.op == "placeholder"]
    arguments = {node: Argument((names[node.name],) if node.name in names else ()) for node in found}
    for node in [each for each in graph.nodes if each.op == "call_function"]:
        if node.args and node.args[0] in arguments and writes_to_first(node.target):
            raise ValueError(f"it writes to {node.args[0].name}")
        if node.target in NOTHING:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    _fuse(graph, arguments)
    for node in [each for each in graph.nodes if any(word in str(each.target) for word in GUARDS)]:
        graph.erase_node(node)
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if node.op == "placeholder" and arguments[node].names and not node.users:
            graph.erase_node(node)
        elif node.op == "call_function":
            # parts of a joined product are no whole tensors
            node.target = binding_of(aten.reshape.default if node.target is aten.view.default else node.target)
    module.recompile()
    order = tuple(arguments[node] for node in graph.nodes if node.op == "placeholder")
    if any(node.op == "get_attr" for node in graph.nodes):
        raise ValueError("it has graphs inside")
    return FlatGraph(
        partial(type(module).forward, None), order, {name: program.constants[name] for name in constants.values()}
    )


def _fuse(graph: Graph, arguments: dict[Node, Argument]) -> None:
    """Let linear layers use packed weights, whose arguments are added."""
    first_input = next(node for node, argument in arguments.items() if not argument.names)
    together: dict[tuple[Node, bool], list[Node]] = {}
    for node in graph.nodes:
        rows, *weights = node.args if node.target is aten.linear.default else (None,)
        weights = [each for each in weights if each is not None]
        if weights and all(each in arguments and arguments[each].names for each in weights):
            together.setdefault((rows, len(weights) > 1), []).append(node)

    made: dict[Argument, Node] = {}

    def argument(nodes: list[Node], is_packed: bool) -> Node:
        found = Argument(tuple(name for each in nodes for name in arguments[each].names), is_packed)
        if not found.is_copy:
            return nodes[0]
        if found not in made:
            with graph.inserting_before(first_input):
                made[found] = graph.placeholder(f"copy_{len(made)}")
            arguments[made[found]] = found
        return made[found]

    for (rows, has_bias), layers in together.items():
        weight = argument([each.args[1] for each in layers], True)
        bias = argument([each.args[2] for each in layers], False) if has_bias else None
        if len(layers) == 1:
            _replace(graph, layers[0], (weight, bias))
            continue
        with graph.inserting_before(layers[0]):
            product = graph.call_function(onednn_linear, (rows, weight, bias))
            sizes = [each.meta["val"].shape[-1] for each in layers]
            parts = graph.call_function(aten.split_with_sizes.default, (product, sizes, -1))
            for at, layer in enumerate(layers):
                layer.replace_all_uses_with(graph.call_function(operator.getitem, (parts, at)))


def _replace(graph: Graph, layer: Node, weights: tuple[Node, Node | None]) -> None:
    """Put a product in the place of a linear layer, with the activation or the addition that alone reads it."""
    reader = next(iter(layer.users)) if len(layer.users) == 1 else layer
    others = [each for each in reader.args if each is not layer]
    is_sum = reader.target is aten.add.Tensor and len(others) == 1 and isinstance(others[0], FxNode)
    with graph.inserting_before(reader):
        if reader.target in ACTIVATIONS and not reader.kwargs:
            arguments = (layer.args[0], *weights, *ACTIVATIONS[reader.target])
            made = graph.call_function(onednn_linear, arguments)
        elif is_sum and not reader.kwargs and _shape(others[0]) == _shape(layer):
            made = graph.call_function(onednn_linear_plus, (layer.args[0], others[0], *weights))
        else:
            reader = layer
    if reader is layer:
        with graph.inserting_before(layer):
            made = graph.call_function(onednn_linear, (layer.args[0], *weights))
    reader.replace_all_uses_with(made)


def _shape(node: Node) -> Any:
    return getattr(node.meta.get("val"), "shape", None)
