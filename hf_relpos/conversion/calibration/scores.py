"""Fit of the score tables A, B, c and u to a teacher's attention.

For query rows i of a text, with the teacher's attention a^T and the student's scores s(θ) = s⁰ + Jθ, which are linear
in the entries θ of the tables,

    F(θ) = Σ_i KL(a^T_i ‖ softmax s_i(θ)) + penalty(θ)

is convex (multinomial logistic regression). Its second-order expansion around the teacher is a weighted least-squares
problem, Σ_i Var_{j~a^T_i}(s^T_ij − s_ij(θ)), which gives the first step; the other steps are Newton's. The normal
matrix couples all distances and is never built: conjugate gradients only need its products, and J is a pair of
Toeplitz matrices.

A fit reads the text only through sums over batches. Processes with different batches add up their sums (`Reduce`), so
that all solve the same problem.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from .blocks import Block
from .solver import Fit, conjugate_gradients
from .tables import Tables, scores, scores_gradient


# Number of vectors whose outer products are in memory at a time.
MOMENT_CHUNK = 128


class ScoreFit(Fit):
    """Fit of the tables A, B, c and u so that the student's attention is closest to the teacher's."""

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
        """Multiply a vector of pairs by the covariance of each row under its attention."""
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
        """Set penalty and preconditioner from the curvature at the teacher's attention."""
        self.parameters.weigh(*self._curvature, ridge, smooth)

    @functools.cached_property
    def _curvature(self) -> tuple[Tables, dict[str, torch.Tensor]]:
        """The moments for `Parameters.weigh`; they do not depend on the strength of the penalties."""
        variances = [block.target * (1 - block.target) * block.weight for block in self.blocks]
        sums = iter(variances)

        def add(block: Block, into: Tables) -> None:
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

        curvature = self.collect(add)
        for _, tensor in curvature.items():
            tensor.mul_(self.parameters.scheme.scale)  # `pull` multiplies by the other factor
        return curvature, self._moments(variances)

    def _moments(self, variances: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Mean outer product of the vectors multiplied with each of a parameter's N rows, (H, N, d, d), by name.

        The vectors are q for A and k for B. Each row has an arbitrary factor. All blocks are read, since the fit takes
        five times as many iterations with moments from a sample.
        """
        parameters, moments = self.parameters, {}
        for name, basis in parameters.bases().items():
            letters = parameters.letters_of(name)
            size = parameters.scheme.head_size
            total = torch.zeros(
                parameters.heads, basis.shape[1], size, size, dtype=torch.float64, device=parameters.device
            )
            for block, variance in zip(self.blocks, variances, strict=True):
                weights = block.part(basis[None])[0]  # (P, N)
                if "A" in letters:
                    mass = torch.matmul(block.unskew(variance), weights)
                    total += _weighted_products(mass.flatten(1, 2), block.query.flatten(1, 2))
                if "B" in letters:
                    columns = block.skew(weights.T[:, None].expand(-1, block.rows, -1).contiguous())  # (N, m, L)
                    mass = torch.einsum("hbij,nij->hbjn", variance, columns)
                    total += _weighted_products(mass.flatten(1, 2), block.key.flatten(1, 2))
            moments[name] = self.reduce(total)
        return moments

    def solve(
        self, ridge: float, smooth: float, newton: int = 3, iterations: int = 12, tolerance: float = 1e-3
    ) -> list[float]:
        """Fit the parameters in place.

        Args:
            newton: Newton steps after the first, quadratic step.
            iterations: conjugate gradient iterations of each step; twice as many with a diagonal preconditioner.
            tolerance: tolerance of conjugate gradients; Newton's method stops if a step gains less than this share.

        Returns:
            Objective per row at zero and after each step.
        """
        self.weigh(ridge, smooth)
        parameters = self.parameters
        iterations *= 1 if parameters.blocks else 2

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


def _weighted_products(mass: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Σ_i mass_in v_i v_iᵀ, (H, N, d, d), for mass (H, I, N) and vectors (H, I, d)."""
    total = mass.new_zeros(len(mass), mass.shape[2], vectors.shape[2] ** 2)
    for some, own in zip(mass.split(MOMENT_CHUNK, 1), vectors.split(MOMENT_CHUNK, 1), strict=True):
        products = (own[..., :, None] * own[..., None, :]).flatten(2)
        total.baddbmm_(some.mT, products)
    return total.unflatten(2, (vectors.shape[2], vectors.shape[2]))
