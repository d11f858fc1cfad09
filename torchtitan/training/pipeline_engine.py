"""Forward and backward of one optimizer step through the stages of a pipeline."""

# Shapes: B rows of a micro-batch, S sequence, D dim, M micro-batches of a step.

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan import torch_api
from torchtitan.batch import Batch
from torchtitan.models.model import Model
from torchtitan.objectives.objective import Context, Objective, Sums
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.pipeline import ModelParts
from torchtitan.parallel.shared_parameters import SharedParameters
from torchtitan.training.engine import Engine, divisors


def make_engine(
    model: Model, objective: Objective, mesh: Mesh, *, refuse_bad_loss: bool = False
) -> Engine:
    """The engine for a model: of a pipeline if it is cut into stages; ``refuse_bad_loss`` as for `Engine`."""
    if isinstance(model, ModelParts):
        return PipelineEngine(model, objective, mesh)
    return Engine(model, objective, mesh, refuse_bad_loss=refuse_bad_loss)


@dataclass(slots=True)
class _Step:
    """What the schedule's loss function looks its micro-batch up in.

    Attributes:
        microbatches: of the step.
        context: of the step.
        sums: what each micro-batch added, by its number; only where the last stage is.
    """

    microbatches: Sequence[Batch]
    context: Context
    sums: dict[int, Sums] = field(default_factory=dict)


