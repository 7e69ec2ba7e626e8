"""Calibration: fit a relative BERT to an absolute one on unlabelled text, layer by layer, without gradients.

Teacher and student read the same windows of text, the student through its own, already fitted lower layers. In each
layer, in this order:

1. tables of the scores (A, B, c, u) bring the student's attention closest to the teacher's;
2. the value table V brings the outputs of the heads closest;
3. a ridge regression corrects the output projection of the attention, W_o, for what is still missing in the residual
   stream, and after the feed-forward part a second one corrects W_2.

Every sixth batch enters no fit of any layer; the strength of each ridge is the one that is best there. Before the first
layer the position vectors are folded into the embeddings: that of place 0 into the vector of the token that stands
there, the mean of the others into all tokens; then the gain and bias of the LayerNorm are fitted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from ..model.formula import attend
from ..model.modeling_relpos_bert import RelPosBertPreTrainedModel
from ..model.offsets import Offsets
from ..model.relations import self_attention_mask
from .fit import ROWS, Block, Parameters, Reduce, Ridge, ScoreFit, ValueFit, alone


# Positions whose mean stands for all where no text tells which occur.
USUAL = 128


@dataclass(frozen=True)
class Settings:
    """How to calibrate.

    Attributes:
        rows: query rows of a window that the fits of scores and values read, at most; a multiple of 32.
        ridge: penalty of the tables' squares, in units of the mean curvature.
        smooth: penalty of the squared difference of neighbouring distances, likewise.
        newton: Newton steps of the score fit after its first step.
        iterations: conjugate gradient iterations of each.
        tolerance: at which both stop early.
        output: `ridge`, `bias` or `none`: what corrects the residual stream.
        strengths: of the ridge, to choose from; the largest ones leave only the bias.
        holdout: every so many batches one is held out.
        batch_tokens: tokens in a batch.
        seed: of the choice of rows.
    """

    rows: int = 32
    ridge: float = 1e-4
    smooth: float = 1e-2
    newton: int = 2
    iterations: int = 10
    tolerance: float = 1e-3
    output: str = "ridge"
    strengths: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
    holdout: int = 6
    batch_tokens: int = 2048
    seed: int = 0


@dataclass
class Batch:
    """Windows of about the same length, and what teacher and student make of them at the current layer.

    Attributes:
        number: among the batches of all processes.
        ids: (B, L), padded on the right.
        mask: (B, L), 1 for tokens.
        held_out: enters no fit.
        teacher: hidden states, (B, L, D).
        student: hidden states, (B, L, D).
    """

    number: int
    ids: torch.Tensor
    mask: torch.Tensor
    held_out: bool
    teacher: torch.Tensor = None
    student: torch.Tensor = None

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of tokens, (N, …), of (B, L, …)."""
        return tensor[self.mask.bool()]


