"""The parameters of a scheme as one vector, with the penalty and preconditioner of their fit."""

import torch

from ...schemes.scheme import Scheme
from .tables import Tables, tables_of


class Parameters:
    """Some parameters of a scheme as one vector θ, with their tables and a penalty.

    Tables depend linearly on θ, so the initial tables, `made`, give their derivative at any θ.

    The penalty is ridge · θ² plus smooth · (difference of neighbouring distances)², so that a distance which does not
    occur in the text gets the value of its neighbours. Both are relative to the mean curvature of a head.
    """

    def __init__(self, scheme: Scheme, letters: str, length: int):
        """
        Args:
            letters: letters of the tables to fit; parameters of other tables are excluded.
            length: tables cover offsets from −(length − 1) to length − 1.
        """
        self.scheme, self.letters, self.length = scheme, letters, length
        self.names = [name for name, _ in scheme.named_parameters() if name in scheme.linear_parameters]
        self.heads = scheme.num_heads
        with torch.enable_grad():
            made = self._made().items()
            if made:
                tensors = [scheme.get_parameter(name) for name in self.names]
                total = torch.stack([tensor.sum() for _, tensor in made]).sum()
                used = torch.autograd.grad(total, tensors, allow_unused=True)
                self.names = [name for name, part in zip(self.names, used, strict=True) if part is not None]
            else:
                self.names = []
        self.made = self._made()
        self.letters = "".join(letter for letter, _ in self.made.items())
        self.shapes = [scheme.get_parameter(name).shape for name in self.names]
        self.mass: dict[str, torch.Tensor] = {}
        self.blocks: dict[str, torch.Tensor] = {}
        self.ridge: dict[str, torch.Tensor] = {}
        self.smooth: dict[str, torch.Tensor] = {}

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.scheme.parameters()).device

    def _made(self) -> Tables:
        with torch.enable_grad():
            for name in self.names:
                self.scheme.get_parameter(name).requires_grad_(True)
            return tables_of(self.scheme, self.length, self.letters)

    def flat(self) -> torch.Tensor:
        """θ, float64."""
        return torch.cat([self.scheme.get_parameter(name).detach().double().flatten() for name in self.names])

    def split(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split a vector into tensors of the parameters' shapes."""
        parts = vector.split([shape.numel() for shape in self.shapes])
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}

    @torch.no_grad()
    def assign(self, vector: torch.Tensor) -> None:
        """Set the parameters to θ."""
        for name, part in self.split(vector).items():
            self.scheme.get_parameter(name).copy_(part)

    @torch.no_grad()
    def tables(self, vector: torch.Tensor) -> Tables:
        """The tables for θ; the parameters are not changed."""
        before = self.flat()
        self.assign(vector)
        made = tables_of(self.scheme, self.length, self.letters)
        self.assign(before)
        return made

    def pull(self, gradient: Tables) -> torch.Tensor:
        """Convert a gradient with respect to table entries, per head, to one with respect to θ."""
        outputs, gradients = [], []
        for letter, tensor in self.made.items():
            per_head = getattr(gradient, letter)
            outputs.append(tensor)
            summed = per_head.sum(0, keepdim=True) if tensor.shape[0] == 1 else per_head
            gradients.append(summed.to(tensor.dtype))
        tensors = [self.scheme.get_parameter(name) for name in self.names]
        parts = torch.autograd.grad(outputs, tensors, gradients, retain_graph=True)
        return torch.cat([part.double().flatten() for part in parts])

    def letters_of(self, name: str) -> str:
        """The letters of the fitted tables that depend on a parameter."""
        return "".join(letter for letter in self.scheme.linear_parameters[name].letters if letter in self.letters)

    def bases(self) -> dict[str, torch.Tensor]:
        """Nonnegative weights of the N rows of a parameter at each offset, (2 · length − 1, N), by name.

        They exist for parameters (H or 1, N, d) or (N, d) whose weighted rows add up to a table.
        """
        found = {}
        size = self.scheme.head_size
        for name, shape in zip(self.names, self.shapes, strict=True):
            if len(shape) not in (2, 3) or shape[-1] != size or self.letters_of(name) not in ("A", "B", "AB"):
                continue
            letter, columns = self.letters_of(name)[0], []
            for start in range(0, shape[-2], size):  # `size` rows at a time, each in another coordinate
                probe = {other: torch.zeros_like(part) for other, part in self.split(self.flat()).items()}
                rows = torch.arange(min(size, shape[-2] - start), device=self.device)
                probe[name][..., start + rows, rows] = 1
                made = getattr(self.tables(torch.cat([part.flatten() for part in probe.values()])), letter)
                columns.append(made.detach()[0, :, : len(rows)])
            basis = torch.cat(columns, -1)
            if self._is_sum_of_rows(name, letter, basis):
                found[name] = basis.abs()
        return found

    def _is_sum_of_rows(self, name: str, letter: str, basis: torch.Tensor) -> bool:
        """Whether a table is the sum of that parameter's rows, weighted by a basis."""
        probe = {other: torch.zeros_like(part) for other, part in self.split(self.flat()).items()}
        probe[name].copy_(torch.linspace(-1, 1, probe[name].numel(), device=self.device).cos().view_as(probe[name]))
        made = getattr(self.tables(torch.cat([part.flatten() for part in probe.values()])), letter)
        return torch.allclose(made, torch.matmul(basis, probe[name].to(basis.dtype)), rtol=0, atol=1e-4)

    def weigh(self, curvature: Tables, moments: dict[str, torch.Tensor], ridge: float, smooth: float) -> None:
        """Set penalty and preconditioner, which has one block for each row of a parameter.

        Args:
            curvature: curvature of the objective by table entry.
            moments: outer products of the vectors multiplied with each row, (H, N, d, d), by name and up to a factor;
                rows of other parameters have diagonal blocks.
            ridge: weight of θ², in units of a parameter's mean curvature.
            smooth: weight of the squared differences, likewise.
        """
        for name, part in self.split(self.pull(curvature)).items():
            declared = self.scheme.linear_parameters[name]
            where = tuple(i for i in range(part.dim()) if not (part.dim() == 3 and i == 0))
            typical = part.abs().mean(where, keepdim=True).clamp(min=1e-30)
            self.ridge[name], self.smooth[name] = ridge * typical, smooth * typical
            own_mass = part if declared.distance_axis is not None else typical.expand_as(part)
            penalty = (ridge + 2 * smooth) * typical
            self.mass[name] = own_mass + penalty
            if name in moments:
                moment = moments[name] if part.dim() == 3 and len(part) > 1 else moments[name].sum(0)
                size = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
                identity = torch.eye(part.shape[-1], dtype=moment.dtype, device=moment.device)
                shape = torch.where(size > 0, moment / size.clamp(min=1e-30), identity)
                row_mass = own_mass.abs().mean(-1)[..., None, None]
                self.blocks[name] = torch.linalg.inv(row_mass * shape + penalty[..., None] * identity)

    def penalty(self, vector: torch.Tensor) -> torch.Tensor:
        """P θ; the penalty is ½ θᵀPθ."""
        out = []
        for name, part in self.split(vector).items():
            total = self.ridge[name] * part
            axis = self.scheme.linear_parameters[name].distance_axis
            if axis is not None and part.shape[axis] > 1:
                step = self.smooth[name] * part.diff(dim=axis)
                edge = list(part.shape)
                edge[axis] = 1
                zeros = part.new_zeros(edge)
                total = total + torch.cat([zeros, step], axis) - torch.cat([step, zeros], axis)
            out.append(total.flatten())
        return torch.cat(out)

    def precondition(self, vector: torch.Tensor) -> torch.Tensor:
        """Multiply a vector by an approximate inverse of the normal matrix."""
        out = []
        for name, part in self.split(vector).items():
            if name in self.blocks:
                out.append(torch.matmul(self.blocks[name], part[..., None]).flatten())
            else:
                out.append((part / self.mass[name]).flatten())
        return torch.cat(out)
