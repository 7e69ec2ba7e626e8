"""Closed-form fits of relative terms to a teacher's attention: sums over batches, solved by linear algebra.

Scores. For query rows i of a text, with the teacher's attention a^T and the student's scores s(θ) = s⁰ + Jθ, where θ
are the entries of the tables A, B, c and u, on which the scores depend linearly,

    F(θ) = Σ_i KL(a^T_i ‖ softmax s_i(θ)) + penalty(θ)

is convex (multinomial logistic regression). Its second-order expansion around the teacher is a weighted least-squares
problem, Σ_i Var_{j~a^T_i}(s^T_ij − s_ij(θ)); that gives the first step, Newton's method the others. The normal matrix
couples all distances and is never built: conjugate gradients need its products only, and J is a pair of Toeplitz
matrices: strided views, no gather.

Values. out_i = Σ_j a_ij (v_j + V_r) is linear in V: least squares on the attention mass per distance.

Outputs. `Ridge` regresses what is still missing on the inputs of a linear layer.

Everything a fit reads of the text is a sum over batches, so that processes which hold different batches add theirs up
(`Reduce`) and all solve the same problem.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..model.context import AttentionContext
from ..model.formula import Table
from ..model.scheme import Scheme


# Query rows of a block, and keys of a tile of the key-side product.
ROWS = 32

# Adds up a tensor over processes, in place.
Reduce = Callable[[torch.Tensor], torch.Tensor]


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """`Reduce` of a single process."""
    return tensor


class Block:
    """Up to `ROWS` consecutive query rows of several windows of one length, with all their keys.

    Tensors have the heads first, so that all windows of a head are one matrix product, and the rows in descending
    order, so that the offset grows with the row as it does with the key. m rows, L keys, and P = L + m − 1 offsets.

    Attributes:
        first: place of the first row.
        query: the student's q, (H, B, m, d).
        tiles: the student's k in tiles of keys, padded with zeros, (H, T, B, ROWS, d): a tile needs few offsets.
        content: the student's scores without what is fitted, (H, B, m, L); −inf at hidden keys.
        target: the teacher's attention, (H, B, m, L); 0 at hidden keys, rows sum to 1.
        weight: of each row, (B, m, 1); 0 for padding.
        values: the student's v, (H, B, L, d).
        wanted: the teacher's output of each head, (H, B, m, d).
    """

    def __init__(
        self,
        first: int,
        query: torch.Tensor,
        key: torch.Tensor,
        content: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor,
        values: torch.Tensor,
        wanted: torch.Tensor,
    ):
        """
        Args:
            query, content, target, wanted: as above, but (B, H, m, …), rows in ascending order.
            key, values: (B, H, L, d).
            weight: (B, m).
        """
        self.first = first
        self.rows, self.length = content.shape[2:]
        self.span = self.length + self.rows - 1
        self.query, self.content, self.target, self.wanted = (
            tensor.transpose(0, 1).flip(2).contiguous() for tensor in (query, content, target, wanted)
        )
        padded = nn.functional.pad(key.transpose(0, 1), (0, 0, 0, -self.length % ROWS))
        self.tiles = padded.unflatten(2, (-1, ROWS)).transpose(1, 2).contiguous()
        self.values = values.transpose(0, 1).contiguous()
        self.weight = weight.flip(1)[..., None].contiguous()

    @property
    def key(self) -> torch.Tensor:
        """k, (H, B, L, d)."""
        return self.tiles.transpose(1, 2).flatten(2, 3)[:, :, : self.length]

    def part(self, table: torch.Tensor) -> torch.Tensor:
        """The entries of a table over all offsets, (H or 1, 2N − 1, …), that occur here, (H or 1, P, …)."""
        low = table.shape[1] // 2 + 1 - self.first - self.rows
        return table[:, low : low + self.span]

    @staticmethod
    def _diagonals(tensor: torch.Tensor, width: int) -> torch.Tensor:
        """The view (…, N, width) of (…, N, M), M ≥ N + width − 1, whose entry (n, w) is entry (n, n + w)."""
        tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
        strides = (*tensor.stride()[:-2], tensor.shape[-1] + 1, 1)
        return tensor.as_strided((*tensor.shape[:-1], width), strides, tensor.storage_offset())

    def by_pair(self, by_offset: torch.Tensor) -> torch.Tensor:
        """(…, m, P), a row per query and a column per offset, to (…, m, L), a column per key: a view."""
        return self._diagonals(by_offset, self.length)

    def by_offset(self, by_pair: torch.Tensor) -> torch.Tensor:
        """The way back: (…, m, L) to (…, m, P), zero where an offset does not occur in a row."""
        out = by_pair.new_zeros(*by_pair.shape[:-1], self.span)
        self.by_pair(out).copy_(by_pair)
        return out

    def query_scores(self, table: torch.Tensor) -> torch.Tensor:
        """q_i·A_r, (H, B, m, L), for A over all offsets, (H or 1, 2N − 1, d)."""
        rows = self.part(table).transpose(-1, -2)
        by_offset = torch.matmul(self.query.flatten(1, 2), rows)
        return self.by_pair(by_offset.unflatten(1, (-1, self.rows)))

    def query_gradient(self, by_offset: torch.Tensor) -> torch.Tensor:
        """Σ over rows of w_ir q_i, (H, P, d), for w (H, B, m, P)."""
        return torch.matmul(by_offset.flatten(1, 2).transpose(-1, -2), self.query.flatten(1, 2))

    def key_scores(self, table: torch.Tensor) -> torch.Tensor:
        """k_j·B_r, (H, B, m, L), for B over all offsets, (H or 1, 2N − 1, d)."""
        heads, tiles, batch = self.tiles.shape[:3]
        rows = self.part(table).expand(heads, -1, -1)
        rows = nn.functional.pad(rows, (0, 0, 0, tiles * ROWS + self.rows - 1 - rows.shape[1]))
        windows = rows.unfold(1, ROWS + self.rows - 1, ROWS)  # (H, T, d, ROWS + m − 1)
        tile_scores = torch.matmul(self.tiles.flatten(2, 3), windows).unflatten(2, (batch, ROWS))
        pairs = self._diagonals(tile_scores, self.rows)  # (H, T, B, ROWS, m)
        return pairs.permute(0, 2, 4, 1, 3).flatten(3)[..., : self.length]

    def key_gradient(self, pairs: torch.Tensor) -> torch.Tensor:
        """Σ over pairs of one offset of w_ij k_j, (H, P, d), for w (H, B, m, L)."""
        heads, tiles, batch = self.tiles.shape[:3]
        width = ROWS + self.rows - 1
        padded = nn.functional.pad(pairs, (0, tiles * ROWS - self.length)).unflatten(3, (tiles, ROWS))
        spread = pairs.new_zeros(heads, tiles, batch, ROWS, width)
        self._diagonals(spread, self.rows).copy_(padded.permute(0, 3, 1, 4, 2))
        parts = torch.matmul(spread.flatten(2, 3).transpose(-1, -2), self.tiles.flatten(2, 3))
        total = pairs.new_zeros(heads, tiles * ROWS + self.rows - 1, parts.shape[-1])
        for tile in range(tiles):
            total[:, tile * ROWS : tile * ROWS + width] += parts[:, tile]
        return total[:, : self.span]


@dataclass
class Tables:
    """The terms of one layer by offset, with their scale: what scores and outputs depend on linearly.

    Attributes:
        A, B, V: (H or 1, 2N − 1, d), or None.
        c: (H or 1, 2N − 1), or None.
        u: (H, d), or None.
    """

    A: torch.Tensor | None = None
    B: torch.Tensor | None = None
    c: torch.Tensor | None = None
    u: torch.Tensor | None = None
    V: torch.Tensor | None = None

    def items(self) -> list[tuple[str, torch.Tensor]]:
        """Letter and tensor of those there are."""
        return [(letter, tensor) for letter, tensor in vars(self).items() if tensor is not None]


def tables_of(scheme: Scheme, length: int, only: str = "ABcuV") -> Tables:
    """What a scheme adds to a call of `length` tokens, by offset.

    Raises:
        ValueError: for terms that are not sums of A, B, c, c', u and V by offset.
    """
    parameter = next(scheme.parameters())
    context = AttentionContext(length, length, device=parameter.device, dtype=parameter.dtype)
    terms = scheme.terms(context)
    if terms.dense or terms.gain or terms.feature_gain or terms.allow or terms.rotate:
        raise ValueError(f"the scheme {scheme.name!r} has terms that are not tables of distances")
    offsets = context.offsets(parameter.device)

    def full(tables: Sequence[Table], scale: float) -> torch.Tensor | None:
        if any(table.relation is not None for table in tables):
            raise ValueError(f"the scheme {scheme.name!r} has tables of another relation than the distance")
        parts = [table.rows[:, table.row_of(offsets)] * scale for table in tables]
        return sum(parts) if parts else None

    s = scheme.scale
    inner, outer = full(terms.c, s), full(terms.c_outer, 1.0)
    found = {
        "A": full(terms.A, s),
        "B": full(terms.B, s),
        "c": inner if outer is None else outer if inner is None else inner + outer,
        "u": None if terms.u is None else terms.u * s,
        "V": full(terms.V, 1.0),
    }
    return Tables(**{letter: tensor for letter, tensor in found.items() if letter in only})


def scores(tables: Tables, block: Block) -> torch.Tensor | float:
    """Jθ: what the tables add to the scores of a block, (H, B, m, L)."""
    total = 0.0
    if tables.A is not None:
        total = total + block.query_scores(tables.A)
    if tables.B is not None:
        total = total + block.key_scores(tables.B)
    if tables.c is not None:
        by_offset = block.part(tables.c)[:, None].expand(-1, block.rows, -1)
        total = total + block.by_pair(by_offset)[:, None]
    if tables.u is not None:
        total = total + torch.einsum("hbjd,hd->hbj", block.key, tables.u)[:, :, None]
    return total


def scores_gradient(tables: Tables, block: Block, pairs: torch.Tensor, into: Tables) -> None:
    """Jᵀw for w (H, B, m, L), added to `into`, which is per head."""
    if tables.A is not None or tables.c is not None:
        by_offset = block.by_offset(pairs)
    if tables.A is not None:
        block.part(into.A).add_(block.query_gradient(by_offset))
    if tables.B is not None:
        block.part(into.B).add_(block.key_gradient(pairs))
    if tables.c is not None:
        block.part(into.c).add_(by_offset.sum((1, 2)))
    if tables.u is not None:
        into.u.add_(torch.einsum("hbij,hbjd->hd", pairs, block.key))


def zeros_like(tables: Tables, heads: int) -> Tables:
    """Zeros of the same kind, per head, in float64."""
    return Tables(
        **{
            letter: tensor.new_zeros((heads, *tensor.shape[1:]), dtype=torch.float64)
            for letter, tensor in tables.items()
        }
    )


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
                used = torch.autograd.grad(sum(tensor.sum() for _, tensor in made), tensors, allow_unused=True)
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
        outputs, given = [], []
        for letter, tensor in made.items():
            wanted = getattr(gradient, letter)
            outputs.append(tensor)
            given.append((wanted.sum(0, keepdim=True) if tensor.shape[0] == 1 else wanted).to(tensor.dtype))
        parts = torch.autograd.grad(outputs, [self.scheme.get_parameter(name) for name in self.names], given)
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
                mean = sum(products) / len(products)
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
                nothing = part.new_zeros(edge)
                total = total + torch.cat([nothing, step], axis) - torch.cat([step, nothing], axis)
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


def conjugate_gradients(
    product: Callable[[torch.Tensor], torch.Tensor],
    right: torch.Tensor,
    precondition: Callable[[torch.Tensor], torch.Tensor],
    iterations: int,
    tolerance: float,
) -> torch.Tensor:
    """Solve M x = right for symmetric positive M, given as a product.

    Stops after `iterations`, or once the residual is below `tolerance` of the right-hand side (2-norm).
    """
    x = torch.zeros_like(right)
    residual = right.clone()
    z = precondition(residual)
    direction = z.clone()
    rz = float(residual @ z)
    goal = tolerance * float(right.norm())
    for _ in range(iterations):
        if rz <= 0 or float(residual.norm()) <= goal:
            break
        along = product(direction)
        curvature = float(direction @ along)
        if curvature <= 0:
            break
        x += (rz / curvature) * direction
        residual -= (rz / curvature) * along
        z = precondition(residual)
        previous, rz = rz, float(residual @ z)
        direction = z + (rz / previous) * direction
    return x


class Fit:
    """What the fits of scores and values have in common: θ, the blocks of this process, and the sum over processes."""

    def __init__(self, parameters: Parameters, blocks: Sequence[Block], reduce: Reduce = alone):
        self.parameters, self.blocks, self.reduce = parameters, blocks, reduce

    def collect(self, add: Callable[[Block, Tables], None]) -> Tables:
        """Sum over blocks and processes of what `add` adds to per-head tables."""
        shapes = self.parameters.tables(self.parameters.flat())
        total = zeros_like(shapes, self.parameters.heads)
        for block in self.blocks:
            add(block, total)
        for letter, tensor in total.items():
            setattr(total, letter, self.reduce(tensor))
        return total

    def sum(self, values: Iterable[torch.Tensor]) -> float:
        """Sum over blocks and processes of numbers."""
        total = torch.zeros((), dtype=torch.float64)
        for value in values:
            total += value.double().cpu()
        return float(self.reduce(total))


class ScoreFit(Fit):
    """Tables A, B, c and u that bring the student's attention closest to the teacher's."""

    def attention(self, block: Block, tables: Tables) -> torch.Tensor:
        """The student's attention, (H, B, m, L)."""
        return torch.softmax(block.content + scores(tables, block), dim=-1)

    def divergence(self, tables: Tables, blocks: Sequence[Block] | None = None) -> tuple[float, float]:
        """Sum over rows of KL(teacher ‖ student), mean over heads, and the number of rows."""

        def parts():
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
                scores_gradient(tables, block, self._centred(scores(tables, block), next(index), block), into)

            return self.parameters.pull(self.collect(add)) + self.parameters.penalty(vector)

        return product

    def weigh(self, ridge: float, smooth: float) -> None:
        """Penalty and preconditioner, from the curvature under the teacher's attention."""
        here = self.parameters.tables(self.parameters.flat())

        free = [block.target * (1 - block.target) * block.weight for block in self.blocks]
        sums = iter(free)

        def curvature(block: Block, into: Tables) -> None:
            each = next(sums)
            query = block.query.square().mean(-1)[..., None]
            key = block.key.square().mean(-1)[:, :, None]
            if into.A is not None:
                block.part(into.A).add_(block.by_offset(each * query).sum((1, 2))[..., None])
            if into.B is not None:
                block.part(into.B).add_(block.by_offset(each * key).sum((1, 2))[..., None])
            if into.c is not None:
                block.part(into.c).add_(block.by_offset(each).sum((1, 2)))
            if into.u is not None:
                into.u.add_((each * key).sum((1, 2, 3))[:, None])

        features = {}
        for letter, axis in (("A", 3), ("B", 2), ("u", 2)):
            if getattr(here, letter) is not None:
                total = torch.zeros(
                    self.parameters.heads, *[self.parameters.scheme.head_size] * 2, dtype=torch.float64
                )
                for block, each in zip(self.blocks, free, strict=True):
                    vectors = block.query if letter == "A" else block.key
                    total += torch.einsum("hbi,hbid,hbie->hde", each.sum(axis), vectors, vectors)
                features[letter] = self.reduce(total)
        scaled = self.collect(curvature)
        for _, tensor in scaled.items():
            tensor.mul_(self.parameters.scheme.scale)  # the other factor comes with the way back to θ
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
        zero = parameters.tables(best)
        targets = [block.target for block in self.blocks]

        def missing(block: Block, into: Tables) -> None:
            spec = block.target > 1e-12
            gap = torch.where(spec, block.target.clamp(min=1e-12).log() - block.content, 0.0)
            scores_gradient(zero, block, self._centred(gap, block.target, block), into)

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

            def gradient(block: Block, into: Tables, index=index, tables=tables) -> None:
                scores_gradient(tables, block, (block.target - next(index)) * block.weight, into)

            right = parameters.pull(self.collect(gradient)) - parameters.penalty(best)
            product = self._product(attentions)
            step = conjugate_gradients(product, right, parameters.precondition, iterations, tolerance)
            size, gained = 1.0, False
            while size > 0.1:
                reached = objective(best + size * step)
                if reached < path[-1]:
                    gained = path[-1] - reached > tolerance * path[-1]
                    best = best + size * step
                    path.append(reached)
                    break
                size /= 2
            if not gained:
                break
        parameters.assign(best)
        return path


