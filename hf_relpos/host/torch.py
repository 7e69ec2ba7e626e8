"""What the package uses of PyTorch beyond its documented interface; `declarations` says what is done without it."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode


# A context whose `__torch_dispatch__` sees the operations of this thread, below autograd.
DispatchMode = TorchDispatchMode


def has_onednn_linear() -> bool:
    """Whether PyTorch has oneDNN's operator for linear layers."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def fits_onednn_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether oneDNN's operators for linear layers, which check none of this, may read these tensors of float32.

    Where they do not fit, the operators read beyond the storage of a bias, whose strides and number of dimensions they
    ignore, or raise errors that name no tensor. They copy rows of any strides.

    Args:
        rows: (…, D), at least one row and one feature.
        weight: (E, D), with the elements of a row or of a column adjacent, and no two at one address.
        bias: (E,), contiguous.
    """
    if not all(_is_dense_float32(each) for each in (rows, weight, bias) if each is not None):
        return False
    if rows.dim() < 2 or weight.dim() != 2 or rows.shape[-1] != weight.shape[1]:
        return False
    (features, size), (by_feature, by_element) = weight.shape, weight.stride()
    fits = (by_element == 1 and by_feature >= size) or (by_feature == 1 and by_element >= features)
    return fits and (bias is None or (bias.shape == (features,) and bias.is_contiguous()))


def _is_dense_float32(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
    )


def onednn_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "none", variant: str = ""
) -> torch.Tensor:
    """`torch.nn.functional.linear` by oneDNN, of tensors for which `fits_onednn_linear` is true.

    They may be rounded to bfloat16, and the weight packed, after that.
    """
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, activation, [], variant)
    return out


def onednn_linear_plus(
    rows: torch.Tensor, others: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`onednn_linear` and the sum with others of its shape."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, others, weight, bias, "add")
    return out


def has_packed_weights() -> bool:
    """Whether PyTorch has oneDNN's operator that packs the weight of a linear layer."""
    return has_onednn_linear() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a weight, (E, D), for which `fits_onednn_linear` is true, in oneDNN's own layout."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def onednn_matmul() -> Any:
    """Where the option `fp32_precision` of oneDNN's products is; None if PyTorch does not have it."""
    return getattr(torch.backends.mkldnn, "matmul", None) if torch.backends.mkldnn.is_available() else None


QUANTIZERS = "torch.ao.quantization.quantize"


def before_quantization(action: Callable[[torch.nn.Module], object]) -> None:
    """Call `action` with each model that `quantize_dynamic` and its kin of the module `QUANTIZERS` are to change."""
    module: Any = sys.modules[QUANTIZERS]
    propagate: Any = getattr(module, "propagate_qconfig_", None)

    def propagate_after(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        action(model)
        return propagate(model, *args, **kwargs)

    if propagate is not None:
        module.propagate_qconfig_ = functools.wraps(propagate)(propagate_after)


def multiply_matrices_int8(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The product in int32 of int8 matrices, (N, D) and (D, E).

    The operator checks shapes and dtypes. It is wrong for expanded matrices, and reads other memory where a dimension
    of size 1 has another stride than in a new tensor. `contiguous` leaves such strides, `flatten` and `view` do not.
    """
    return torch._int_mm(*(each.flatten().view(each.shape) for each in (rows, columns)))


def has_packed_int8() -> bool:
    """Whether PyTorch has oneDNN's operators for packed weights in int8."""
    names = ("qlinear_prepack", "qlinear_pointwise")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.onednn, name) for name in names)


def pack_int8(weight: torch.Tensor) -> torch.Tensor:
    """A weight in int8, (E, D), contiguous, in oneDNN's own layout."""
    packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(weight, None)
    return packed


def multiply_packed_int8(
    rows: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    """The product in float32 of rows in int8, (N, D), and a weight of `pack_int8`, times the scales of its rows, (E,).

    The operator takes rows in uint8 around 128: with int8 it is a thousand times as slow where there is no AMX. Rows
    are a new tensor, which is written to, with the D of the weight; scales and zeros, of int64, are contiguous.
    """
    shifted = rows.contiguous().view(torch.uint8).bitwise_xor_(128)
    out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        shifted, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return out


def counted_writes(tensor: torch.Tensor) -> int:
    """How many writes to a tensor PyTorch has counted; 0 for tensors of inference mode, of which it counts none."""
    return 0 if tensor.is_inference() else tensor._version


def assert_later(condition: torch.Tensor, message: str) -> None:
    """An assertion that a graph holds, and that does not wait for an accelerator."""
    torch._assert_async(condition, message)


def has_modes() -> bool:
    """Whether contexts that see operations are on in this thread, such as a default device."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


def hooks_of_all_modules() -> bool:
    """Whether anybody has registered a hook for every module."""
    module: Any = torch.nn.modules.module
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    return any(getattr(module, f"_global_{kind}_hooks") for kind in kinds)


def at_least_graphs(limit: int) -> Any:
    """A context in which `torch.compile` keeps at least so many graphs of one function."""
    return torch._dynamo.config.patch(recompile_limit=limit)


@functools.cache
def _written_arguments(operator: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of the arguments that an operator writes to."""
    arguments = enumerate(operator._schema.arguments)
    return tuple((at, each.name) for at, each in arguments if each.alias_info and each.alias_info.is_write)


def written_tensors(operator: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a call of an operator writes to."""
    found = [args[at] if at < len(args) else kwargs.get(name) for at, name in _written_arguments(operator)]
    lists = [value if isinstance(value, list | tuple) else (value,) for value in found]
    return [each for value in lists for each in value if isinstance(each, torch.Tensor)]


def writes_to_first(operator: Any) -> bool:
    """Whether a function is an operator that writes to its first argument."""
    return hasattr(operator, "_schema") and any(at == 0 for at, _ in _written_arguments(operator))


def binding_of(operator: Any) -> Any:
    """PyTorch's own function for an operator, which Python calls in half the time; the operator if there is none."""
    schema = getattr(operator, "_schema", None)
    space, _, name = ("" if schema is None else schema.name).partition("::")
    places = (torch, torch._C._nn) if space == "aten" else ()
    return next((getattr(place, name) for place in places if hasattr(place, name)), operator)


def unflatten(values: Any, spec: Any) -> Any:
    """Values nested as those were that `torch.export` gave a spec."""
    return _pytree.tree_unflatten(values, spec)


def without_values(kind: type[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """A tensor of a subclass, with a shape and a dtype, and no memory."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype)


def without_overrides(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of PyTorch, called as if no class of its arguments had a `__torch_function__`."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def map_tensors(kind: type[Any], function: Any, values: Any) -> Any:
    """Nested values with a function of each tensor of a subclass in its place."""
    return _pytree.tree_map_only(kind, function, values)
