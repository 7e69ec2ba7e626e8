"""Calibration: fit a relative BERT to an absolute one on unlabelled text, layer by layer, without gradients.

Teacher and student read the same windows of text, the student through its already fitted lower layers. Each layer is
fitted in this order:

1. score tables (A, B, c, u), so that the student's attention is closest to the teacher's;
2. the value table V, so that the outputs of the heads are closest;
3. the output projection of the attention, W_o, by a ridge regression of the remaining difference in the residual
   stream, and likewise W_2 of the feed-forward part.

Every sixth batch is held out from all fits and selects the strength of each ridge. Before the first layer the position
vectors are added to other embeddings: that of position 0 to the word embedding of the first token, the mean of the
others to all token types. Then gain and bias of the LayerNorm are fitted.

The teacher reads rows past its maximum length in overlapping windows. The target of a token comes from the window
where it is most central.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch
from torch import nn

from ...models.modeling_relpos_bert import RelPosBertPreTrainedModel
from ...processes import Reduce, local_sum
from ...schemes.scheme import Scheme
from .batches import Batch
from .blocks import ROWS, Block
from .embeddings import fit_layer_norm
from .layerwise import LayerwiseModel
from .parameters import Parameters
from .ridge import Ridge, best_of
from .saved import Saved
from .scores import ScoreFit
from .settings import CalibrationReport, CalibrationSettings, LayerReport
from .values import ValueFit


# Factors of the penalties, tried in turn while a fit is harmful on held-out text.
PENALTY_FACTORS = (1.0, 30.0, 1000.0, 30_000.0)


class Calibrator:
    """Fits a student to its teacher on batches of text, one layer at a time."""

    def __init__(
        self,
        teacher: RelPosBertPreTrainedModel,
        student: RelPosBertPreTrainedModel,
        batches: Sequence[Batch],
        settings: CalibrationSettings | None = None,
        reduce: Reduce = local_sum,
        progress: Callable[[str, int, int], None] = lambda description, completed, total: None,
    ):
        """
        Args:
            teacher: a model with absolute positions or any scheme.
            student: a model of the same sizes; the parameters of its scheme are fitted from zero.
            batches: batches of this process, from `make_batches`; they are moved to the device of the models.
            reduce: sums over processes.
            progress: called as `progress(description, completed, total)`.
        """
        self.settings = settings or CalibrationSettings()
        self.reduce, self.progress = reduce, progress
        self.teacher, self.student = LayerwiseModel(teacher.eval()), LayerwiseModel(student.eval())
        self.device = student.device
        self.batches = [batch.to(self.device) for batch in batches]
        self.fitted = [batch for batch in self.batches if not batch.held_out]
        self.held_out = [batch for batch in self.batches if batch.held_out]
        counts = [sum(int(batch.mask.sum()) for batch in self.batches), sum(len(batch.ids) for batch in self.batches)]
        tokens, windows = reduce(torch.tensor(counts, dtype=torch.float64, device=self.device)).tolist()
        self.report = CalibrationReport(int(tokens), int(windows), settings=asdict(self.settings))
        self.longest = max((batch.longest for batch in self.batches), default=1)
        self.steps = 0

    def _step(self, description: str) -> None:
        self.progress(description, self.steps, 3 * len(self.student.layers))
        self.steps += 1

    # -- embeddings ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def embed(self) -> None:
        """Compute the embeddings of both, and fit the student's LayerNorm to the teacher's, dimension by dimension."""
        inputs = (batch.real(self.student.embed(batch)[0]) for batch in self.fitted)
        targets = (batch.real(self._teacher_embeddings(batch)) for batch in self.fitted)
        if self.student.model.config.embedding_norm:
            fit_layer_norm(self.student.body.embeddings.LayerNorm, zip(inputs, targets, strict=True), self.reduce)
        for batch in self.batches:
            batch.teacher = self._teacher_embeddings(batch)
            _, batch.student = self.student.embed(batch)
        self.report.embedding_missing = self._missing()

    def _teacher_embeddings(self, batch: Batch) -> torch.Tensor:
        """The input of the teacher's first layer, (B, L, D)."""
        if batch.long_row is None:
            return self.teacher.embed(batch)[1]
        windows = batch.long_row.windows
        windows.teacher = self.teacher.embed(windows)[1]
        return batch.long_row.merge(windows.teacher)

    def _missing(self) -> float:
        """Mean square difference of student and teacher on held-out text, relative to the teacher's variance."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in self.held_out or self.batches:
            teacher, student = batch.real(batch.teacher).double(), batch.real(batch.student).double()
            spread = (teacher - teacher.mean(0)).square().sum()
            sums += torch.stack([(teacher - student).square().sum(), spread])
        missing, spread = self.reduce(sums).tolist()
        return missing / max(spread, 1e-30)

    # -- one layer -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fit_layer(self, layer: int) -> LayerReport:
        """Fit one layer, and run all batches through it."""
        self._step(f"layer {layer}: attention")
        teacher_contexts: dict[int, torch.Tensor] = {}
        blocks: list[Block] = []
        held_out: list[Block] = []
        for batch in self.batches:
            context, weights = self._teacher_attention(layer, batch)
            teacher_contexts[batch.number] = context
            (held_out if batch.held_out else blocks).extend(self._blocks(layer, batch, context, weights))
        before, after, value_missing = self._fit_tables(self.student.scheme(layer), blocks, held_out)
        del blocks, held_out
        contexts = {
            batch.number: (teacher_contexts.pop(batch.number), self.student.context(layer, batch, batch.student))
            for batch in self.batches
        }

        self._step(f"layer {layer}: output of the attention")
        # the teacher's states advance during the correction, the student's after it
        strength_attention = self._correct(
            self.student.layers[layer].attention.output.dense,
            lambda batch: self._attention_residual(layer, batch, *contexts[batch.number]),
        )
        for batch in self.batches:
            _, student_context = contexts.pop(batch.number)
            batch.student = self.student.after_attention(layer, student_context, batch.student)

        self._step(f"layer {layer}: output of the feed-forward part")
        inners = {batch.number: self.student.inner(layer, batch.student) for batch in self.batches}
        strength_output = self._correct(
            self.student.layers[layer].output.dense,
            lambda batch: self._output_residual(layer, batch, inners[batch.number]),
        )
        for batch in self.batches:
            batch.student = self.student.after_output(layer, batch.student, inners.pop(batch.number))
        return LayerReport(layer, before, after, value_missing, strength_attention, strength_output, self._missing())

    @torch.no_grad()
    def pass_layer(self, layer: int) -> None:
        """Run all batches through a layer that is fitted already."""
        for part in ("attention", "output of the attention", "output of the feed-forward part"):
            self._step(f"layer {layer}: {part}")
        for batch in self.batches:
            context, _ = self._teacher_attention(layer, batch)
            batch.teacher = self.teacher.after_attention(layer, context, batch.teacher)
            batch.teacher = self._teacher_output(layer, batch)
            context = self.student.context(layer, batch, batch.student)
            batch.student = self.student.after_attention(layer, context, batch.student)
            batch.student = self.student.after_output(layer, batch.student)

    def _teacher_attention(self, layer: int, batch: Batch) -> tuple[torch.Tensor, Callable[[slice], torch.Tensor]]:
        """The teacher's context, (B, L, D), and a function from m queries to their attention, (B, H, m, L)."""
        teacher, hidden = self.teacher, batch.teacher
        if batch.long_row is None:
            projections = teacher.projections(layer, hidden)
            context = teacher.context(layer, batch, hidden, projections)
            return context, lambda rows: teacher.weights(layer, batch, hidden, projections, rows)
        long_row, windows = batch.long_row, batch.long_row.windows
        hidden = windows.teacher
        projections = teacher.projections(layer, hidden)

        def attention(numbers: torch.Tensor) -> torch.Tensor:
            chosen = {name: getattr(windows, name)[numbers] for name in ("ids", "mask", "types")}
            some = replace(windows, **chosen)
            query, key, value = (tensor[numbers] for tensor in projections)
            return teacher.weights(layer, some, hidden[numbers], (query, key, value), slice(None))

        context = teacher.context(layer, windows, hidden, projections)
        windows.teacher = teacher.after_attention(layer, context, hidden)
        return long_row.merge(context), lambda rows: long_row.weights(attention, rows)

    def _teacher_output(self, layer: int, batch: Batch) -> torch.Tensor:
        """The teacher's hidden states after the layer, from those after its attention."""
        if batch.long_row is None:
            return self.teacher.after_output(layer, batch.teacher)
        windows = batch.long_row.windows
        windows.teacher = self.teacher.after_output(layer, windows.teacher)
        return batch.long_row.merge(windows.teacher)

    def _blocks(
        self, layer: int, batch: Batch, context: torch.Tensor, weights: Callable[[slice], torch.Tensor]
    ) -> list[Block]:
        """Rows of a batch for the fits of scores and values; proportionally more for rows in windows."""
        length = batch.ids.shape[1]
        starts = list(range(0, length, ROWS))
        count = max(1, self.settings.rows // ROWS)
        if batch.long_row is not None:
            count *= len(batch.long_row.windows.ids) // 2
        count = min(len(starts), count)
        generator = torch.Generator("cpu").manual_seed(self.settings.seed * 1_000_003 + batch.number)
        chosen = sorted(torch.randperm(len(starts), generator=generator, device="cpu")[:count].tolist())
        query, key, value, scores = self.student.fixed_scores(layer, batch, batch.student)
        visible = self.student.visible(batch, batch.student)
        heads = context.unflatten(-1, (self.teacher.heads, -1)).transpose(1, 2)
        blocks = []
        for index in chosen:
            rows = slice(starts[index], min(starts[index] + ROWS, length))
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
                    target_output=heads[:, :, rows],
                )
            )
        return blocks

    def _fit_tables(
        self, scheme: Scheme | None, blocks: list[Block], held_out: list[Block]
    ) -> tuple[float | None, float | None, float | None]:
        """Fit scores and values; returns the divergence on held-out rows before and after, and the error left by V."""
        if scheme is None:
            return None, None, None
        settings = self.settings
        parameters = Parameters(scheme, "ABcu", self.longest)
        fit = ScoreFit(parameters, blocks, self.reduce)
        before = after = value_missing = None
        if parameters.names:
            zeros = torch.zeros_like(parameters.flat())
            before = self._divergence(fit, zeros, held_out)
            candidates: list[tuple[float, torch.Tensor]] = []
            for factor in PENALTY_FACTORS:
                fit.solve(
                    factor * settings.ridge,
                    factor * settings.smooth,
                    settings.newton,
                    settings.iterations,
                    settings.tolerance,
                )
                best = parameters.flat()
                after = self._divergence(fit, best, held_out)
                if before is None or after is None:  # no rows are held out
                    break
                candidates.append((after, best))
                if after <= before:
                    break
            else:  # there is too little text for a fit
                candidates += [] if before is None else [(before, zeros)]
            if candidates:
                after, best = min(candidates, key=lambda candidate: candidate[0])
            parameters.assign(best)
            tables = parameters.tables(best)
            attentions = [fit.attention(block, tables) for block in blocks]
        else:
            attentions = [torch.softmax(block.content, -1) for block in blocks]
        values = Parameters(scheme, "V", self.longest)
        if values.names:
            missing, left = ValueFit(values, blocks, attentions, self.reduce).solve(
                settings.ridge, settings.smooth, 2 * settings.iterations, settings.tolerance / 10
            )
            value_missing = left / max(missing, 1e-30)
        return before, after, value_missing

    def _divergence(self, fit: ScoreFit, vector: torch.Tensor, blocks: list[Block]) -> float | None:
        total, rows = fit.divergence(fit.parameters.tables(vector), blocks)
        return total / rows if rows else None

    def _attention_residual(
        self, layer: int, batch: Batch, teacher_context: torch.Tensor, student_context: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of the student's W_o and its residual, (B, L, D) each; advances the teacher."""
        target = self.teacher.attention_sum(layer, teacher_context, batch.teacher)
        batch.teacher = self.teacher.layers[layer].attention.output.LayerNorm(target)
        return student_context, target - self.student.attention_sum(layer, student_context, batch.student)

    def _output_residual(self, layer: int, batch: Batch, inner: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of the student's W_2 and its residual; advances the teacher."""
        target = self.teacher.output_sum(layer, self.teacher.inner(layer, batch.teacher), batch.teacher)
        if batch.long_row is None:
            batch.teacher = self.teacher.layers[layer].output.LayerNorm(target)
        else:  # the teacher reads windows
            batch.teacher = self._teacher_output(layer, batch)
        return inner, target - self.student.output_sum(layer, inner, batch.student)

    def _correct(
        self, dense: nn.Linear, residual: Callable[[Batch], tuple[torch.Tensor, torch.Tensor]]
    ) -> float | None:
        """Correct a linear layer by a regression of its residual; returns the chosen strength."""
        sums = [Ridge(dense.in_features, dense.out_features, self.device) for _ in range(2)]
        for batch in self.batches:
            inputs, missing = residual(batch)
            if self.settings.output != "none":
                sums[batch.held_out].add(batch.real(inputs), batch.real(missing))
        if self.settings.output == "none":
            return None
        fitted, held_out = (part.reduced(self.reduce) for part in sums)
        judge = held_out if held_out.count > 0 else fitted
        mean = fitted.y / fitted.count
        zeros = torch.zeros_like(fitted.xy)
        # strength, weights and bias; the first candidate is kept if no other is better on held-out text
        candidates: list[tuple[float | None, torch.Tensor, torch.Tensor]]
        candidates = [(None, zeros, torch.zeros_like(mean)), (None, zeros, mean)]
        if self.settings.output == "ridge":
            solve = functools.cache(fitted.solver())
            best = best_of(self.settings.strengths, lambda strength: judge.error(*solve(strength)))
            candidates.append((best, *solve(best)))
        strength, weights, bias = min(candidates, key=lambda candidate: judge.error(*candidate[1:]))
        dense.weight.copy_(dense.weight.double() + weights.T)
        dense.bias.copy_(dense.bias.double() + bias)
        return strength

    def run(self, saved: Saved | None = None) -> CalibrationReport:
        """Fit embeddings and all layers.

        Args:
            saved: store of fitted layers, from which existing layers are loaded.
        """
        for layer in range(len(self.student.layers)):
            if (scheme := self.student.scheme(layer)) is not None:
                for parameter in scheme.parameters():
                    nn.init.zeros_(parameter)
        self.embed()
        for layer, module in enumerate(self.student.layers):
            stored = saved.load(layer) if saved is not None else None
            if stored is None:
                report = self.fit_layer(layer)
                if saved is not None:
                    saved.save(layer, module.state_dict(), asdict(report))
            else:
                tensors, fields = stored
                module.load_state_dict(tensors)
                self.pass_layer(layer)
                report = LayerReport(**fields)
            self.report.layers.append(report)
        return self.report