class ValueFit(Fit):
    """The table V that brings the heads' outputs closest to the teacher's, given the student's attention."""

    def __init__(
        self,
        parameters: Parameters,
        blocks: Sequence[Block],
        attentions: Sequence[torch.Tensor],
        reduce: Reduce = alone,
    ):
        """
        Args:
            attentions: the student's, (H, B, m, L), of each block.
        """
        super().__init__(parameters, blocks, reduce)
        self.attentions = attentions

    def solve(self, ridge: float, smooth: float, iterations: int = 20, tolerance: float = 1e-4) -> tuple[float, float]:
        """Fit the parameters in place; the mean square that was missing, and that is missing still."""
        parameters = self.parameters
        index = [block.by_offset(attention) for block, attention in zip(self.blocks, self.attentions, strict=True)]

        masses = iter(index)

        def curvature(block: Block, into: Tables) -> None:
            block.part(into.V).add_((next(masses).square() * block.weight).sum((1, 2))[..., None])

        parameters.weigh(self.collect(curvature), {}, ridge, smooth)

        def added(block: Block, mass: torch.Tensor, tables: Tables) -> torch.Tensor:
            return torch.matmul(mass.flatten(1, 2), block.part(tables.V)).view_as(block.wanted)

        def back(block: Block, mass: torch.Tensor, outputs: torch.Tensor, into: Tables) -> None:
            weighted = (outputs * block.weight).flatten(1, 2)
            block.part(into.V).add_(torch.matmul(mass.flatten(1, 2).transpose(-1, -2), weighted))

        missing = [
            block.wanted - torch.matmul(attention, block.values)
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

        def squares(add: bool):
            for at, block in enumerate(self.blocks):
                rest = missing[at] - added(block, index[at], tables) if add else missing[at]
                yield (rest.square() * block.weight).sum()

        count = self.sum(block.weight.sum() * len(block.wanted) * block.wanted.shape[3] for block in self.blocks)
        before, after = self.sum(squares(False)) / count, self.sum(squares(True)) / count
        parameters.assign(best)
        return before, after


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
