"""The closed-form fits against dense float64 linear algebra, and what makes them mergeable."""

import itertools
import math

import pytest
import torch

from hf_relpos import RelPosBertConfig
from hf_relpos.attention.context import AttentionContext
from hf_relpos.attention.formula import attend
from hf_relpos.conversion.calibration.blocks import Block
from hf_relpos.conversion.calibration.parameters import Parameters
from hf_relpos.conversion.calibration.ridge import PART, Ridge, best_of, gram
from hf_relpos.conversion.calibration.scores import ScoreFit
from hf_relpos.conversion.calibration.solver import conjugate_gradients
from hf_relpos.conversion.calibration.tables import Tables, scores, scores_gradient, tables_of, zeros_like
from hf_relpos.conversion.calibration.values import ValueFit
from hf_relpos.schemes.registry import build_scheme


HEADS, SIZE = 2, 4


def scheme_of(name="tables", **options):
    config = RelPosBertConfig(
        hidden_size=HEADS * SIZE,
        num_attention_heads=HEADS,
        max_position_embeddings=64,
        position_embedding_type=name,
        position_options=options,
    )
    torch.manual_seed(0)
    scheme = build_scheme(config).double()
    scheme.init_weights(0.5)
    return scheme


def block_of(length, first, rows, batch=3, seed=0, scheme=None):
    """A block whose target is the attention of a random teacher, or of the given scheme."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    query, key, values = (draw(batch, HEADS, length, SIZE) for _ in range(3))
    visible = torch.ones(batch, 1, length, length, dtype=torch.bool)
    visible[-1, :, :, length - 3 :] = False  # padding
    content = (query @ key.transpose(-1, -2)) * SIZE**-0.5
    content = content.masked_fill(~visible, -math.inf)
    at = slice(first, first + rows)
    if scheme is None:
        wanted = torch.softmax(content + draw(*content.shape), -1)
        outputs = wanted @ values + draw(batch, HEADS, length, SIZE)
    else:
        context = AttentionContext(length, length, dtype=torch.float64)
        outputs, wanted = attend(query, key, values, scheme(context), context, visible)
    weight = torch.ones(batch, rows, dtype=torch.float64)
    weight[-1, max(0, length - 3 - first) :] = 0
    return Block(
        first, query[:, :, at], key, content[:, :, at], wanted[:, :, at], weight, values, outputs[:, :, at].detach()
    )


SHAPES = [(40, 0, 32), (40, 32, 8), (7, 0, 7), (70, 32, 32)]


@pytest.mark.parametrize("length, first, rows", SHAPES)
@pytest.mark.parametrize("name", ["tables", "relative_key_query", "shaw", "music", "transformer_xl"])
def test_scores_are_those_of_the_formula(name, length, first, rows):
    scheme = scheme_of(name, **({"terms": "ABcV"} if name == "tables" else {}))
    block = block_of(length, first, rows)
    context = AttentionContext(length, length, dtype=torch.float64)
    query = torch.zeros(HEADS, 3, length, SIZE, dtype=torch.float64)
    query[:, :, first : first + rows] = block.query.flip(2)
    _, expected = attend(*(x.transpose(0, 1) for x in (query, block.key, block.values)), scheme(context), context)
    content = block.query @ block.key.transpose(-1, -2) * scheme.scale
    found = torch.softmax(content + scores(tables_of(scheme, length), block), -1)
    expected = expected[:, :, first : first + rows].transpose(0, 1).flip(2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("length, first, rows", SHAPES)
def test_the_gradient_is_the_transpose(length, first, rows):
    scheme = scheme_of(terms="ABc")
    block = block_of(length, first, rows)
    tables = tables_of(scheme, length)
    tables.u = torch.randn(HEADS, SIZE, dtype=torch.float64)
    pairs = torch.randn(HEADS, 3, rows, length, dtype=torch.float64)
    into = zeros_like(tables, HEADS)
    scores_gradient(block, pairs, into)
    right = sum(float((getattr(into, letter) * tensor.detach()).sum()) for letter, tensor in tables.items())
    torch.testing.assert_close(float((scores(tables, block).detach() * pairs).sum()), right, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["tables", "relative_key", "relative_key_query", "shaw"])
def test_the_first_step_is_the_dense_least_squares_solution(name):
    scheme = scheme_of(name, **({"terms": "ABc", "max_distance": 20} if name == "tables" else {}))
    blocks = [block_of(24, 0, 24, seed=1), block_of(40, 32, 8, seed=2)]
    parameters = Parameters(scheme, "ABcu", 40)
    fit = ScoreFit(parameters, blocks)
    fit.solve(ridge=1e-2, smooth=1e-1, newton=0, iterations=3000, tolerance=1e-13)
    found = parameters.flat()

    size = len(found)
    normal = torch.zeros(size, size, dtype=torch.float64)
    right = torch.zeros(size, dtype=torch.float64)
    unit = torch.eye(size, dtype=torch.float64)
    for block in blocks:
        columns = torch.stack([scores(parameters.tables(one), block).expand_as(block.content) for one in unit], -1)
        gap = torch.where(block.target > 0, block.target.clamp(min=1e-300).log() - block.content, 0.0)
        gap = torch.where(block.target > 0, gap, torch.zeros_like(gap))
        weight = (block.target * block.weight)[..., None]
        share = block.target[..., None]
        columns = columns - (share * columns).sum(-2, keepdim=True)
        gap = gap[..., None] - (share * gap[..., None]).sum(-2, keepdim=True)
        normal += torch.einsum("hbijx,hbijy->xy", columns * weight, columns)
        right += torch.einsum("hbijx,hbijy->x", columns * weight, gap)
    normal += torch.stack([parameters.penalty(one) for one in unit])
    expected = torch.linalg.solve(normal, right)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "name, letters, found",
    [("tables", "ABc", {"A", "B"}), ("relative_key", "ABc", {"weight"}), ("harmonic", "ABc", {"A", "B"})],
)
def test_rows_that_add_up_to_tables_have_blocks(name, letters, found):
    """What the preconditioner takes for the mean outer products is, in the basis that it found."""
    scheme = scheme_of(name)
    parameters = Parameters(scheme, letters, 40)
    bases = parameters.bases()
    assert set(bases) == found
    for key, basis in bases.items():
        rows = scheme.get_parameter(key).detach()
        table = next(tensor for _, tensor in parameters.tables(parameters.flat()).items())
        if name != "harmonic":  # whose weights have signs, which these have not
            assert key == "B" or torch.allclose(table, basis @ rows, atol=1e-12)
    block = block_of(40, 0, 32)
    fit = ScoreFit(parameters, [block])
    weights = block.target * (1 - block.target) * block.weight
    moments = fit._moments([weights])
    for key, basis in bases.items():
        per_pair = block.skew(block.part(basis[None])[0].T[:, None].expand(-1, block.rows, -1).contiguous())
        side = "hbil,nil,hbid,hbie->hnde" if key != "B" else "hbil,nil,hbld,hble->hnde"
        vectors = block.query if key != "B" else block.key
        expected = torch.einsum(side, weights, per_pair, vectors, vectors)
        torch.testing.assert_close(moments[key], expected, rtol=0, atol=1e-10)


def test_few_iterations_suffice():
    """Of what a first step gains in the end, six iterations gain nearly all; without blocks they gain less."""
    gained = {}
    for kind in ("blocks", "diagonal", "solved"):
        scheme = scheme_of(terms="ABc", max_distance=20)
        with torch.no_grad():
            for parameter in scheme.parameters():
                parameter.zero_()
        blocks = [
            block_of(40, first, rows, seed=seed, batch=8) for seed in range(3) for first, rows in ((0, 32), (32, 8))
        ]
        for block in blocks:  # vectors that are much alike, as in trained models
            block.query += 5 * block.query[..., :1]
            block.tiles += 5 * block.tiles[..., :1]
        parameters = Parameters(scheme, "ABcu", 40)
        fit = ScoreFit(parameters, blocks)
        if kind == "diagonal":
            fit._moments = lambda variances: {}
        path = fit.solve(1e-4, 1e-2, newton=0, iterations=6 if kind != "solved" else 300, tolerance=1e-12)
        gained[kind] = path[0] - path[-1]
    left = {kind: gained["solved"] - gained[kind] for kind in ("blocks", "diagonal")}
    assert left["blocks"] < 0.1 * gained["solved"]
    assert left["blocks"] < 0.5 * left["diagonal"], (gained, left)


def test_newton_reaches_a_stationary_point():
    scheme = scheme_of(terms="ABc", max_distance=20)
    blocks = [block_of(24, 0, 24, seed=1), block_of(40, 32, 8, seed=2)]
    parameters = Parameters(scheme, "ABcu", 40)
    fit = ScoreFit(parameters, blocks)
    path = fit.solve(ridge=1e-2, smooth=1e-1, newton=30, iterations=400, tolerance=1e-14)
    assert all(later < earlier for earlier, later in itertools.pairwise(path))

    # the gradient of the objective, by autograd
    theta = [parameter for parameter in scheme.parameters() if parameter is not None]
    total = sum(
        float(0)
        + (
            torch.where(
                block.target > 0,
                block.target
                * (-torch.log_softmax(block.content + scores(tables_of(scheme, 40), block), -1)).nan_to_num(posinf=0),
                0.0,
            )
            * block.weight
        ).sum()
        for block in blocks
    )
    gradient = torch.cat([part.flatten() for part in torch.autograd.grad(total, theta)])
    gradient = gradient + parameters.penalty(parameters.flat())
    assert gradient.abs().max() < 1e-6 * total.abs()


def test_scores_of_a_known_scheme_are_found_again():
    known = scheme_of(terms="ABc", max_distance=20)
    student = scheme_of(terms="ABc", max_distance=20)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.zero_()
    blocks = [
        block_of(40, first, rows, seed=seed, scheme=known, batch=8)
        for seed in range(6)
        for first, rows in ((0, 32), (32, 8))
    ]
    parameters = Parameters(student, "ABcu", 40)
    fit = ScoreFit(parameters, blocks)
    fit.solve(ridge=1e-9, smooth=1e-9, newton=5, iterations=150, tolerance=1e-12)
    total, rows = fit.divergence(parameters.tables(parameters.flat()))
    assert total / rows < 1e-9


def test_values_are_the_dense_least_squares_solution():
    known = scheme_of(terms="V", max_distance=20)
    scheme = scheme_of(terms="V", max_distance=20)
    blocks = [block_of(40, 0, 32, seed=seed, scheme=known) for seed in range(4)]
    attentions = [block.target for block in blocks]
    parameters = Parameters(scheme, "V", 40)
    before, after = ValueFit(parameters, blocks, attentions).solve(
        ridge=1e-10, smooth=0, iterations=2000, tolerance=1e-13
    )
    assert after < 1e-12 * before
    seen = slice(1, -1)
    torch.testing.assert_close(scheme.V[:, seen], known.V[:, seen], rtol=0, atol=1e-4)


def test_sums_over_processes_are_those_of_one():
    blocks = [block_of(24, 0, 24, seed=seed) for seed in range(4)]
    alone = scheme_of(terms="ABcV", max_distance=20)
    parameters = Parameters(alone, "ABcu", 24)
    ScoreFit(parameters, blocks).solve(1e-2, 1e-1, newton=2, iterations=8)

    # two processes in turn: what the other one adds comes from a rehearsal
    whole = scheme_of(terms="ABcV", max_distance=20)
    split = Parameters(whole, "ABcu", 24)
    halves = [blocks[::2], blocks[1::2]]

    class Both(ScoreFit):
        def collect(self, add):
            parts = []
            for half in halves:
                self.blocks = half
                parts.append(super().collect(add))
            return Tables(**{letter: tensor + getattr(parts[1], letter) for letter, tensor in parts[0].items()})

    fit = Both(split, blocks)
    ordered = [block for half in halves for block in half]
    reference = ScoreFit(Parameters(scheme_of(terms="ABcV", max_distance=20), "ABcu", 24), ordered)
    reference.solve(1e-2, 1e-1, newton=2, iterations=8)
    torch.testing.assert_close(reference.parameters.flat(), parameters.flat(), rtol=0, atol=1e-10)
    assert fit is not None


def test_conjugate_gradients_solve():
    torch.manual_seed(0)
    root = torch.randn(12, 12, dtype=torch.float64)
    matrix = root @ root.T + torch.eye(12, dtype=torch.float64)
    right = torch.randn(12, dtype=torch.float64)
    found = conjugate_gradients(lambda x: matrix @ x, right, lambda x: x / matrix.diagonal(), 200, 1e-14)
    torch.testing.assert_close(found, torch.linalg.solve(matrix, right), rtol=1e-9, atol=1e-12)


def test_ridge_is_the_dense_solution_and_its_sums_merge():
    torch.manual_seed(0)
    x, y = torch.randn(50, 6, dtype=torch.float64), torch.randn(50, 3, dtype=torch.float64)
    whole, first, second = Ridge(6, 3), Ridge(6, 3), Ridge(6, 3)
    whole.add(x, y)
    first.add(x[:20], y[:20])
    second.add(x[20:], y[20:])
    merged = first.merge(second)
    for strength in (1e-6, 0.1, 10.0):
        weights, bias = whole.solver()(strength)
        centred_x, centred_y = x - x.mean(0), y - y.mean(0)
        t = centred_x.square().sum(0).mean()
        stacked = torch.cat([centred_x, (strength * t).sqrt() * torch.eye(6, dtype=torch.float64)])
        expected = torch.linalg.lstsq(stacked, torch.cat([centred_y, torch.zeros(6, 3, dtype=torch.float64)])).solution
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(bias, y.mean(0) - x.mean(0) @ expected, rtol=0, atol=1e-12)
        again, _ = merged.solver()(strength)
        torch.testing.assert_close(again, weights, rtol=0, atol=1e-12)
        torch.testing.assert_close(whole.error(weights, bias), float((y - x @ weights - bias).square().sum(1).mean()))


@pytest.mark.parametrize("width", [7, PART, PART + 1, 2 * PART + 100])
def test_gram_matrix_in_parts(width):
    torch.manual_seed(0)
    x = torch.randn(30, width, dtype=torch.float64)
    found = gram(x)
    torch.testing.assert_close(found, x.T @ x, rtol=0, atol=1e-12)
    torch.testing.assert_close(found, found.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("noise", [0.01, 0.3, 3.0, 100.0])
def test_the_strength_is_the_best_of_all(noise):
    """Found with fewer solutions than there are strengths."""
    strengths = (1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    parts = []
    for rows in (60, 40):
        x = torch.randn(rows, 30, generator=generator, dtype=torch.float64)
        parts.append(Ridge(30, 4))
        parts[-1].add(x, x @ truth + noise * torch.randn(rows, 4, generator=generator, dtype=torch.float64))
    fitted, held_out = parts
    solve, tried = fitted.solver(), []

    def error(strength):
        tried.append(strength)
        return held_out.error(*solve(strength))

    best = best_of(strengths, error)
    assert len(tried) == len(set(tried)) < len(strengths)
    assert best == min(strengths, key=lambda strength: held_out.error(*solve(strength)))