def make_batches(
    windows: Sequence[Sequence[int]], pad: int, batch_tokens: int, holdout: int, rank: int = 0, world: int = 1
) -> list[Batch]:
    """Windows in batches of one length, as far as that goes; those of this process."""
    order = sorted(range(len(windows)), key=lambda at: (len(windows[at]), at))
    groups: list[list[int]] = []
    for at in order:
        length = len(windows[at])
        if groups and length * (len(groups[-1]) + 1) <= batch_tokens and length <= 1.15 * len(windows[groups[-1][0]]):
            groups[-1].append(at)
        else:
            groups.append([at])
    batches = []
    for number, group in enumerate(groups):
        if number % world != rank:
            continue
        length = max(len(windows[at]) for at in group)
        ids = torch.full((len(group), length), pad, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, at in enumerate(group):
            ids[row, : len(windows[at])] = torch.tensor(windows[at])
            mask[row, : len(windows[at])] = 1
        # the first of the longest must not be the only one and held out
        batches.append(Batch(number, ids, mask, held_out=number % holdout == holdout // 2))
    return batches


@dataclass
class LayerReport:
    """What calibration did in one layer.

    Attributes:
        divergence_before: KL(teacher ‖ student) of the attention on held-out text, nats per row, tables at zero.
        divergence_after: the same after the fit.
        value_missing: share of the mean square difference of the heads' outputs that V leaves, on the fitted text.
        strength_attention: chosen ridge strength for W_o; None where only the bias, or nothing, was corrected.
        strength_output: the same for W_2.
        missing: mean square difference of the hidden states to the teacher's after the layer, relative to the
            teacher's variance, on held-out text.
    """

    layer: int
    divergence_before: float
    divergence_after: float
    value_missing: float
    strength_attention: float | None
    strength_output: float | None
    missing: float


@dataclass
class Calibration:
    """What a calibration did; `to_dict` for the report.

    Attributes:
        tokens: of text, special ones included; those held out, too.
        windows: number of windows.
        rows: query rows that entered the score fits.
        layers: one report each.
        seen: number of query-key pairs of the fitted rows by octave of the distance: "1", "2-3", "4-7", ….
        unseen: distances in the range that no fitted row has, as "first-last" ranges; they have the values of their
            neighbours.
        embedding_missing: mean square difference of the embeddings, relative to the teacher's variance.
        fitted: parameters that the fits moved.
    """

    tokens: int = 0
    windows: int = 0
    rows: int = 0
    layers: list[LayerReport] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)
    embedding_missing: float = 0.0
    fitted: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class _Run:
    """One model at its current layer."""

    def __init__(self, model: RelPosBertPreTrainedModel):
        self.model = model
        self.body = model.base_model
        self.layers = self.body.encoder.layer
        self.heads = model.config.num_attention_heads

    def embed(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """What enters the embeddings' LayerNorm, and the embeddings."""
        kept = []
        norm = self.body.embeddings.LayerNorm
        hook = norm.register_forward_hook(lambda module, inputs, output: kept.append((inputs[0], output)))
        try:
            hidden = self.body.embeddings(input_ids=batch.ids, attention_mask=batch.mask)
        finally:
            hook.remove()
        return kept[0][0], hidden

    def visible(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """Which keys each query may attend to, boolean, (B, 1, L, L)."""
        length = hidden.shape[1]
        mask = self_attention_mask(self.model.config, hidden, batch.mask, None, None, None)
        if mask is None:
            return torch.ones(len(hidden), 1, length, length, dtype=torch.bool)
        if mask.dtype != torch.bool:
            mask = mask > torch.finfo(mask.dtype).min / 2
        return mask.expand(len(hidden), 1, length, length)

    def projections(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v, each (B, H, L, d)."""
        attention = self.layers[layer].attention.self
        return tuple(
            project(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (attention.query, attention.key, attention.value)
        )

    def attend(self, layer: int, batch: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Context, (B, L, D), and attention, (B, H, L, L)."""
        attention = self.layers[layer].attention.self
        query, key, value = self.projections(layer, hidden)
        length = hidden.shape[1]
        offsets = Offsets(
            length,
            length,
            device=hidden.device,
            dtype=hidden.dtype,
            query_projection=attention.query,
            key_projection=attention.key,
        )
        if (shared := self.body.encoder.distance_embedding) is not None:
            offsets = Offsets(**{**vars(offsets), "shared": shared(offsets)})
        terms = attention.distance_embedding.terms(offsets)
        out, weights = attend(query, key, value, terms, offsets, self.visible(batch, hidden))
        return out.transpose(1, 2).flatten(2), weights

    def attention_sum(self, layer: int, context: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What enters the LayerNorm after the attention."""
        return self.layers[layer].attention.output.dense(context) + hidden

    def attention_norm(self, layer: int, total: torch.Tensor) -> torch.Tensor:
        """What enters the feed-forward part."""
        return self.layers[layer].attention.output.LayerNorm(total)

    def inner(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """What enters W_2."""
        return self.layers[layer].intermediate(hidden)

    def output_sum(self, layer: int, inner: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What enters the last LayerNorm of the layer."""
        return self.layers[layer].output.dense(inner) + hidden

    def output_norm(self, layer: int, total: torch.Tensor) -> torch.Tensor:
        """The hidden states after the layer."""
        return self.layers[layer].output.LayerNorm(total)


@torch.no_grad()
def fold_positions(
    student: RelPosBertPreTrainedModel,
    table: torch.Tensor,
    first_token: int | None,
    counts: torch.Tensor | None = None,
) -> dict[str, str]:
    """Put the position vectors of a teacher into the student's embeddings.

    Args:
        student: without a table of absolute positions.
        table: the teacher's, (P, D).
        first_token: id of the token at place 0 of every text; its word vector takes the vector of place 0. None:
            there is none, and the mean is over all places.
        counts: how often each place occurs, (P,); None for the first `USUAL` places alike.

    Returns:
        Name to a note, for each tensor changed.
    """
    embeddings = student.base_model.embeddings
    weight = torch.zeros(len(table), dtype=torch.float64)
    if counts is None:
        weight[:USUAL] = 1
    else:
        weight += counts
    if first_token is not None:
        weight[0] = 0
    mean = (table.double() * (weight / weight.sum())[:, None]).sum(0)
    types = embeddings.token_type_embeddings.weight
    types.copy_(types.double() + mean)
    names = {id(parameter): name for name, parameter in student.named_parameters()}
    changed = {names[id(types)]: "plus the mean of the position vectors"}
    if first_token is not None:
        words = embeddings.word_embeddings.weight
        difference = table[0].double() - mean
        words[first_token] = (words[first_token].double() + difference).to(words.dtype)
        changed[names[id(words)]] = f"row {first_token}: plus the vector of place 0, less the mean of the others"
    return changed


class Calibrator:
    """Fits a student to its teacher on batches of text, a layer at a time."""

    def __init__(
        self,
        teacher: RelPosBertPreTrainedModel,
        student: RelPosBertPreTrainedModel,
        batches: Sequence[Batch],
        settings: Settings,
        reduce: Reduce = alone,
        progress: Callable[[str], None] = lambda what: None,
    ):
        self.settings, self.reduce, self.progress = settings, reduce, progress
        self.teacher, self.student = _Run(teacher.eval()), _Run(student.eval())
        self.batches = list(batches)
        self.fitted = [batch for batch in self.batches if not batch.held_out]
        self.held = [batch for batch in self.batches if batch.held_out]
        self.report = Calibration(settings=asdict(settings))
        total = torch.tensor([sum(int(batch.mask.sum()) for batch in self.batches), sum(map(lambda b: len(b.ids), self.batches))])
        self.report.tokens, self.report.windows = (int(value) for value in reduce(total.double()))
        self.longest = int(max(reduce_max(reduce, max((b.ids.shape[1] for b in self.batches), default=1)), 1))

    # -- embeddings ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def embed(self) -> None:
        """The embeddings of both, and the student's LayerNorm fitted to the teacher's, dimension by dimension."""
        norm = self.student.body.embeddings.LayerNorm
        width = norm.weight.shape[0]
        sums = torch.zeros(5, width, dtype=torch.float64)
        for batch in self.fitted:
            before, _ = self.student.embed(batch)
            x = batch.real(nn.functional.layer_norm(before, (width,), eps=norm.eps)).double()
            kept, _ = self._normed(self.teacher, batch)
            y = batch.real(kept).double()
            sums += torch.stack([torch.full((width,), float(len(x))).double(), x.sum(0), y.sum(0), (x * x).sum(0), (x * y).sum(0)])
        count, x, y, xx, xy = self.reduce(sums)
        variance = xx - x * x / count
        gain = torch.where(variance > 1e-9 * count, (xy - x * y / count) / variance.clamp(min=1e-30), norm.weight.double())
        norm.weight.copy_(gain)
        norm.bias.copy_((y - gain * x) / count)
        missing = torch.zeros(2, dtype=torch.float64)
        for batch in self.batches:
            _, batch.teacher = self.teacher.embed(batch)
            _, batch.student = self.student.embed(batch)
        self.report.embedding_missing = self._missing()

    @staticmethod
    def _normed(run: _Run, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """What leaves the embeddings' LayerNorm, and the embeddings."""
        norm = run.body.embeddings.LayerNorm
        before, hidden = run.embed(batch)
        return norm(before), hidden

    def _missing(self) -> float:
        """Mean square difference of student and teacher on held-out text, relative to the teacher's variance."""
        sums = torch.zeros(3, dtype=torch.float64)
        for batch in self.held or self.batches:
            teacher, student = batch.real(batch.teacher).double(), batch.real(batch.student).double()
            sums += torch.stack([(teacher - student).square().sum(), teacher.var(0, unbiased=False).sum() * len(teacher), sums.new_zeros(())])
        sums = self.reduce(sums)
        return float(sums[0] / sums[1].clamp(min=1e-30))

    # -- one layer -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fit_layer(self, layer: int) -> LayerReport:
        """Fit one layer, and take all batches through it."""
        scheme = self.student.layers[layer].attention.self.distance_embedding
        contexts = {}
        blocks, held = [], []
        self.progress(f"layer {layer}: attention")
        for batch in self.batches:
            context, weights = self.teacher.attend(layer, batch, batch.teacher)
            contexts[batch.number] = context
            (held if batch.held_out else blocks).extend(self._blocks(layer, batch, context, weights))
        before, after, left = self._fit_tables(scheme, blocks, held)
        del blocks, held
        for batch in self.batches:
            context, _ = self.student.attend(layer, batch, batch.student)
            contexts[batch.number] = (contexts[batch.number], context)

        self.progress(f"layer {layer}: output of the attention")
        strength_attention = self._correct(
            self.student.layers[layer].attention.output.dense,
            lambda batch: self._attention_sides(layer, batch, contexts),
        )
        for batch in self.batches:
            theirs, ours = contexts.pop(batch.number)
            for run, name, context in ((self.teacher, "teacher", theirs), (self.student, "student", ours)):
                total = run.attention_sum(layer, context, getattr(batch, name))
                setattr(batch, name, run.attention_norm(layer, total))

        self.progress(f"layer {layer}: output of the feed-forward part")
        strength_output = self._correct(
            self.student.layers[layer].output.dense, lambda batch: self._output_sides(layer, batch)
        )
        for batch in self.batches:
            for run, name in ((self.teacher, "teacher"), (self.student, "student")):
                hidden = getattr(batch, name)
                total = run.output_sum(layer, run.inner(layer, hidden), hidden)
                setattr(batch, name, run.output_norm(layer, total))
        report = LayerReport(layer, before, after, left, strength_attention, strength_output, self._missing())
        self.report.layers.append(report)
        return report

    def _blocks(self, layer: int, batch: Batch, context: torch.Tensor, weights: torch.Tensor) -> list[Block]:
        """The rows of a batch that the fits of scores and values read."""
        length = batch.ids.shape[1]
        firsts = list(range(0, length, ROWS))
        wanted = min(len(firsts), max(1, self.settings.rows // ROWS))
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + batch.number)
        chosen = sorted(torch.randperm(len(firsts), generator=generator)[:wanted].tolist())
        query, key, value = self.student.projections(layer, batch.student)
        visible = self.student.visible(batch, batch.student)
        scale = self.student.layers[layer].attention.self.distance_embedding.scale
        wanted_heads = context.unflatten(-1, (self.teacher.heads, -1)).transpose(1, 2)
        blocks = []
        for at in chosen:
            rows = slice(firsts[at], min(firsts[at] + ROWS, length))
            content = torch.matmul(query[:, :, rows], key.transpose(-1, -2)) * scale
            content = content.masked_fill(~visible[:, :, rows], -math.inf)
            target = weights[:, :, rows] * visible[:, :, rows]
            target = target / target.sum(-1, keepdim=True).clamp(min=1e-12)
            blocks.append(
                Block(
                    first=rows.start,
                    query=query[:, :, rows],
                    key=key,
                    content=content,
                    target=target,
                    weight=batch.mask[:, rows].to(content.dtype),
                    values=value,
                    wanted=wanted_heads[:, :, rows],
                )
            )
        return blocks

    def _fit_tables(self, scheme: nn.Module, blocks: list[Block], held: list[Block]) -> tuple[float, float, float]:
        settings = self.settings
        parameters = Parameters(scheme, "ABcu", self.longest)
        before = after = math.nan
        fit = ScoreFit(parameters, blocks, self.reduce)
        if parameters.names:
            zero = parameters.tables(torch.zeros_like(parameters.flat()))
            total, rows = fit.divergence(zero, held)
            before = total / max(rows, 1)
            fit.solve(settings.ridge, settings.smooth, settings.newton, settings.iterations, settings.tolerance)
            tables = parameters.tables(parameters.flat())
            total, rows = fit.divergence(tables, held)
            after = total / max(rows, 1)
            attentions = [fit.attention(block, tables) for block in blocks]
        else:
            attentions = [torch.softmax(block.content, -1) for block in blocks]
        values = Parameters(scheme, "V", self.longest)
        left = math.nan
        if values.names:
            missing, rest = ValueFit(values, blocks, attentions, self.reduce).solve(settings.ridge, settings.smooth)
            left = rest / max(missing, 1e-30)
        return before, after, left

    def _attention_sides(self, layer: int, batch: Batch, contexts: dict[int, tuple[torch.Tensor, torch.Tensor]]):
        theirs, ours = contexts[batch.number]
        wanted = self.teacher.attention_sum(layer, theirs, batch.teacher)
        return ours, wanted - self.student.attention_sum(layer, ours, batch.student)

    def _output_sides(self, layer: int, batch: Batch):
        inner = self.student.inner(layer, batch.student)
        wanted = self.teacher.output_sum(layer, self.teacher.inner(layer, batch.teacher), batch.teacher)
        return inner, wanted - self.student.output_sum(layer, inner, batch.student)

    def _correct(self, dense: nn.Linear, sides: Callable[[Batch], tuple[torch.Tensor, torch.Tensor]]) -> float | None:
        """Correct a linear layer for what is missing behind it; the chosen strength."""
        if self.settings.output == "none":
            return None
        sums = [Ridge(dense.in_features, dense.out_features) for _ in range(2)]
        for batch in self.batches:
            inputs, missing = sides(batch)
            sums[batch.held_out].add(batch.real(inputs), batch.real(missing))
        fitted, held = (part.reduced(self.reduce) for part in sums)
        judge = held if held.count > 0 else fitted
        nothing = torch.zeros(dense.in_features, dense.out_features, dtype=torch.float64)
        best = (judge.error(nothing, torch.zeros(dense.out_features, dtype=torch.float64)), None, None, None)
        bias = fitted.y / fitted.count
        candidates = [(judge.error(nothing, bias), None, nothing, bias)]
        if self.settings.output == "ridge":
            for strength in self.settings.strengths:
                weights, bias = fitted.solve(strength)
                candidates.append((judge.error(weights, bias), strength, weights, bias))
        best = min([best, *candidates], key=lambda candidate: candidate[0])
        _, strength, weights, bias = best
        if weights is not None:
            dense.weight.copy_(dense.weight.double() + weights.T)
            dense.bias.copy_(dense.bias.double() + bias)
        return strength

    def run(self) -> Calibration:
        """All of it."""
        self.embed()
        for layer in range(len(self.student.layers)):
            self.fit_layer(layer)
        return self.report


def reduce_max(reduce: Reduce, value: int) -> int:
    """The largest of all processes' values, by sums."""
    return value
