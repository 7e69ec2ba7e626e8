"""Fit of the value table V by least squares, since out_i = Σ_j a_ij (v_j + V_r) is linear in V."""

from collections.abc import Callable, Iterator, Sequence

import torch

from ...processes import Reduce, local_sum
from .blocks import Block
from .parameters import Parameters
from .solver import Fit, conjugate_gradients
from .tables import Tables


class ValueFit(Fit):
    """Fit of the table V so that the heads' outputs are closest to the teacher's, given the student's attention."""

    def __init__(
        self,
        parameters: Parameters,
        blocks: Sequence[Block],
        attentions: Sequence[torch.Tensor],
        reduce: Reduce = local_sum,
    ):
        """
        Args:
            attentions: attention weights of the student for each block, (H, B, m, L).
        """
        super().__init__(parameters, blocks, reduce)
        self.attentions = attentions

    def solve(self, ridge: float, smooth: float, iterations: int = 20, tolerance: float = 1e-4) -> tuple[float, float]:
        """Fit the parameters in place; returns the mean square errors before and after."""
        parameters = self.parameters
        index = [block.unskew(attention) for block, attention in zip(self.blocks, self.attentions, strict=True)]

        masses = iter(index)

        def curvature(block: Block, into: Tables) -> None:
            block.part(_values(into)).add_((next(masses).square() * block.weight).sum((1, 2))[..., None])

        parameters.weigh(self.collect(curvature), {}, ridge, smooth)

        def added(block: Block, mass: torch.Tensor, tables: Tables) -> torch.Tensor:
            return torch.matmul(mass.flatten(1, 2), block.part(_values(tables))).view_as(block.target_output)

        def back(block: Block, mass: torch.Tensor, outputs: torch.Tensor, into: Tables) -> None:
            weighted = (outputs * block.weight).flatten(1, 2)
            block.part(_values(into)).add_(torch.matmul(mass.flatten(1, 2).transpose(-1, -2), weighted))

        missing = [
            block.target_output - torch.matmul(attention, block.values)
            for block, attention in zip(self.blocks, self.attentions, strict=True)
        ]

        def over_blocks(outputs: Callable[[int], torch.Tensor]) -> torch.Tensor:
            numbers = iter(range(len(self.blocks)))

            def add(block: Block, into: Tables) -> None:
                at = next(numbers)
                back(block, index[at], outputs(at), into)

            return parameters.pull(self.collect(add))

        def product(vector: torch.Tensor) -> torch.Tensor:
            tables = parameters.tables(vector)
            fitted = over_blocks(lambda at: added(self.blocks[at], index[at], tables))
            return fitted + parameters.penalty(vector)

        right = over_blocks(lambda at: missing[at])
        best = conjugate_gradients(product, right, parameters.precondition, iterations, tolerance)
        tables = parameters.tables(best)

        def squares(add: bool) -> Iterator[torch.Tensor]:
            for at, block in enumerate(self.blocks):
                rest = missing[at] - added(block, index[at], tables) if add else missing[at]
                yield (rest.square() * block.weight).sum()

        count = self.sum(
            block.weight.sum() * len(block.target_output) * block.target_output.shape[3] for block in self.blocks
        )
        before, after = self.sum(squares(False)) / count, self.sum(squares(True)) / count
        parameters.assign(best)
        return before, after


def _values(tables: Tables) -> torch.Tensor:
    """The table V."""
    assert tables.V is not None
    return tables.V
