"""A pipeline of any schedule computes what one process computes."""

import shutil

import pytest
import torch
import torch.distributed as dist

from tests.tiny import full, rows, running, tiny, tiny_model
from torchtitan.config import check_tree
from torchtitan.data.embedded import Embedded
from torchtitan.data.loader import Loader
from torchtitan.errors import ConfigError, NumericsError
from torchtitan.metrics.probes import WeightNorm
from torchtitan.optim.param_groups import ParamGroup
from torchtitan.parallel.fsdp import reshard
from torchtitan.parallel.pipeline import Pipeline
from torchtitan.parallel.shared_parameters import SharedParameters
from torchtitan.training.pipeline_engine import PipelineEngine
from torchtitan.training.validation import Validation

VOCAB = 4099  # does not divide by 2 or 4
ALONE = {"pp": 1}


def configure(folder, pipeline, *, tied=False, pp=2, dp_shard=1, cp=1, reshard=True, **training):
    config = tiny(folder, **{"micro_batch_rows": 1, **training})
    config.model = tiny_model(tied=tied, vocab_size=VOCAB, n_layers=8)
    config.parallelism.pp, config.parallelism.dp_shard, config.parallelism.cp = pp, dp_shard, cp
    config.parallelism.pipeline = pipeline
    config.parallelism.reshard_after_forward = reshard
    assert check_tree(config, pp * dp_shard * cp) == []
    return config


@torch.no_grad()
def evaluate(trainer, microbatches):
    engine = trainer.models["policy"].engine
    engine.model.eval()
    totals = engine.totals(microbatches)
    loss = engine.reduce(engine.evaluate(microbatches, totals), totals)
    reshard(engine.model)
    engine.model.train()
    return loss.total.item()


def steps_of(folder, pipeline, options, n_steps=2):
    """Numbers of each step, the first step's gradients and the initial weights of this rank."""
    with running(configure(folder, pipeline, **options)) as trainer:
        mesh, policy = trainer.mesh, trainer.models["policy"]
        numbers, grads = [], {}
        initial = {name: full(p) for name, p in policy.model.named_parameters()}
        zero_grad = policy.optimizer.zero_grad

        def keep_gradients():
            if not grads:
                grads.update({name: full(p.grad) for name, p in policy.model.named_parameters()})
            zero_grad()

        policy.optimizer.zero_grad = keep_gradients
        trainer.config.training.max_grad_norm = None  # the gradients are compared as they are
        for step in range(n_steps):
            batch = rows(8, 32, VOCAB, seed=step)
            n, size = 8 // mesh.dp_world_size, trainer.micro_batch_rows
            own = {k: v[mesh.dp_rank * n : (mesh.dp_rank + 1) * n] for k, v in batch.items()}
            microbatches = [{k: v[i : i + size] for k, v in own.items()} for i in range(0, n, size)]
            before = evaluate(trainer, microbatches)
            done = trainer.train_step(microbatches)
            numbers.append([before, done.loss.item(), done.grad_norm.item()])
            assert before == pytest.approx(numbers[-1][1], rel=1e-6)
        return numbers, grads, initial, policy.model.parameter_counts().total


def assert_same(results, expected):
    """Every rank has the numbers of one process, and all together its gradients and weights, each once."""
    want_numbers, want_grads, want_initial, want_count = expected
    grads, initial, held = {}, {}, 0
    for numbers, own_grads, own_initial, count in results:
        assert numbers == results[0][0]
        for got, want in zip(numbers, want_numbers, strict=True):
            assert got == pytest.approx(want, rel=1e-5)
        assert count == want_count
        held += sum(p.numel() for p in own_initial.values())
        grads |= own_grads
        initial |= own_initial
    assert held % want_count == 0  # once, or once on each data rank
    assert initial.keys() == want_initial.keys() == grads.keys()
    for name, want in want_grads.items():
        assert torch.equal(initial[name], want_initial[name]), name
        assert want.norm() > 0, name
        assert (grads[name] - want).norm() / want.norm() < 1e-5, name


