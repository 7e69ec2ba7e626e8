"""Calibration: fit a relative BERT to an absolute one on unlabelled text, layer by layer, without gradients.

Teacher and student read the same windows of text, the student through its own, already fitted lower layers. In each
layer, in this order:

1. tables of the scores (A, B, c, u) bring the student's attention closest to the teacher's;
2. the value table V brings the outputs of the heads closest;
3. a ridge regression corrects the output projection of the attention, W_o, for what is still missing in the residual
   stream, and after the feed-forward part a second one corrects W_2.

Every sixth batch enters no fit of any layer; the strength of each ridge is the one that is best there. Before the
first layer the position vectors are folded into the embeddings: that of place 0 into the vector of the token that
stands there, the mean of the others into all tokens; then the gain and bias of the LayerNorm are fitted.

Rows longer than the teacher reads are fitted, too: the teacher reads them in overlapping windows, and of every token
the student is given what the teacher makes of it in the window where it is most central.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..model.attention import AttentionCall
from ..model.backends import AUTO, run_attention
from ..model.context import AttentionContext
from ..model.formula import Terms, attend, content_scale, content_vectors, position_scores
from ..model.modeling_relpos_bert import RelPosBertPreTrainedModel
from ..model.scheme import Scheme
from ..model.schemes import Combination
from ..model.tokens import row_layout
from .batches import Batch
from .fit import ROWS, Block, Parameters, Reduce, Ridge, ScoreFit, ValueFit, alone
from .saved import Saved


# Factors of the penalties, tried in turn while a fit does harm on held-out text.
STRICTER = (1.0, 30.0, 1000.0)
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
class LayerReport:
    """What calibration did in one layer.

    Attributes:
        divergence_before: KL(teacher ‖ student) of the attention on held-out text, nats per row, tables at zero; None
            where no score is fitted.
        divergence_after: the same after the fit.
        value_missing: share of the mean square difference of the heads' outputs that V leaves, on the fitted text;
            None without V.
        strength_attention: chosen ridge strength for W_o; None where only the bias, or nothing, was corrected.
        strength_output: the same for W_2.
        missing: mean square difference of the hidden states to the teacher's after the layer, relative to the
            teacher's variance, on held-out text.
    """

    layer: int
    divergence_before: float | None
    divergence_after: float | None
    value_missing: float | None
    strength_attention: float | None
    strength_output: float | None
    missing: float


@dataclass
class Calibration:
    """What a calibration did; `to_dict` for the report.

    Attributes:
        tokens: of text, special ones included; those held out, too.
        windows: number of windows.
        embedding_missing: mean square difference of the embeddings to the teacher's, relative to the teacher's
            variance, on held-out text.
        layers: one report each.
        settings: what it was asked for.
    """

    tokens: int = 0
    windows: int = 0
    embedding_missing: float = 0.0
    layers: list[LayerReport] = field(default_factory=list)
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
        mask = row_layout(self.model.config, hidden, batch.mask).mask(self.model.config, hidden, batch.mask)
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

    def scheme(self, layer: int) -> Scheme | None:
        """What can be fitted of a layer's scheme, or of a combination of schemes; None for nothing."""
        scheme = self.layers[layer].attention.self.distance_embedding
        parts = scheme.parts if isinstance(scheme, Combination) else [scheme]
        return next((part for part in parts if part.linear_parameters), None)

    def terms(self, layer: int, hidden: torch.Tensor, rows: slice = slice(None)) -> tuple[Terms, AttentionContext]:
        """What the scheme adds in a layer, for some of the queries."""
        attention = self.layers[layer].attention.self
        first, end, _ = rows.indices(hidden.shape[1])
        context = AttentionContext(
            end - first,
            hidden.shape[1],
            first,
            device=hidden.device,
            dtype=hidden.dtype,
            query_projection=attention.query,
            key_projection=attention.key,
        )
        if (shared := self.body.encoder.distance_embedding) is not None:
            context = replace(context, shared=shared(context))
        return attention.distance_embedding.terms(context), context

    def context(self, layer: int, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """What the heads give, side by side, (B, L, D)."""
        terms, context = self.terms(layer, hidden)
        module = self.layers[layer].attention.self
        mask = self.visible(batch, hidden)
        call = AttentionCall(*self.projections(layer, hidden), terms, context, mask=mask, layer=module)
        return run_attention(AUTO, call)[0].flatten(2)

    def weights(self, layer: int, batch: Batch, hidden: torch.Tensor, rows: slice) -> torch.Tensor:
        """The attention of some of the queries, (B, H, m, L)."""
        query, key, value = self.projections(layer, hidden)
        terms, context = self.terms(layer, hidden, rows)
        return attend(query[:, :, rows], key, value, terms, context, self.visible(batch, hidden)[:, :, rows])[1]

    def fixed_scores(self, layer: int, batch: Batch, hidden: torch.Tensor):
        """q, k and v, rotated if the scheme rotates, and a function from a slice of rows to the scores of all that is
        not fitted: what is fitted is at zero when this is called."""
        terms, context = self.terms(layer, hidden)
        query, key, value = self.projections(layer, hidden)
        content, query, key = content_vectors(query, key, terms, context)
        scale = content_scale(query, terms)
        alone = self.scheme(layer) is self.layers[layer].attention.self.distance_embedding
        positional = None if alone else position_scores(query, key, terms, context)

        def scores(rows: slice) -> torch.Tensor:
            total = torch.matmul(content[:, :, rows], key.transpose(-1, -2)) * scale
            return total if positional is None else total + positional[:, :, rows]

        return query, key, value, scores

    def attention_sum(self, layer: int, context: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What enters the LayerNorm after the attention."""
        return self.layers[layer].attention.output.dense(context) + hidden

    def after_attention(self, layer: int, context: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What enters the feed-forward part."""
        return self.layers[layer].attention.output.LayerNorm(self.attention_sum(layer, context, hidden))

    def inner(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """What enters W_2."""
        return self.layers[layer].intermediate(hidden)

    def output_sum(self, layer: int, inner: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What enters the last LayerNorm of the layer."""
        return self.layers[layer].output.dense(inner) + hidden

    def after_output(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states after the layer."""
        return self.layers[layer].output.LayerNorm(self.output_sum(layer, self.inner(layer, hidden), hidden))


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
    embeddings.add_everywhere(mean)
    names = {id(parameter): name for name, parameter in student.named_parameters()}
    changed = {names[id(embeddings.token_type_embeddings.weight)]: "plus the mean of the position vectors"}
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
        settings: Settings | None = None,
        reduce: Reduce = alone,
        progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    ):
        """
        Args:
            teacher: absolute, or relative with whatever scheme.
            student: of the same sizes; the parameters of its scheme are fitted from zero.
            batches: those of this process, from `make_batches`.
            reduce: adds up over processes.
            progress: called with a word, steps done, and steps in all.
        """
        self.settings = settings or Settings()
        self.reduce, self.progress = reduce, progress
        self.teacher, self.student = _Run(teacher.eval()), _Run(student.eval())
        self.batches = list(batches)
        self.fitted = [batch for batch in self.batches if not batch.held_out]
        self.held = [batch for batch in self.batches if batch.held_out]
        counts = [sum(int(batch.mask.sum()) for batch in self.batches), sum(len(batch.ids) for batch in self.batches)]
        tokens, windows = reduce(torch.tensor(counts, dtype=torch.float64)).tolist()
        self.report = Calibration(int(tokens), int(windows), settings=asdict(self.settings))
        self.longest = max((batch.longest for batch in self.batches), default=1)
        self.done = 0

    def _step(self, what: str) -> None:
        self.progress(what, self.done, 3 * len(self.student.layers))
        self.done += 1

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
            y = batch.real(self._teacher_embeddings(batch)).double()
            count = torch.full((width,), len(x), dtype=torch.float64)
            sums += torch.stack([count, x.sum(0), y.sum(0), (x * x).sum(0), (x * y).sum(0)])
        count, x, y, xx, xy = self.reduce(sums)
        variance = xx - x * x / count
        spec = variance > 1e-9 * count
        gain = torch.where(spec, (xy - x * y / count) / variance.clamp(min=1e-30), norm.weight.double())
        norm.weight.copy_(gain)
        norm.bias.copy_((y - gain * x) / count)
        for batch in self.batches:
            batch.teacher = self._teacher_embeddings(batch)
            _, batch.student = self.student.embed(batch)
        self.report.embedding_missing = self._missing()

    def _teacher_embeddings(self, batch: Batch) -> torch.Tensor:
        """What the teacher's first layer is given, (B, L, D)."""
        if batch.reading is None:
            return self.teacher.embed(batch)[1]
        windows = batch.reading.windows
        windows.teacher = self.teacher.embed(windows)[1]
        return batch.reading.merge(windows.teacher)

    def _missing(self) -> float:
        """Mean square difference of student and teacher on held-out text, relative to the teacher's variance."""
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in self.held or self.batches:
            teacher, student = batch.real(batch.teacher).double(), batch.real(batch.student).double()
            spread = (teacher - teacher.mean(0)).square().sum()
            sums += torch.stack([(teacher - student).square().sum(), spread])
        missing, spread = self.reduce(sums).tolist()
        return missing / max(spread, 1e-30)

    # -- one layer -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fit_layer(self, layer: int) -> LayerReport:
        """Fit one layer, and take all batches through it."""
        self._step(f"layer {layer}: attention")
        contexts, blocks, held = {}, [], []
        for batch in self.batches:
            context, weights = self._teacher_attention(layer, batch)
            contexts[batch.number] = context
            (held if batch.held_out else blocks).extend(self._blocks(layer, batch, context, weights))
        before, after, left = self._fit_tables(self.student.scheme(layer), blocks, held)
        del blocks, held
        for batch in self.batches:
            contexts[batch.number] = (contexts[batch.number], self.student.context(layer, batch, batch.student))

        self._step(f"layer {layer}: output of the attention")
        strength_attention = self._correct(
            self.student.layers[layer].attention.output.dense,
            lambda batch: self._attention_sides(layer, batch, contexts),
        )
        for batch in self.batches:
            theirs, ours = contexts.pop(batch.number)
            batch.teacher = self.teacher.after_attention(layer, theirs, batch.teacher)
            batch.student = self.student.after_attention(layer, ours, batch.student)

        self._step(f"layer {layer}: output of the feed-forward part")
        strength_output = self._correct(
            self.student.layers[layer].output.dense, lambda batch: self._output_sides(layer, batch)
        )
        for batch in self.batches:
            batch.teacher = self._teacher_output(layer, batch)
            batch.student = self.student.after_output(layer, batch.student)
        return LayerReport(layer, before, after, left, strength_attention, strength_output, self._missing())

    @torch.no_grad()
    def pass_layer(self, layer: int) -> None:
        """Take all batches through a layer that is fitted already."""
        for what in ("attention", "output of the attention", "output of the feed-forward part"):
            self._step(f"layer {layer}: {what}")
        for batch in self.batches:
            context, _ = self._teacher_attention(layer, batch)
            batch.teacher = self.teacher.after_attention(layer, context, batch.teacher)
            batch.teacher = self._teacher_output(layer, batch)
            context = self.student.context(layer, batch, batch.student)
            batch.student = self.student.after_attention(layer, context, batch.student)
            batch.student = self.student.after_output(layer, batch.student)

    def _teacher_attention(self, layer: int, batch: Batch) -> tuple[torch.Tensor, Callable[[slice], torch.Tensor]]:
        """The teacher's context, (B, L, D), and a function from a slice of m queries to their attention,
        (B, H, m, L)."""
        teacher, hidden = self.teacher, batch.teacher
        if batch.reading is None:
            return teacher.context(layer, batch, hidden), lambda rows: teacher.weights(layer, batch, hidden, rows)
        reading, windows = batch.reading, batch.reading.windows
        hidden = windows.teacher

        def read(some: Batch, numbers: torch.Tensor) -> torch.Tensor:
            return teacher.weights(layer, some, hidden[numbers], slice(None))

        context = teacher.context(layer, windows, hidden)
        windows.teacher = teacher.after_attention(layer, context, hidden)
        return reading.merge(context), lambda rows: reading.weights(read, rows)

    def _teacher_output(self, layer: int, batch: Batch) -> torch.Tensor:
        """The teacher's hidden states after the layer, from those after its attention."""
        if batch.reading is None:
            return self.teacher.after_output(layer, batch.teacher)
        windows = batch.reading.windows
        windows.teacher = self.teacher.after_output(layer, windows.teacher)
        return batch.reading.merge(windows.teacher)

    def _blocks(
        self, layer: int, batch: Batch, context: torch.Tensor, weights: Callable[[slice], torch.Tensor]
    ) -> list[Block]:
        """The rows of a batch that the fits of scores and values read; so many more of a row in several windows."""
        length = batch.ids.shape[1]
        firsts = list(range(0, length, ROWS))
        wanted = max(1, self.settings.rows // ROWS)
        if batch.reading is not None:
            wanted *= len(batch.reading.columns) // 2
        wanted = min(len(firsts), wanted)
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + batch.number)
        chosen = sorted(torch.randperm(len(firsts), generator=generator)[:wanted].tolist())
        query, key, value, scores = self.student.fixed_scores(layer, batch, batch.student)
        visible = self.student.visible(batch, batch.student)
        heads = context.unflatten(-1, (self.teacher.heads, -1)).transpose(1, 2)
        blocks = []
        for at in chosen:
            rows = slice(firsts[at], min(firsts[at] + ROWS, length))
            target = weights(rows) * visible[:, :, rows]
            blocks.append(
                Block(
                    first=rows.start,
                    query=query[:, :, rows],
                    key=key,
                    content=scores(rows).masked_fill(~visible[:, :, rows], -math.inf),
                    target=target / target.sum(-1, keepdim=True).clamp(min=1e-12),
                    weight=batch.mask[:, rows].to(query.dtype),
                    values=value,
                    wanted=heads[:, :, rows],
                )
            )
        return blocks

    def _fit_tables(
        self, scheme: Scheme | None, blocks: list[Block], held: list[Block]
    ) -> tuple[float | None, float | None, float | None]:
        """Fit scores and values; divergence on held-out rows before and after, and what V leaves."""
        if scheme is None:
            return None, None, None
        settings = self.settings
        parameters = Parameters(scheme, "ABcu", self.longest)
        fit = ScoreFit(parameters, blocks, self.reduce)
        before = after = left = None
        if parameters.names:
            nothing = torch.zeros_like(parameters.flat())
            before = self._divergence(fit, nothing, held)
            found = []
            for factor in STRICTER:
                fit.solve(
                    factor * settings.ridge,
                    factor * settings.smooth,
                    settings.newton,
                    settings.iterations,
                    settings.tolerance,
                )
                after = self._divergence(fit, parameters.flat(), held)
                found.append((after, parameters.flat()))
                if after is None or after <= before:
                    break
            else:  # too little text for any fit
                found.append((before, nothing))
            after, best = found[-1] if after is None else min(found, key=lambda each: each[0])
            parameters.assign(best)
            tables = parameters.tables(best)
            attentions = [fit.attention(block, tables) for block in blocks]
        else:
            attentions = [torch.softmax(block.content, -1) for block in blocks]
        values = Parameters(scheme, "V", self.longest)
        if values.names:
            fit = ValueFit(values, blocks, attentions, self.reduce)
            missing, rest = fit.solve(
                settings.ridge, settings.smooth, 2 * settings.iterations, settings.tolerance / 10
            )
            left = rest / max(missing, 1e-30)
        return before, after, left

    def _divergence(self, fit: ScoreFit, vector: torch.Tensor, held: list[Block]) -> float | None:
        total, rows = fit.divergence(fit.parameters.tables(vector), held)
        return total / rows if rows else None

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
        mean = fitted.y / fitted.count
        # what is tried: strength, weights and bias; the first ones win where nothing else is better on held-out text
        candidates = [(None, nothing, torch.zeros_like(mean)), (None, nothing, mean)]
        if self.settings.output == "ridge":
            candidates += [(strength, *fitted.solve(strength)) for strength in self.settings.strengths]
        strength, weights, bias = min(candidates, key=lambda candidate: judge.error(*candidate[1:]))
        dense.weight.copy_(dense.weight.double() + weights.T)
        dense.bias.copy_(dense.bias.double() + bias)
        return strength

    def run(self, saved: Saved | None = None) -> Calibration:
        """All of it.

        Args:
            saved: where layers are kept once they are fitted, and taken from if they are there.
        """
        for layer in range(len(self.student.layers)):
            if (scheme := self.student.scheme(layer)) is not None:
                for parameter in scheme.parameters():
                    nn.init.zeros_(parameter)
        self.embed()
        for layer, module in enumerate(self.student.layers):
            found = saved.load(layer) if saved is not None else None
            if found is None:
                report = self.fit_layer(layer)
                if saved is not None:
                    saved.save(layer, module.state_dict(), asdict(report))
            else:
                tensors, kept = found
                module.load_state_dict(tensors)
                self.pass_layer(layer)
                report = LayerReport(**kept)
            self.report.layers.append(report)
        return self.report
