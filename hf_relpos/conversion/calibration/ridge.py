"""Ridge regression of the residual of a linear layer on its inputs."""

import functools
from collections.abc import Callable, Sequence

import torch

from ...processes import Reduce


# Columns of a part of a Gram matrix. Only one product of each pair of parts is computed; the other is its transpose.
PART = 512


def gram(x: torch.Tensor) -> torch.Tensor:
    """xᵀx, (D, D), of x (N, D)."""
    width = x.shape[1]
    if width <= PART:
        return x.T @ x
    out = x.new_empty(width, width)
    for start in range(0, width, PART):
        columns = slice(start, min(start + PART, width))
        rows = torch.mm(x[:, columns].T, x[:, : columns.stop])
        out[columns, : columns.stop] = rows
        out[:start, columns] = rows[:, :start].T
    return out


def best_of(strengths: Sequence[float], error: Callable[[float], float]) -> float:
    """The strength with the smallest error, searched from the middle in the direction in which the error falls.

    This is the best strength if the error first falls and then rises, as on held-out text.
    """
    ordered = sorted(set(strengths))
    tried: dict[int, float] = {}

    def at(index: int) -> float:
        if not 0 <= index < len(ordered):
            return float("inf")
        if index not in tried:
            tried[index] = error(ordered[index])
        return tried[index]

    best = len(ordered) // 2
    step = -1 if at(best - 1) <= at(best) else 1
    while at(best + step) < at(best):
        best += step
    return ordered[best]


class Ridge:
    """Sums for the regression of outputs on inputs, which can be merged, and its solution for any strength.

    Inputs and outputs are centred, so that there is a bias, which is not penalised.
    """

    def __init__(self, inputs: int, outputs: int, device: torch.device | str = "cpu"):
        zeros = functools.partial(torch.zeros, dtype=torch.float64, device=device)
        self.count = zeros(())
        self.x = zeros(inputs)
        self.y = zeros(outputs)
        self.xx = zeros(inputs, inputs)
        self.xy = zeros(inputs, outputs)
        self.yy = zeros(())

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add rows: x (N, inputs) and y (N, outputs)."""
        self.count += len(x)
        self.x += x.sum(0, dtype=torch.float64)
        self.y += y.sum(0, dtype=torch.float64)
        self.xx += gram(x)
        self.xy += x.T @ y
        self.yy += y.double().square().sum()

    def merge(self, other: "Ridge") -> "Ridge":
        """The merged sums of both."""
        total = Ridge(len(self.x), len(self.y), self.x.device)
        for name, tensor in vars(self).items():
            setattr(total, name, tensor + getattr(other, name))
        return total

    def reduced(self, reduce: Reduce) -> "Ridge":
        """The sums over processes."""
        total = Ridge(len(self.x), len(self.y), self.x.device)
        for name, tensor in vars(self).items():
            setattr(total, name, reduce(tensor.clone()))
        return total

    def solver(self) -> Callable[[float], tuple[torch.Tensor, torch.Tensor]]:
        """Function from a strength to the minimiser W (inputs, outputs), b of Σ|y − xW − b|² + strength · t · |W|².

        t is the mean of the inputs' sums of squares, which makes the strength dimensionless.
        """
        mean_x, mean_y = self.x / self.count, self.y / self.count
        xx = self.xx.addr(mean_x, mean_x, alpha=-float(self.count))
        xy = self.xy.addr(mean_x, mean_y, alpha=-float(self.count))
        squares = xx.diagonal().clone()
        t = squares.mean().clamp(min=1e-30)

        def solve(strength: float) -> tuple[torch.Tensor, torch.Tensor]:
            xx.diagonal().copy_(squares + strength * t)
            weights = torch.cholesky_solve(xy, torch.linalg.cholesky(xx))
            return weights, mean_y - mean_x @ weights

        return solve

    def error(self, weights: torch.Tensor, bias: torch.Tensor) -> float:
        """Mean over rows of |y − xW − b|²."""
        total = (
            self.yy
            - 2 * (weights * self.xy).sum()
            - 2 * (bias * self.y).sum()
            + ((self.xx @ weights) * weights).sum()
            + 2 * (self.x @ weights) @ bias
            + self.count * (bias @ bias)
        )
        return float(total / self.count.clamp(min=1))
