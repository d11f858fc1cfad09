"""The one Trainer: it consumes a config tree and trains, whatever the model, the method and the scale."""

import contextlib
import copy
import gc
import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.batch import Batch
from torchtitan.checkpoint import Checkpointer
from torchtitan.checkpoint.folder import CheckpointFolder
from torchtitan.config import Configurable, Problem, check_tree, to_dict
from torchtitan.data.loader import Loader
from torchtitan.data.tokenizer import Tokenizer, too_many_entries
from torchtitan.debug.dry_run import plan
from torchtitan.errors import ConfigError, DataError, NumericsError, Preempted
from torchtitan.metrics import Metrics, RunInfo
from torchtitan.models.model import Model
from torchtitan.objectives.next_token import NextToken
from torchtitan.optim.clipping import Clip
from torchtitan.optim.optimizer import AdamW, Optimizer
from torchtitan.optim.schedule import Schedule
from torchtitan.optim.updates import make_updates
from torchtitan.parallel.activation_checkpointing import ActivationCheckpointing
from torchtitan.parallel.compile import Compile
from torchtitan.parallel.composition import check_composition
from torchtitan.parallel.mesh import Mesh, pick_device
from torchtitan.parallel.parallelize import parallelize
from torchtitan.parallel.traffic import Step
from torchtitan.secrets import masked
from torchtitan.training.allocator import keep_freed_memory
from torchtitan.training.desync import compare_ranks
from torchtitan.training.feed import Fed, Feed
from torchtitan.training.guard import Guard
from torchtitan.training.pipeline_engine import make_engine
from torchtitan.training.resume import check_same_mathematics
from torchtitan.training.rng import rng_state, seed_everything, set_rng_state
from torchtitan.training.rules import (
    check_budget,
    check_compiled,
    check_gpu,
    check_offload,
    check_parameters,
    check_updates,
)
from torchtitan.training.samples import Samples
from torchtitan.training.settings import Training
from torchtitan.training.signals import StopRequest
from torchtitan.training.trainable import Trainable
from torchtitan.training.validation import Validation

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What a step reports; tensors stay on the device until they are logged.

    Attributes:
        loss: global loss before the update.
        grad_norm: global norm before clipping.
        lr: learning rate of the first parameter group.
        metrics: the objective's own means, and what modules report of themselves.
    """

    loss: Tensor
    grad_norm: Tensor
    lr: float
    metrics: dict[str, Tensor]


class Trainer(Configurable):
    """Builds what the config names, steps it, and keeps the run safe around the steps."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """A whole run."""

        OPERATIONAL = frozenset(
            {
                "folder",
                "parallelism",
                "activation_checkpointing",
                "compile",
                "validation",
                "samples",
                "checkpoint",
                "metrics",
            }
        )

        model: Model.Config
        """What is trained."""
        tokenizer: Tokenizer.Config = field(default_factory=Tokenizer.Config)
        """From text to token ids."""
        data: Loader.Config
        """What it is trained on."""
        objective: NextToken.Config = field(default_factory=NextToken.Config)
        """What a batch costs: the training method."""
        optimizer: Optimizer.Config = field(default_factory=AdamW.Config)
        """How gradients move the weights."""
        schedule: Schedule.Config = field(default_factory=Schedule.Config)
        """How the learning rate changes over the steps."""
        training: Training.Config
        """Steps, batch, precision and seed."""
        parallelism: Mesh.Config = field(default_factory=Mesh.Config)
        """How the ranks share the work."""
        activation_checkpointing: ActivationCheckpointing.Config = field(
            default_factory=ActivationCheckpointing.Config
        )
        """What is kept between forward and backward, and what is computed again."""
        compile: Compile.Config = field(default_factory=Compile.Config)
        """Compilation of the blocks."""
        validation: Validation.Config | None = None
        """Loss on held-out rows; None for none."""
        samples: Samples.Config | None = None
        """Texts that the model writes as it is trained; None for none."""
        checkpoint: Checkpointer.Config = field(default_factory=Checkpointer.Config)
        """When the run is saved, and what it resumes from."""
        metrics: Metrics.Config = field(default_factory=Metrics.Config)
        """What is measured, and where it goes."""
        folder: str = ""
        """Where the run keeps its config, metrics and checkpoints; empty means outputs/<recipe name>."""

        def check(self) -> Iterator[Problem]:
            """Rules that span the parts; see `Configurable.Config.check`."""
            yield from check_compiled(self.parallelism, self.activation_checkpointing, self.compile)
            if self.compile.enabled and self.compile.fullgraph:
                yield from (problem.within("model") for problem in self.model.check_one_graph())
            yield from check_budget(self.parallelism, self.activation_checkpointing)
            yield from check_offload(self.optimizer, self.training)
            yield from self.tokenizer.check_fits(self.model.vocab_size)
            if self.training.epochs is not None:
                yield from self.data.check_epochs(self.training.epochs)
            parts = {
                "schedule": self.schedule.check_lengths(self.training.steps),
                "training": self.model.check_seq_len(self.training.seq_len),
                "checkpoint": self.checkpoint.check_model(self.model, self.training.seq_len),
            }
            if self.samples:
                held_out = self.validation is not None
                parts["samples"] = self.samples.check_run(self.model, held_out=held_out)
            for section, problems in parts.items():
                yield from (p.within(section) for p in problems)

        def check_world(self, world_size: int) -> Iterator[Problem]:
            """Rules that need the number of ranks."""
            training = self.training
            found = check_composition(
                self.parallelism,
                self.model,
                self.activation_checkpointing,
                world_size,
                seq_len=training.seq_len,
                rows=training.global_batch_rows,
                micro_batch_rows=training.micro_batch_rows,
            )
            if all(section != "parallelism" for _, section in found):
                degrees = self.parallelism.resolve(world_size)
                found += [(p, "training") for p in training.check_rows(degrees.data)]
                found += check_updates(self.optimizer, training, degrees)
                sound = not check_tree(self.model, 1) and not check_tree(self.optimizer, 1)
                if sound and all(section != "model" for _, section in found):
                    problems = check_parameters(self.optimizer, self.model, degrees)
                    found += [(p, "optimizer") for p in problems]
                if self.samples:
                    found += [(p, "samples") for p in self.samples.check_degrees(degrees)]
            yield from (problem.within(section) for problem, section in found)

        def check_machine(self) -> Iterator[Problem]:
            """See `NeedsMachine`."""
            return check_gpu(self.optimizer, self.training)

        def resolved(self, steps: int | None = None) -> "Trainer.Config":
            """A copy in which what was left to be derived is filled in: the tree that is saved with the run.

            Args:
                steps: of the run, where epochs say it; None takes training.steps.
            """
            tree = copy.deepcopy(self)
            if steps is not None:
                tree.training.steps, tree.training.epochs = steps, None
            if tree.schedule.steps is None:
                tree.schedule.steps = tree.training.steps
            return tree

        def last_checkpoint(self) -> Path | None:
            """See `KeepsCheckpoints`."""
            return CheckpointFolder.of_run(Path(self.folder)).latest()

        def describe_run(self, world_size: int, rank: int) -> str:
            """See `DescribesRun`; the device is this machine's, as far as the types follow from it."""
            training = self.training
            kind = "cuda" if training.device == "auto" and torch.cuda.is_available() else "cpu"
            device = torch.device(kind if training.device == "auto" else training.device)
            dtype = Training.compute_dtype(training, device)
            degrees, pipeline = self.parallelism.resolve(world_size), self.parallelism.pipeline
            rows = training.global_batch_rows // degrees.data
            micro_batch_rows = training.micro_batch_rows or pipeline.micro_batch_rows(
                degrees.pp, rows
            )
            plan_of_rank = plan(
                rank=rank,
                world_size=world_size,
                mesh=self.parallelism,
                cut_model=lambda mesh: cut_model(self, mesh, dtype, meta=True),
                build_optimizer=lambda model: self.optimizer.build(
                    model.named_parameters(), model.names_elsewhere()
                ),
                step=Step(
                    micro_batches=rows // micro_batch_rows,
                    micro_batch_rows=micro_batch_rows,
                    seq_len=training.seq_len,
                    compute_itemsize=dtype.itemsize,
                ),
                compute=f"{dtype} (training.compute_dtype={training.compute_dtype} on {device.type})",
                in_backward=self.optimizer.in_backward,
            )
            return str(plan_of_rank)

        def build(self) -> "Trainer":
            """Join the other ranks, build everything and load the checkpoint to resume from, if there is one."""
            return Trainer(self)

    def __init__(self, config: Config) -> None:
        self.config = config = config.resolved()
        training = config.training
        self.folder = Path(config.folder)
        self.step = 0
        """Optimizer steps done."""
        self._saved_step = 0
        """What a checkpoint holds of them; nothing of a run without a step needs one."""
        self.device = pick_device(training.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        self._building = True
        # If something cannot be built, what is open by then is closed.
        with contextlib.ExitStack() as opened:
            self.mesh = config.parallelism.build(self.device)
            opened.callback(self._leave)
            if training.deterministic or torch.are_deterministic_algorithms_enabled():
                # It imports the compiler: 1 s.
                torch.use_deterministic_algorithms(training.deterministic)
            seed_everything(training.seed, self.mesh.rank)
            self.tokenizer = self._build_tokenizer()
            self.loader = self._open_loader(config.data)
            opened.callback(self.loader.close)
            self.n_steps = self._count_steps()
            """Optimizer steps in all."""
            self.config = config = config.resolved(self.n_steps)
            self.saved_config = masked(to_dict(config))
            """The config as it is written to files: without secrets."""
            self.models = {"policy": self._build_policy()}
            self.loader_state: dict[str, Any] | None = None
            rows = training.global_batch_rows // self.mesh.dp_world_size
            pipeline = config.parallelism.pipeline
            self.micro_batch_rows = training.micro_batch_rows or pipeline.micro_batch_rows(
                self.mesh.degrees.pp, rows
            )
            self.checkpointer = config.checkpoint.build(folder=self.folder)
            opened.callback(self.checkpointer.close)
            self.validation = config.validation and config.validation.build(
                engine=self.models["policy"].engine,
                loader=self._open_loader(config.validation.data),
                micro_batch_rows=self.micro_batch_rows,
            )
            if self.validation:
                opened.callback(self.validation.close)
            self.samples = config.samples and config.samples.build(
                model=self.models["policy"].model,
                tokenizer=self.tokenizer,
                mesh=self.mesh,
                data=config.validation.data if config.validation else config.data,
                seq_len=training.seq_len,
            )
            self._resume()
            self.metrics = config.metrics.build(
                folder=self.folder,
                run=self._run_info(),
                models={name: trainable.model for name, trainable in self.models.items()},
            )
            opened.callback(self.metrics.close)
            self.guard = Guard(
                self.device,
                self.mesh.world_size,
                in_backward=config.optimizer.in_backward,
                most_empty=self._most_empty_steps(),
            )
            self.stop = StopRequest()
            self._together = True
            """Whether all ranks are at the same place; not so after an error of one of them."""
            self._opened = opened.pop_all()
            """What `close` closes, the last first."""
            self._building = False

    def train(self) -> None:
        """Train to the last step.

        Raises:
            Preempted: after SIGTERM or Ctrl-C on any rank; a checkpoint was saved.
            NumericsError: a loss or gradient was not finite; no weight that is saved was changed by it.
            DataError: a rank ran out of readable data.
        """
        feed = Feed(self.loader, self.mesh, self.micro_batch_rows, self.stop)
        with self.stop, _controlled_gc(), self._explaining_errors():
            if self.validation and self.validation.config.at_start and self.step == 0:
                self.metrics.log_validation(0, self.validation.run())
            ends_early = self.validation is not None and self.validation.exhausted
            for fed in feed.steps(0 if ends_early else self.n_steps - self.step):
                step = self.train_step(fed.microbatches)
                self.loader_state = fed.loader_state
                self.metrics.record(
                    self.step,
                    {
                        "loss": step.loss,
                        "grad_norm": step.grad_norm,
                        "lr": step.lr,
                        "data_wait_s": fed.wait_s,
                        **self._progress(fed),
                        **step.metrics,
                    },
                )
                self._compare_ranks(step)
                self._after_step()
                if self.validation and self.validation.exhausted:
                    log.info(
                        "ends early: %s was no better than %s in %d evaluations",
                        self.validation.config.metric,
                        self.validation.best,
                        self.validation.n_without_gain,
                    )
                    break
            self.guard.check_now()
            if feed.stopped:
                if self.step != self._saved_step:
                    self.save()
                self.checkpointer.wait()
                newest = self.checkpointer.latest()
                raise Preempted(
                    f"stopped after step {self.step} of {self.n_steps}, "
                    f"{f'saved as {newest}' if newest else 'with nothing to save'}; run the same command again to go on"
                )
            self.checkpointer.wait()
        self.checkpointer.export(
            self.config.model,
            self.models["policy"].model,
            self.config.tokenizer.path,
            self.tokenizer.chat_template,
        )
        log.info(
            "done: %d of %d steps; the run is in %s",
            self.step,
            self.n_steps,
            self.folder,
        )

    def _progress(self, fed: Fed) -> dict[str, float]:
        """How often the data was read, and how full its rows are, where that is known."""
        rows, progress = self.loader.packed_rows, dict[str, float]()
        if rows is not None:
            progress["epoch"] = self.step * self.config.training.global_batch_rows / rows
        if fed.utilisation is not None:
            progress["packing"] = fed.utilisation
        if self.guard.empty_steps:
            progress["empty_steps"] = self.guard.empty_steps
        return progress

    def _most_empty_steps(self) -> int | None:
        """Steps in a row without a token to learn from that are an epoch, or all of a fresh run."""
        rows, limits = self.loader.packed_rows, list[int]()
        if rows is not None:
            limits.append(math.ceil(rows / self.config.training.global_batch_rows))
        if self.step == 0:
            limits.append(self.n_steps)
        return max(1, min(limits)) if limits else None

    def train_step(self, microbatches: list[Batch]) -> StepMetrics:
        """One optimizer step on this rank's rows."""
        policy = self.models["policy"]
        microbatches = [self._prepare(batch) for batch in microbatches]
        totals = policy.engine.totals(microbatches)  # global counts; stay on the device
        lr = policy.optimizer.set_lr_factor(policy.schedule.factor(self.step))
        policy.updates.begin(self.guard.bad)
        loss = policy.engine.forward_backward(microbatches, totals, self.step + 1)
        grad_norm = policy.updates.clip()
        learned = totals[policy.objective.main_loss]
        skip = self.guard.update(
            self.step + 1, loss.total, grad_norm, loss.nonfinite_by_rank, learned
        )
        policy.updates.finish(skip)  # nothing is left to do after updates in the backward
        module_metrics = policy.engine.participants.after_update(skip)
        policy.optimizer.zero_grad()
        self.step += 1
        self.guard.check()  # of the step before this one
        self.guard.start_report()
        metrics = {**loss.metrics, **module_metrics}
        return StepMetrics(loss=loss.total, grad_norm=grad_norm, lr=lr, metrics=metrics)

    def save(self) -> None:
        """Save everything that decides the next step."""
        self.guard.check_now()
        self.metrics.flush()  # what a checkpoint holds has its rows on disk
        states = [self.loader_state]
        if self.mesh.world_size > 1:
            states = [None] * self.mesh.world_size
            dist.all_gather_object(states, self.loader_state, group=self.mesh.control)
        self.checkpointer.save(
            self.step,
            tensors=self._tensors(),
            rank_tensors=rng_state(self.device),
            state={
                "step": self.step,
                "config": self.saved_config,
                "loader": Loader.merge_states([state for state in states if state is not None]),
                "validation": self.validation and self.validation.state(),
            },
        )
        self._saved_step = self.step

    def close(self) -> None:
        """Write what is still held back, stop workers and leave the other ranks; also after an error."""
        self._opened.close()

    def _leave(self) -> None:
        if self._building:
            self.mesh.abandon()
        else:
            self.mesh.close(together=self._together)

    def _after_step(self) -> None:
        """Everything that happens between steps, each on the same step on all ranks."""
        last = self.step == self.n_steps
        best = False
        if self.validation and self.validation.due(self.step, last):
            metrics = self.validation.run()
            self.metrics.log_validation(self.step, metrics)
            best = self.validation.judge(self.step, metrics) and self.validation.config.keep_best
            last = last or self.validation.exhausted
            if best:
                self.checkpointer.best_step = self.step
        if self.samples and self.samples.due(self.step, last):
            self.metrics.log_texts(self.step, self.samples.run())
        if last or best or self.checkpointer.due(self.step):
            self.save()
        if best:
            self._name_best()
        if self.step % self.config.training.gc_every_n_steps == 0:
            gc.collect()

    def _compare_ranks(self, step: StepMetrics) -> None:
        """End the run if ranks differ in what they must hold alike."""
        every = self.config.training.compare_ranks_every_n_steps
        if every and self.step % every == 0:
            compare_ranks(
                self.mesh,
                self.step,
                tensors=self._tensors(),
                numbers={"loss": step.loss, "gradient norm": step.grad_norm},
                loader_state=self.loader_state,
            )

    def _name_best(self) -> None:
        """Write which checkpoint is the best, once it is complete."""
        self.checkpointer.wait()
        if self.mesh.rank == 0 and self.validation and self.validation.best:
            best = self.validation.best
            text = json.dumps(
                {
                    "step": best.step,
                    self.validation.config.metric: best.value,
                    "checkpoint": str(self.checkpointer.latest()),
                },
                indent=2,
            )
            (self.folder / "best.json").write_text(text + "\n", encoding="utf-8")

    @torch.no_grad()
    def _prepare(self, batch: Batch) -> Batch:
        models = {name: trainable.model for name, trainable in self.models.items()}
        return self.models["policy"].objective.prepare(batch, models)

    def _build_tokenizer(self) -> Tokenizer:
        """Load it; one that was downloaded just now is compared with the model here, others by the config's check."""
        tokenizer = self.config.tokenizer.build()
        rows = self.config.model.vocab_size
        if tokenizer.vocab_size > rows:
            raise ConfigError(str(too_many_entries(tokenizer.vocab_size, rows)))
        return tokenizer

    def _build_policy(self) -> Trainable:
        config = self.config
        dtype = Training.compute_dtype(config.training, self.device)
        model = cut_model(config, self.mesh, dtype)
        objective = config.objective.build()
        optimizer = config.optimizer.build(model.named_parameters(), model.names_elsewhere())
        in_backward = config.optimizer.in_backward
        return Trainable(
            model=model,
            objective=objective,
            optimizer=optimizer,
            updates=make_updates(
                optimizer,
                Clip(config.training.max_grad_norm, config.training.clip_by),
                in_backward=in_backward,
                stages=self.mesh.pp,
            ),
            schedule=config.schedule.build(self.n_steps),
            engine=make_engine(model, objective, self.mesh, refuse_bad_loss=in_backward),
        )

    def _open_loader(self, config: Loader.Config) -> Loader:
        return config.build(
            tokenizer=self.tokenizer,
            seq_len=self.config.training.seq_len,
            global_batch_rows=self.config.training.global_batch_rows,
            dp_rank=self.mesh.dp_rank,
            dp_world_size=self.mesh.dp_world_size,
            seed=self.config.training.seed,
        )

    def _count_steps(self) -> int:
        """Optimizer steps in all, the same on every rank.

        Raises:
            ConfigError: if there are epochs of unknown length, or the schedule's phases do not fit into their steps.
        """
        training = self.config.training
        steps = training.n_steps(self.loader.packed_rows)
        if training.epochs is not None:
            log.info(
                "training.epochs=%s of %d rows: %d steps of %d rows",
                training.epochs, self.loader.packed_rows, steps, training.global_batch_rows,
            )  # fmt: skip
            for problem in self.config.schedule.check_lengths(steps):
                raise ConfigError(
                    f"{problem.within('schedule')} (training.epochs={training.epochs})"
                )
        return steps

    def _tensors(self) -> dict[str, Tensor]:
        return {
            key: tensor
            for name, trainable in self.models.items()
            for key, tensor in trainable.tensors(name).items()
        }

    def _resume(self) -> None:
        """Put the run where its checkpoint left it, or save the config of a fresh one."""
        path = self.checkpointer.resolve(self.config.checkpoint.resume)
        if path is not None:
            state = self.checkpointer.read_state(path)
            check_same_mathematics(
                state["config"], self.saved_config, self.config.checkpoint.allow_changes
            )
            generators = rng_state(self.device)
            self.checkpointer.load(path, self._tensors(), generators)
            self.loader.load_state(state["loader"])
            self.step = self._saved_step = state["step"]
            if self.validation and state.get("validation"):
                self.validation.load_state(state["validation"])
                best = self.validation.best
                keep = best and self.config.validation and self.config.validation.keep_best
                self.checkpointer.best_step = best.step if best and keep else None
            set_rng_state(generators, self.device)  # last: nothing may draw in between
            log.info("resumed from %s at step %d", path, self.step)
        else:
            self.checkpointer.load_initial(self.config.model, self.models["policy"].model)
        if self.mesh.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.saved_config, indent=2)
            (self.folder / "config.json").write_text(text + "\n", encoding="utf-8")

    def _run_info(self) -> RunInfo:
        training, model = self.config.training, self.models["policy"].model
        counts = model.parameter_counts()
        tokens_per_step = training.global_batch_rows * training.seq_len
        gpu = self.device.type == "cuda"
        log.info(
            "%s; %d parameters; %d steps of %d tokens (%d rows of %d, micro-batches of %d)",
            self.mesh.describe(),
            counts.total,
            self.n_steps,
            tokens_per_step,
            training.global_batch_rows,
            training.seq_len,
            self.micro_batch_rows,
        )
        return RunInfo(
            recipe=self.folder.name,
            config=self.saved_config,
            total_steps=self.n_steps,
            tokens_per_step_global=tokens_per_step,
            flops_per_token=model.flops_per_token(training.seq_len),
            world_size=self.mesh.world_size,
            rank=self.mesh.rank,
            device_type=self.device.type,
            device_name=torch.cuda.get_device_name(self.device) if gpu else "cpu",
            compute_dtype=str(Training.compute_dtype(training, self.device)).removeprefix("torch."),
            n_params=counts.total,
            start_step=self.step,
        )

    @contextlib.contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        """Name the newest checkpoint, and know which errors all ranks raise at the same step."""
        try:
            yield
        except (DataError, Preempted):
            raise
        except NumericsError as error:
            newest = self.checkpointer.latest()
            raise NumericsError(f"{error} (newest checkpoint: {newest or 'none'})") from None
        except BaseException:
            self._together = False
            raise


def cut_model(
    config: Trainer.Config, mesh: Mesh, dtype: torch.dtype, *, meta: bool = False
) -> Model:
    """The model of a run, cut over ``mesh``; see `parallelize`."""
    return parallelize(
        config.model,
        mesh,
        pipeline=config.parallelism.pipeline,
        activation_checkpointing=config.activation_checkpointing,
        compile=config.compile,
        compute_dtype=dtype,
        parameter_dtype=getattr(torch, config.training.parameter_dtype),
        async_tp=config.parallelism.async_tp,
        reshard_after_forward=config.parallelism.reshard_after_forward,
        seed=config.training.seed,
        meta=meta,
    )


@contextlib.contextmanager
def _controlled_gc() -> Iterator[None]:
    """Turn automatic garbage collection off, so that ranks do not pause at different moments."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
