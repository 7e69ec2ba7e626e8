"""Fit of the score tables A, B, c and u to a teacher's attention.

For query rows i of a text, with the teacher's attention a^T and the student's scores s(θ) = s⁰ + Jθ, where θ are the
entries of the tables, on which the scores depend linearly,

    F(θ) = Σ_i KL(a^T_i ‖ softmax s_i(θ)) + penalty(θ)

is convex (multinomial logistic regression). Its second-order expansion around the teacher is a weighted least-squares
problem, Σ_i Var_{j~a^T_i}(s^T_ij − s_ij(θ)); that gives the first step, Newton's method the others. The normal matrix
couples all distances and is never built: conjugate gradients need its products only, and J is a pair of Toeplitz
matrices.

Everything a fit reads of the text is a sum over batches, so that processes which hold different batches add theirs up
(`Reduce`) and all solve the same problem.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from .blocks import Block
from .solver import Fit, conjugate_gradients
from .tables import Tables, scores, scores_gradient


class ScoreFit(Fit):
    """Tables A, B, c and u that bring the student's attention closest to the teacher's."""

    def attention(self, block: Block, tables: Tables) -> torch.Tensor:
        """The student's attention, (H, B, m, L)."""
        return torch.softmax(block.content + scores(tables, block), dim=-1)

    def divergence(self, tables: Tables, blocks: Sequence[Block] | None = None) -> tuple[float, float]:
        """Sum over rows of KL(teacher ‖ student), mean over heads, and the number of rows."""

        def parts() -> Iterator[torch.Tensor]:
            for block in self.blocks if blocks is None else blocks:
                logs = torch.log_softmax(block.content + scores(tables, block), dim=-1)
                cross = torch.where(block.target > 0, block.target * (block.target.log() - logs), 0.0)
                yield (cross.sum(-1, keepdim=True) * block.weight).sum() / len(cross)

        rows = (block.weight.sum() for block in (self.blocks if blocks is None else blocks))
        return self.sum(parts()), self.sum(rows)

    def _centred(self, pairs: torch.Tensor, attention: torch.Tensor, block: Block) -> torch.Tensor:
        """The covariance of each row under its attention, times a vector of pairs."""
        mean = (attention * pairs).sum(-1, keepdim=True)
        return attention * (pairs - mean) * block.weight

    def _product(self, attentions: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """M x = Jᵀ Cov J x + P x."""

        def product(vector: torch.Tensor) -> torch.Tensor:
            tables = self.parameters.tables(vector)
            index = iter(attentions)

            def add(block: Block, into: Tables) -> None:
                scores_gradient(block, self._centred(scores(tables, block), next(index), block), into)

            return self.parameters.pull(self.collect(add)) + self.parameters.penalty(vector)

        return product

    def weigh(self, ridge: float, smooth: float) -> None:
        """Penalty and preconditioner, from the curvature under the teacher's attention."""
        tables = self.parameters.tables(self.parameters.flat())
        variances = [block.target * (1 - block.target) * block.weight for block in self.blocks]
        sums = iter(variances)

        def curvature(block: Block, into: Tables) -> None:
            variance = next(sums)
            query = block.query.square().mean(-1)[..., None]
            key = block.key.square().mean(-1)[:, :, None]
            if into.A is not None:
                block.part(into.A).add_(block.unskew(variance * query).sum((1, 2))[..., None])
            if into.B is not None:
                block.part(into.B).add_(block.unskew(variance * key).sum((1, 2))[..., None])
            if into.c is not None:
                block.part(into.c).add_(block.unskew(variance).sum((1, 2)))
            if into.u is not None:
                into.u.add_((variance * key).sum((1, 2, 3))[:, None])

        features = {}
        for letter, axis in (("A", 3), ("B", 2), ("u", 2)):
            if getattr(tables, letter) is not None:
                total = torch.zeros(
                    self.parameters.heads, *[self.parameters.scheme.head_size] * 2, dtype=torch.float64
                )
                for block, variance in zip(self.blocks, variances, strict=True):
                    vectors = block.query if letter == "A" else block.key
                    total += torch.einsum("hbi,hbid,hbie->hde", variance.sum(axis), vectors, vectors)
                features[letter] = self.reduce(total)
        scaled = self.collect(curvature)
        for _, tensor in scaled.items():
            tensor.mul_(self.parameters.scheme.scale)  # `pull` multiplies by the other factor
        self.parameters.weigh(scaled, features, ridge, smooth)

    def solve(
        self, ridge: float, smooth: float, newton: int = 3, iterations: int = 12, tolerance: float = 1e-3
    ) -> list[float]:
        """Fit the parameters in place.

        Args:
            newton: steps of Newton's method after the first, quadratic one.
            iterations: of conjugate gradients in each.
            tolerance: of conjugate gradients; and Newton's method stops when a step gains less than this share.

        Returns:
            Objective per row at zero and after each step.
        """
        self.weigh(ridge, smooth)
        parameters = self.parameters

        def objective(vector: torch.Tensor) -> float:
            fit, rows = self.divergence(parameters.tables(vector))
            return (fit * parameters.heads + 0.5 * float(vector @ parameters.penalty(vector))) / rows

        best = torch.zeros_like(parameters.flat())
        path = [objective(best)]
        targets = [block.target for block in self.blocks]

        def missing(block: Block, into: Tables) -> None:
            visible = block.target > 1e-12
            gap = torch.where(visible, block.target.clamp(min=1e-12).log() - block.content, 0.0)
            scores_gradient(block, self._centred(gap, block.target, block), into)

        right = parameters.pull(self.collect(missing))
        step = conjugate_gradients(self._product(targets), right, parameters.precondition, iterations, tolerance)
        first = objective(step)
        if first < path[0]:
            best = step
            path.append(first)
        for _ in range(newton):
            tables = parameters.tables(best)
            attentions = [self.attention(block, tables) for block in self.blocks]
            index = iter(attentions)

            def gradient(block: Block, into: Tables, index: Iterator[torch.Tensor] = index) -> None:
                scores_gradient(block, (block.target - next(index)) * block.weight, into)

            right = parameters.pull(self.collect(gradient)) - parameters.penalty(best)
            product = self._product(attentions)
            step = conjugate_gradients(product, right, parameters.precondition, iterations, tolerance)
            size, gained = 1.0, False
            while size > 0.1:
                value = objective(best + size * step)
                if value < path[-1]:
                    gained = path[-1] - value > tolerance * path[-1]
                    best = best + size * step
                    path.append(value)
                    break
                size /= 2
            if not gained:
                break
        parameters.assign(best)
        return path
