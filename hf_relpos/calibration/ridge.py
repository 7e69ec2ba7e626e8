"""Ridge regression of what is missing in the output of a linear layer on its inputs."""

import torch

from ..processes import Reduce


class Ridge:
    """Sums for the regression of outputs on inputs, mergeable; and its solution for any strength.

    Inputs and outputs are centred, so that a bias goes with the weights and is not penalised.
    """

    def __init__(self, inputs: int, outputs: int):
        self.count = torch.zeros((), dtype=torch.float64)
        self.x = torch.zeros(inputs, dtype=torch.float64)
        self.y = torch.zeros(outputs, dtype=torch.float64)
        self.xx = torch.zeros(inputs, inputs, dtype=torch.float64)
        self.xy = torch.zeros(inputs, outputs, dtype=torch.float64)
        self.yy = torch.zeros((), dtype=torch.float64)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add rows: x (N, inputs) and y (N, outputs)."""
        self.count += len(x)
        self.x += x.sum(0, dtype=torch.float64)
        self.y += y.sum(0, dtype=torch.float64)
        self.xx += x.T @ x
        self.xy += x.T @ y
        self.yy += y.double().square().sum()

    def merge(self, other: "Ridge") -> "Ridge":
        """The sums of both."""
        total = Ridge(len(self.x), len(self.y))
        for name, tensor in vars(self).items():
            setattr(total, name, tensor + getattr(other, name))
        return total

    def reduced(self, reduce: Reduce) -> "Ridge":
        """The sums over processes."""
        total = Ridge(len(self.x), len(self.y))
        for name, tensor in vars(self).items():
            setattr(total, name, reduce(tensor.clone()))
        return total

    def solve(self, strength: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights W (inputs, outputs) and bias b that minimise Σ|y − xW − b|² + strength · t · |W|².

        t is the mean of the inputs' sums of squares, so that strength has no unit.
        """
        mean_x, mean_y = self.x / self.count, self.y / self.count
        xx = self.xx - self.count * torch.outer(mean_x, mean_x)
        xy = self.xy - self.count * torch.outer(mean_x, mean_y)
        t = xx.diagonal().mean().clamp(min=1e-30)
        eye = torch.eye(len(self.x), dtype=torch.float64)
        weights = torch.cholesky_solve(xy, torch.linalg.cholesky(xx + strength * t * eye))
        return weights, mean_y - mean_x @ weights

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