class PipelineEngine(Engine):
    """Runs the micro-batches of a step through the stages in the order of a schedule of torch's.

    The schedule takes the model's first batch field into the first stage, hands the others to every stage, and calls
    `_loss` on the last one with the number of the micro-batch as its target. The objective sees the whole micro-batch,
    and the head, which is a submodule of the last stage, is called by it.

    Args:
        model: this rank's stages.
        objective: what a batch costs.
        mesh: of the run.
    """

    def __init__(self, model: ModelParts, objective: Objective, mesh: Mesh) -> None:
        super().__init__(model, objective, mesh)
        self.model: ModelParts = model
        pipeline = model.pipeline
        self._last_rank = pipeline.rank_of_stage[-1]
        self._has_last = pipeline.n_stages - 1 in model.stages
        self._shared = SharedParameters(model)
        self._schedule: Any = None
        self._schedule_for: tuple[int, torch.Size] | None = None
        self._step: _Step | None = None
        self._metric_names: dict[bool, list[str]] = {}

    def accumulate(self, microbatches: Sequence[Batch], context: Context) -> Sequence[Sums]:
        """See `Engine.accumulate`; the sums are where the last stage is, elsewhere there are none."""
        first, *others = self.model.batch_fields
        schedule = self._get_schedule(len(microbatches), _one_shape(microbatches, first))
        whole = {name: torch.cat([b[name] for b in microbatches]) for name in (first, *others)}
        self._shared.refresh_copies()
        self._step = step = _Step(microbatches, context)
        schedule.step(
            *([whole[first]] if 0 in self.model.stages else []),  # (M * B, S)
            target=torch.arange(len(microbatches)) if self._has_last else None,
            return_outputs=False,
            **{name: whole[name] for name in others},
        )
        self._step = None
        self._shared.sum_gradients()
        return [step.sums[i] for i in sorted(step.sums)]

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Batch], totals: dict[str, Tensor]) -> Sequence[Sums]:
        """See `Engine.evaluate`; empty where the last stage is not.

        Every stage takes all micro-batches before the rank's next stage does, which is the same order on all ranks.
        """
        self._shared.refresh_copies()
        model, ranks = self.model, self.model.pipeline.rank_of_stage
        rank, group, context = (
            dist.get_rank(self.model.group),
            self.model.group,
            Context(divisors(totals)),
        )
        first, *others = model.batch_fields
        sending: list[tuple[Tensor, dist.Work | None]] = []
        outputs: list[Tensor] = []
        sums: list[Sums] = []
        for stage, part in zip(model.stages, model.parts, strict=True):
            before = ranks[stage - 1] if stage else None
            after = ranks[stage + 1] if stage + 1 < len(ranks) else None
            inputs, outputs, late = outputs, [], []
            for i, batch in enumerate(microbatches):
                hidden_states = batch[first]
                if before == rank:
                    hidden_states = inputs[i]
                elif before is not None:
                    hidden_states = model.empty_hidden_states(batch[first].shape, self.mesh.device)
                    dist.recv(hidden_states, group=group, group_src=before)
                hidden_states = part(hidden_states, **{name: batch[name] for name in others})
                if after is None:
                    sums.append(self.objective.loss(hidden_states, part.head, batch, context))
                elif after == rank:
                    outputs.append(hidden_states)
                elif after == before:  # or each of the two would wait for the other to receive
                    late.append(hidden_states)
                else:
                    sending.append(_send(hidden_states, after, group))
            if after is not None:
                sending += [_send(hidden_states, after, group) for hidden_states in late]
        for _, work in sending:
            if work is not None:
                work.wait()
        return sums

    def metric_names(self, sums: Sequence[Sums]) -> Sequence[str]:
        """See `Engine.metric_names`; the last stage tells the others once for training and once for validation.

        Raises:
            RuntimeError: if the objective's metrics are not the same in every step.
        """
        own = list(sums[0].metrics) if sums else []
        training = self.model.training
        if training not in self._metric_names:
            box = [own]
            dist.broadcast_object_list(box, group=self.model.group, group_src=self._last_rank)
            self._metric_names[training] = box[0]
        known = self._metric_names[training]
        if sums and own != known:
            raise RuntimeError(
                f"the objective's metrics were {known} and are {own} in this step; in a pipeline they must not change"
            )
        return known

    def sum_everywhere(self, tensor: Tensor) -> Tensor:
        """See `Engine.sum_everywhere`: over the data ranks of the last stage, and from there to the other stages."""
        if self._has_last:
            self.mesh.sum_over_data(tensor)
        dist.broadcast(tensor, group=self.model.group, group_src=self._last_rank)
        return tensor

    def _loss(self, hidden_states: Tensor, number: Tensor) -> Tensor:
        """The schedule's loss function: this micro-batch's part of the step's total loss."""
        step = self._step
        if step is None:
            raise RuntimeError("the schedule asks for a loss outside of a step")
        i = int(number)
        head = self.model.parts[-1].head
        sums = self.objective.loss(hidden_states, head, step.microbatches[i], step.context)
        detached = {name: loss.detach() for name, loss in sums.losses.items()}
        step.sums[i] = Sums(losses=detached, metrics=sums.metrics)
        return self.weigh(sums, step.context.totals)

    def _get_schedule(self, n_microbatches: int, shape: torch.Size) -> Any:
        """The schedule for micro-batches of a shape; made anew only when that changes, as buffers depend on it."""
        if self._schedule_for == (n_microbatches, shape):
            return self._schedule
        model, config = self.model, self.model.pipeline.config
        stages = [self._make_stage(stage, shape) for stage in model.stages]
        schedules = torch_api.pipeline_schedules
        options: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        if config.schedule == "CSV":
            made = schedules._PipelineScheduleRuntime(stages, n_microbatches, **options)
            made._load_csv(config.csv)
        else:
            maker: Any = schedules.get_schedule_class(config.schedule)
            single = issubclass(maker, schedules.PipelineScheduleSingle)
            made = maker(stages[0] if single else stages, n_microbatches, **options)
        self._schedule, self._schedule_for = made, (n_microbatches, shape)
        return made

    def _make_stage(self, stage: int, shape: torch.Size) -> "torch_api.PipelineStage":
        """A stage as torch takes it, with the shapes of its ends, so that torch need not run it to find them."""
        model, last = self.model, self.model.pipeline.n_stages - 1
        between = model.empty_hidden_states(shape, "meta").requires_grad_()
        ids = torch.empty(shape, dtype=torch.int64, device="meta")
        return torch_api.PipelineStage(
            model.parts[model.stages.index(stage)],
            stage,
            last + 1,
            self.mesh.device,
            input_args=between if stage else ids,
            output_args=between,
            group=model.group,
        )


def _one_shape(microbatches: Sequence[Batch], name: str) -> torch.Size:
    """The shape of a field in every micro-batch.

    Raises:
        ValueError: if they differ.
    """
    shapes = {batch[name].shape for batch in microbatches}
    if len(shapes) != 1:
        raise ValueError(
            f"the micro-batches have {name} of shapes {sorted(map(tuple, shapes))}; in a pipeline all have one shape: "
            "choose training.micro_batch_rows so that it divides the rows of a data rank"
        )
    return shapes.pop()


def _send(
    hidden_states: Tensor, rank: int, group: dist.ProcessGroup
) -> tuple[Tensor, dist.Work | None]:
    """Start to send; the tensor is to be kept until the work is done."""
    whole = hidden_states.contiguous()
    return whole, dist.isend(whole, group=group, group_dst=rank)
