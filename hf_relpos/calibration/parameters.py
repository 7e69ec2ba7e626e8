"""The parameters of a scheme as one vector, with the penalty and the preconditioner of their fit."""

import torch

from ..model.scheme import Scheme
from .tables import Tables, tables_of


class Parameters:
    """Some parameters of a scheme as one vector θ: the tables they make, and a penalty that keeps them sensible.

    The penalty is ridge · θ² plus smooth · (difference of neighbouring distances)², so that a distance which the text
    never shows takes the value of its neighbours. Both are relative to the mean curvature of a head.
    """

    def __init__(self, scheme: Scheme, letters: str, length: int):
        """
        Args:
            letters: of the tables to fit; parameters that make none of them are left out.
            length: tables are made for offsets up to length − 1 in size.
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
        self.letters = "".join(letter for letter, _ in made)
        self.shapes = [scheme.get_parameter(name).shape for name in self.names]
        self.mass: dict[str, torch.Tensor] = {}
        self.whiten: dict[str, torch.Tensor] = {}
        self.ridge: dict[str, torch.Tensor] = {}
        self.smooth: dict[str, torch.Tensor] = {}

    def _made(self) -> Tables:
        with torch.enable_grad():
            for name in self.names:
                self.scheme.get_parameter(name).requires_grad_(True)
            return tables_of(self.scheme, self.length, self.letters)

    def flat(self) -> torch.Tensor:
        """θ, float64."""
        return torch.cat([self.scheme.get_parameter(name).detach().double().flatten() for name in self.names])

    def split(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """A vector as tensors of the parameters' shapes."""
        parts = vector.split([shape.numel() for shape in self.shapes])
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}

    @torch.no_grad()
    def assign(self, vector: torch.Tensor) -> None:
        """Set the parameters to θ."""
        for name, part in self.split(vector).items():
            self.scheme.get_parameter(name).copy_(part)

    @torch.no_grad()
    def tables(self, vector: torch.Tensor) -> Tables:
        """The tables that θ makes; the parameters stay as they are."""
        before = self.flat()
        self.assign(vector)
        made = tables_of(self.scheme, self.length, self.letters)
        self.assign(before)
        return made

    def pull(self, gradient: Tables) -> torch.Tensor:
        """A gradient by table entry, per head, as gradient by θ."""
        made = self._made()
        outputs, gradients = [], []
        for letter, tensor in made.items():
            per_head = getattr(gradient, letter)
            outputs.append(tensor)
            summed = per_head.sum(0, keepdim=True) if tensor.shape[0] == 1 else per_head
            gradients.append(summed.to(tensor.dtype))
        parts = torch.autograd.grad(outputs, [self.scheme.get_parameter(name) for name in self.names], gradients)
        return torch.cat([part.double().flatten() for part in parts])

    def weigh(self, curvature: Tables, features: dict[str, torch.Tensor], ridge: float, smooth: float) -> None:
        """Set penalty and preconditioner.

        Args:
            curvature: per table entry, how strongly the objective curves there.
            features: letter to the mean outer product of what the table is multiplied with, (H, d, d).
            ridge: weight of θ², in units of a parameter's mean curvature.
            smooth: of the squared differences, likewise.
        """
        for name, part in self.split(self.pull(curvature)).items():
            declared = self.scheme.linear_parameters[name]
            own = [letter for letter in declared.letters if letter in self.letters]
            where = tuple(i for i in range(part.dim()) if not (part.dim() == 3 and i == 0))
            typical = part.abs().mean(where, keepdim=True).clamp(min=1e-30)
            self.ridge[name], self.smooth[name] = ridge * typical, smooth * typical
            own_mass = part if declared.distance_axis is not None else typical
            self.mass[name] = own_mass + (ridge + 2 * smooth) * typical
            width = part.shape[-1]
            products = [features[letter] for letter in own if letter in features]
            if products and products[0].shape[-1] == width and part.dim() >= 2:
                mean = torch.stack(products).mean(0)
                if part.dim() == 2 or part.shape[0] == 1:
                    mean = mean.mean(0)
                trace = mean.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp(min=1e-30)
                identity = torch.eye(width, dtype=mean.dtype, device=mean.device)
                self.whiten[name] = torch.linalg.inv(mean / trace + 1e-2 * identity)

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
        """An approximate inverse of the normal matrix, times a vector."""
        out = []
        for name, part in self.split(vector).items():
            if name in self.whiten:
                part = torch.matmul(part, self.whiten[name])
            out.append((part / self.mass[name]).flatten())
        return torch.cat(out)