@pytest.fixture(scope="module")
def alone(rank_pool, tmp_path_factory):
    """What one process computes, for an untied and a tied model."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        tied: rank_pool.run(steps_of, 1, folder, Pipeline.Config(), {**ALONE, "tied": tied})[0]
        for tied in (False, True)
    }


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "options"),
    [
        ("GPipe", None, {"pp": 2}),
        ("1F1B", None, {"pp": 2}),
        ("Interleaved1F1B", None, {"pp": 2}),
        ("LoopedBFS", None, {"pp": 2}),
        ("InterleavedZeroBubble", 1, {"pp": 2}),
        ("InterleavedZeroBubble", 2, {"pp": 2}),
        ("ZBVZeroBubble", None, {"pp": 2}),
        ("DualPipeV", None, {"pp": 2}),
        slow("1F1B", None, {"pp": 4}),
        ("Interleaved1F1B", None, {"pp": 4}),
        slow("ZBVZeroBubble", None, {"pp": 4}),
        slow("DualPipeV", None, {"pp": 4}),
        slow("GPipe", None, {"pp": 2, "micro_batch_rows": 4}),
        ("1F1B", None, {"pp": 2, "micro_batch_rows": None}),
        slow("GPipe", None, {"pp": 2, "tied": True}),
        ("Interleaved1F1B", None, {"pp": 2, "tied": True}),
        slow("ZBVZeroBubble", None, {"pp": 2, "tied": True}),
        slow("1F1B", None, {"pp": 4, "tied": True}),
        ("1F1B", None, {"pp": 2, "dp_shard": 2}),
        slow("1F1B", None, {"pp": 2, "dp_shard": 2, "reshard": False}),
        slow("Interleaved1F1B", None, {"pp": 2, "dp_shard": 2, "tied": True}),
        slow("InterleavedZeroBubble", None, {"pp": 2, "dp_shard": 2}),
        ("ZBVZeroBubble", None, {"pp": 2, "dp_shard": 2, "tied": True}),
        slow("DualPipeV", None, {"pp": 2, "dp_shard": 2}),
    ],
    ids=str,
)
def test_pipeline_gives_the_same_gradients(
    ranks, tmp_path, alone, schedule, stages_per_rank, options
):
    pipeline = Pipeline.Config(schedule=schedule, stages_per_rank=stages_per_rank)
    world_size = options["pp"] * options.get("dp_shard", 1)
    results = ranks(steps_of, world_size, tmp_path, pipeline, options)
    assert_same(results, alone[options.get("tied", False)])


def test_a_schedule_from_a_file_and_a_split_of_ones_own(ranks, tmp_path, alone):
    """Each rank does all forwards, then the backwards in the wrong order: slow, but right."""
    lines = [
        [f"{r}F{i}" for i in range(4)] + [f"{r}B{i}" for i in (3, 2)] + [f"{r}{k}{i}" for i in (1, 0) for k in "IW"]
        for r in range(2)
    ]  # fmt: skip
    (tmp_path / "own.csv").write_text("\n".join(",".join(line) for line in lines))
    pipeline = Pipeline.Config(
        schedule="CSV", csv=str(tmp_path / "own.csv"), blocks_per_stage=(2, 6)
    )
    results = ranks(steps_of, 2, tmp_path, pipeline, {"pp": 2, "micro_batch_rows": 2})
    assert sum("layers." in name and ".q_proj" in name for name in results[0][1]) == 2
    assert_same(results, alone[False])


def steps_with_a_fault(folder, fault):
    with pytest.MonkeyPatch.context() as patch:
        if fault == "tied sum":

            def only_free(self):
                for pair in self._pairs:
                    if pair.copy is not None:
                        pair.copy.grad = None

            patch.setattr(SharedParameters, "sum_gradients", only_free)
        elif fault == "stale copy":
            patch.setattr(SharedParameters, "refresh_copies", lambda self: None)
        else:
            patch.setattr(
                "torchtitan.optim.updates.global_grad_norm",
                lambda parameters, stages: torch.stack([full(p.grad).norm() for p in parameters]).norm(),
            )  # fmt: skip
        return steps_of(folder, Pipeline.Config(), {"pp": 2, "tied": True})


@pytest.mark.parametrize("fault", ["tied sum", "stale copy", "norm of one stage"])
def test_the_comparison_notices_a_fault(ranks, tmp_path, alone, fault):
    with pytest.raises(AssertionError):
        assert_same(ranks(steps_with_a_fault, 2, tmp_path, fault), alone[True])


def run(folder, pipeline, options, steps, *, validate=False):
    """Train to ``steps``: losses by step, the last validation loss, and a probe over the weights."""
    config = configure(folder, pipeline, steps=steps, **options)
    config.optimizer.param_groups = [ParamGroup.Config(pattern="layers.0.*", lr_scale=0.5)]
    config.metrics.probes = [WeightNorm.Config(pattern="policy.layers.7.*")]
    if validate:
        held_out = Loader.Config(sources=[Embedded.Config(split="validation")], shuffle=False, n_workers=0)  # fmt: skip
        config.validation = Validation.Config(every_n_steps=2, steps=2, data=held_out)
    losses, rows_logged = {}, []
    with running(config) as trainer:
        step, log_validation = trainer.train_step, trainer.metrics.log_validation

        def recording(microbatches):
            done = step(microbatches)
            losses[trainer.step] = done.loss.item()
            return done

        def keep(number, values):
            rows_logged.append(values["validation_loss"])
            log_validation(number, values)

        trainer.train_step, trainer.metrics.log_validation = recording, keep
        trainer.train()
        models = {"policy": trainer.models["policy"].model}
        norm = config.metrics.probes[0].build()(models)["weight_norm"].item()
    return losses, rows_logged, norm


@pytest.fixture(scope="module")
def whole_run(rank_pool, tmp_path_factory):
    options = {**ALONE, "tied": True}
    folder = tmp_path_factory.mktemp("whole")
    return rank_pool.run(run_validated, 1, folder, Pipeline.Config(), options)[0]


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1F1B", {"pp": 2}),
        ("InterleavedZeroBubble", {"pp": 2}),
        slow("DualPipeV", {"pp": 2}),
        slow("Interleaved1F1B", {"pp": 2, "cp": 2}),
        slow("ZBVZeroBubble", {"pp": 2, "cp": 2}),
        slow("LoopedBFS", {"pp": 4}),
    ],
    ids=str,
)
def test_whole_runs_and_validation_are_the_same(ranks, tmp_path, whole_run, schedule, options):
    want, want_validation, want_norm = whole_run
    assert len(want_validation) == 2
    world_size, pipeline = options["pp"] * options.get("cp", 1), Pipeline.Config(schedule=schedule)
    results = ranks(run_validated, world_size, tmp_path, pipeline, {**options, "tied": True})
    for losses, validation, norm in results:
        assert (losses, validation) == results[0][:2]
        assert losses == pytest.approx(want, rel=1e-5)
        assert validation == pytest.approx(want_validation, rel=1e-5)
        assert norm == pytest.approx(want_norm, rel=1e-5)


def run_validated(folder, pipeline, options):
    return run(folder, pipeline, options, 4, validate=True)


def test_checkpoints_load_under_another_split_and_without_one(ranks, tmp_path):
    one, two, zbv = {**ALONE, "tied": True}, {"pp": 2, "tied": True}, "ZBVZeroBubble"
    ((straight, _, _),) = ranks(run, 1, tmp_path / "alone", Pipeline.Config(), one, 4)
    first = ranks(run, 2, tmp_path / "pp", Pipeline.Config(), two, 2)[0][0]
    ((from_one, _, _),) = ranks(run, 1, tmp_path / "one", Pipeline.Config(), one, 2)
    for name, saved, before, world_size, pipeline, options in [
        ("one rank", "pp", first, 1, Pipeline.Config(), one),
        ("another split", "pp", first, 2, Pipeline.Config(blocks_per_stage=(1, 7)), two),
        ("from one rank", "one", from_one, 2, Pipeline.Config(schedule=zbv), two),
    ]:
        shutil.copytree(tmp_path / saved, tmp_path / name)
        for then, _, _ in ranks(run, world_size, tmp_path / name, pipeline, options, 4):
            assert before | then == pytest.approx(straight, rel=1e-5), name
            assert list(then) == [3, 4]


def run_with_a_bad_loss(folder):
    """Train under pp=2 * dp_shard=2 until one data rank's loss is not a number; what was raised, which weights moved."""
    with running(configure(folder, Pipeline.Config(), pp=2, dp_shard=2, steps=4)) as trainer:
        engine, before = trainer.models["policy"].engine, {}
        loss = engine._loss

        def spoiled(hidden_states, number):
            value = loss(hidden_states, number)
            if trainer.step == 1 and dist.get_rank() == 3:
                sums = engine._step.sums[int(number)]
                sums.losses["next_token"] = sums.losses["next_token"] * float("nan")
                value = value * float("nan")
            return value

        engine._loss = spoiled
        step = trainer.train_step

        def recording(microbatches):
            if trainer.step == 1:
                model = trainer.models["policy"].model
                before.update({name: full(p) for name, p in model.named_parameters()})
            return step(microbatches)

        trainer.train_step = recording
        with pytest.raises(NumericsError) as caught:
            trainer.train()
        model = trainer.models["policy"].model
        moved = [n for n, p in model.named_parameters() if not torch.equal(full(p), before[n])]
        return str(caught.value), moved, trainer.step


