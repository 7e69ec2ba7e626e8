"""Tensor parallelism: each process computes some heads of every layer, with the part of the terms that is theirs.

Terms come from parameters that every process holds. Those with an entry for each head are cut to the heads of the
process, and those that all heads share are used whole. The process then knows only its own heads' share of their
gradients, so the shares are summed over the processes: every parameter behind the terms gets its whole gradient, and
stays equal in all processes. This needs no knowledge of a scheme, only the axis of heads that `Terms` declares.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from .formula import Table, Terms


HEADS_STYLE = "relpos_heads"  # of self-attention, in a plan of tensor parallelism


class _SumGradients(torch.autograd.Function):
    """Identity whose gradient is summed over the processes of a group."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: "distributed.ProcessGroup") -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=ctx.group)
        return total, None


class _Gather(torch.autograd.Function):
    """Joins the last axes of all processes, given that each of them gets the whole gradient of the result."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: "distributed.ProcessGroup") -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
        distributed.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient.chunk(ctx.group.size(), dim=-1)[ctx.group.rank()], None


@dataclass(frozen=True)
class HeadGroup:
    """The heads of a layer that this process computes.

    Attributes:
        group: the processes that have the others.
        first: number of the first head here.
        count: number of heads here.
        total: H, the number of heads of all processes.
    """

    group: "distributed.ProcessGroup"
    first: int
    count: int
    total: int

    @classmethod
    def of(cls, mesh: "distributed.DeviceMesh", heads: int) -> "HeadGroup":
        """Make that of this process.

        Raises:
            ValueError: if the processes cannot have the same number of heads.
        """
        group = (mesh if mesh.ndim == 1 else mesh["tp"]).get_group()
        size = group.size()
        if heads % size:
            raise ValueError(f"tp_size = {size} does not divide num_attention_heads = {heads}; choose one that does")
        return cls(group, group.rank() * heads // size, heads // size, heads)

    def cut(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """Cut a tensor without gradients, whose axis has H entries or 1, to the heads here."""
        return tensor if tensor.shape[axis] == 1 else tensor.narrow(axis, self.first, self.count)

    def local(self, tensor: torch.Tensor, axis: int = 0) -> torch.Tensor:
        """As `cut`, for a tensor that every process has computed alike; its gradient is that of all heads."""
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor = _SumGradients.apply(tensor, self.group)
        return self.cut(tensor, axis)

    def terms(self, terms: Terms) -> Terms:
        """Return the terms of the heads here, given those of all heads. Rotations must be the same for all heads."""
        changed: dict[str, Any] = {}
        for name in (each.name for each in dataclasses.fields(terms)):
            value = getattr(terms, name)
            if name == "dense":
                changed[name] = tuple(self.local(bias, axis=1) for bias in value)
            elif isinstance(value, tuple):
                changed[name] = tuple(table.with_rows(self.local) for table in value)
            elif isinstance(value, Table):
                changed[name] = value.with_rows(self.local)
            elif isinstance(value, torch.Tensor):
                changed[name] = self.local(value)
        return dataclasses.replace(terms, **changed)

    def gathered(self, projection: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a projection (N, D) to (N, H·d), given one to the heads here. Its results must go into terms."""
        return lambda rows: _Gather.apply(projection(rows), self.group)


class HeadParallel(TensorParallelLayer):
    """The style of a module of self-attention whose projections are split by heads: it is told which ones it has."""

    def install_forward(self, module: Any, mesh: "distributed.DeviceMesh") -> nn.Module:
        """Set `head_group` of the module."""
        module.head_group = HeadGroup.of(mesh, module.num_attention_heads)
        return module

    def prepare_module_tp(self, module: Any, device_mesh: "distributed.DeviceMesh", **kwargs: Any) -> nn.Module:
        """As `install_forward`, for Transformers 5.14."""
        return self.install_forward(module, device_mesh)

    def shard_tensor(
        self, param: Any, tensor_idx: int | None = None, device: Any = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return a parameter of the scheme whole, for Transformers 5.14."""
        return param[...].to(device=device, dtype=dtype)


ALL_PARALLEL_STYLES.register(HEADS_STYLE, HeadParallel())