def test_a_bad_loss_in_the_last_stage_changes_no_weight_in_any(ranks, tmp_path):
    for text, moved, step in ranks(run_with_a_bad_loss, 4, tmp_path):
        assert moved == []
        assert step == 3  # the host reads the flag one step late
        assert "the loss of rank 3 was not finite" in text


def refusals(folder):
    """What a pipeline says at run time."""
    config = configure(folder, Pipeline.Config())
    texts = []
    with running(config) as trainer:
        engine = trainer.models["policy"].engine
        assert isinstance(engine, PipelineEngine)
        uneven = [rows(1, 32, VOCAB), rows(2, 32, VOCAB)]
        with pytest.raises(ValueError, match="in a pipeline all have one shape") as caught:
            engine.forward_backward(uneven, engine.totals(uneven))
        texts.append(str(caught.value))
        with pytest.raises(TypeError, match="cut into stages") as caught:
            engine.model.keep(range(1), True, False)
        texts.append(str(caught.value))
        trainer.config.optimizer.param_groups = [ParamGroup.Config(pattern="layers.8.*")]
        with pytest.raises(ConfigError, match="match none of the") as caught:
            trainer._build_policy()
        texts.append(str(caught.value))
        probe = WeightNorm.Config(pattern="policy.layers.8.*").build()
        with pytest.raises(ConfigError, match="matches none of") as caught:
            probe({"policy": engine.model})
        texts.append(str(caught.value))
    return texts


def test_refusals_are_the_same_on_every_stage(ranks, tmp_path):
    for shapes, cut, groups, probe in ranks(refusals, 2, tmp_path):
        assert "tokens of shapes [(1, 32), (2, 32)]" in shapes
        assert (
            "choose training.micro_batch_rows so that it divides the rows of a data rank" in shapes
        )
        assert cut.endswith("cut the whole one")
        assert "['layers.8.*'] match none of the 75 trainable parameters" in groups
        assert "pattern='policy.layers.8.*' matches none of 75 parameters" in probe
