"""Parallelisms in combination compute what one process computes: the parity grid.

Five steps in float32 over uneven packed documents with masked labels and several micro-batches: loss and gradient norm
of each step, every parameter's first gradient by name, where every expert's tokens went, and the final weights.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchtitan.parallel.tensor
from tests.distributed.grid import MODELS, N_ROWS, SLICE, Case, alone, cases
from tests.tiny import full, rows, running
from torchtitan.optim.optimizer import Optimizer
from torchtitan.parallel.mesh import Mesh
from torchtitan.training.feed import to_microbatches

N_STEPS = 5
PAGE = Path(__file__).parents[2] / "docs" / "composability.md"
# Adam divides by the root of a second moment: where that is near zero, rounding decides the direction of a step.
WEIGHTS_REL = {"adamw": 1e-3, "sgd": 1e-5}


@dataclass
class Run:
    """What one rank saw; parameters are whole, and those of its pipeline stages.

    Attributes:
        numbers: (loss, gradient norm) of each step.
        routed: tokens of each expert of each layer, by step.
        grads: of the first step.
        moved: final weights less initial ones.
        rounding: by how much float32 can round each final weight, as a norm.
    """

    numbers: list[tuple[float, float]]
    routed: list[dict[str, float]]
    grads: dict[str, Tensor]
    moved: dict[str, Tensor]
    rounding: dict[str, Tensor]


def run(folder: Any, case: Case) -> Run:
    found = Run([], [], {}, {}, {})
    with running(case.config(folder)) as trainer:
        policy, mesh = trainer.models["policy"], trainer.mesh
        parameters = dict(policy.model.named_parameters())
        start = {name: p.detach().clone() for name, p in parameters.items()}
        zero_grad = policy.optimizer.zero_grad

        def keep_gradients() -> None:
            if not found.grads:
                found.grads = {name: full(p.grad) for name, p in parameters.items()}
            zero_grad()

        policy.optimizer.zero_grad = keep_gradients
        n = N_ROWS // mesh.dp_world_size
        for step in range(N_STEPS):
            batch = rows(N_ROWS, 32, MODELS[case.model].vocab_size, seed=step)
            own = {k: v[mesh.dp_rank * n : (mesh.dp_rank + 1) * n] for k, v in batch.items()}
            done = trainer.train_step(to_microbatches(own, trainer.micro_batch_rows, mesh))
            found.numbers.append((done.loss.item(), done.grad_norm.item()))
            found.routed.append(
                {k: float(v) for k, v in done.metrics.items() if k.startswith("moe_tokens")}
            )
        found.moved = {name: full(p.detach() - start[name]) for name, p in parameters.items()}
        found.rounding = {
            name: torch.finfo(torch.float32).eps * full(p).norm() for name, p in parameters.items()
        }
    return found


def assert_equal(results: list[Run], want: Run, weights_rel: float) -> None:
    grads: dict[str, Tensor] = {}
    moved: dict[str, Tensor] = {}
    for result in results:
        for got, wanted in zip(result.numbers, want.numbers, strict=True):
            assert got == pytest.approx(wanted, rel=1e-5)
        assert result.routed == want.routed
        grads |= result.grads
        moved |= result.moved
    assert_near(grads, want.grads, 1e-5)
    assert_near(moved, want.moved, weights_rel, want.rounding)


def assert_near(
    got: dict[str, Tensor],
    want: dict[str, Tensor],
    rel: float,
    rounding: dict[str, Tensor] | None = None,
) -> None:
    assert got.keys() == want.keys()
    for name, wanted in want.items():
        assert wanted.norm() > 0, name
        allowed = rel * wanted.norm() + (rounding[name] if rounding else 0)
        assert (got[name] - wanted).norm() < allowed, name


@pytest.fixture(scope="module")
def one_process(rank_pool, tmp_path_factory):
    """The run of one process, by model; each is made once."""
    known: dict[str, Run] = {}

    def get(case: Case) -> Run:
        single = alone(case)
        if str(single) not in known:
            (known[str(single)],) = rank_pool.run(run, 1, tmp_path_factory.mktemp("one"), single)
        return known[str(single)]

    return get


GRID = {str(case): case for case in [*SLICE, *cases()]}
REFUSED = {name: reason for name, case in GRID.items() if (reason := case.refusal()) is not None}
PROVED = {name: case for name, case in GRID.items() if name not in REFUSED}


@pytest.fixture(scope="module")
def page() -> Iterator[dict[str, bool]]:
    """By name of each case that ran, whether it passed; a run that goes beyond the slice writes them down."""
    ran: dict[str, bool] = {}
    yield ran
    if ran.keys() - {str(case) for case in SLICE}:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(composability(proved(text, ran)), encoding="utf-8")


def proved(text: str, ran: dict[str, bool]) -> set[str]:
    """What the page says after a run, which may have been of some cases only: of the others, what it said before.

    Args:
        text: the page as it is.
        ran: name of a case -> whether it passed.
    """
    before = set(re.findall(r"\| `(.+)` \|", text)) & PROVED.keys()
    return {name for name in before | ran.keys() if ran.get(name, True)}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c in SLICE else pytest.mark.slow) for c in PROVED.values()],
    ids=str,
)
def test_mesh_equals_one_process(ranks, tmp_path, one_process, page, case):
    page[str(case)] = False
    want = one_process(case)
    results = ranks(run, case.world, tmp_path, case, timeout_s=600)
    assert_equal(results, want, WEIGHTS_REL[case.options.get("optimizer", "adamw")])
    page[str(case)] = True


def skip_a_parameter(patch: pytest.MonkeyPatch) -> None:
    step = Optimizer.step

    def step_without_one(self: Optimizer, skip: Tensor) -> None:
        skipped = next(iter(self.slots))
        grad, skipped.grad = skipped.grad, None
        step(self, skip)
        skipped.grad = grad

    patch.setattr(Optimizer, "step", step_without_one)


FAULTS = {
    "an all-reduce of the counts is dropped": (
        {"dp_shard": 2},
        lambda patch: patch.setattr(Mesh, "sum_over_data", lambda self, tensor: tensor),
    ),
    "the summands of norms are not added up": (
        {"tp": 2},
        lambda patch: patch.setattr(
            torchtitan.parallel.tensor, "gradients_are_summands", lambda cut, **how: False
        ),
    ),
    "gradients are scaled by tp": (
        {"tp": 2},
        lambda patch: patch.setattr(
            torchtitan.parallel.tensor, "sum_to_parts", scaled(torchtitan.parallel.tensor)
        ),
    ),
    "a parameter is skipped": ({"dp_shard": 2}, skip_a_parameter),
}


def scaled(module):
    sum_to_parts = module.sum_to_parts

    def twice(tensor, dim, group):
        out = sum_to_parts(tensor, dim, group)
        return out + (out - out.detach())  # the value as it is, the gradient twice as large

    return twice


def run_with_a_fault(folder: Any, case: Case, fault: str) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault][1](patch)
        return run(folder, case)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_grid_notices(ranks, tmp_path, one_process, fault):
    case = Case("dense", FAULTS[fault][0])
    results = ranks(run_with_a_fault, case.world, tmp_path, case, fault)
    with pytest.raises(AssertionError):
        assert_equal(results, one_process(case), WEIGHTS_REL["adamw"])


def composability(passed: set[str]) -> str:
    """The page that says what the grid proves: the cases of `PROVED` that passed."""
    lines = [
        "# Composability",
        "",
        "Each mesh below trained as one process does. Written by `./tests/run.sh --slow`: a run adds what passed and takes out what failed;",
        f"{N_STEPS} steps in float32 over packed documents of uneven length, with masked labels and gradient accumulation.",
        "Losses, gradient norms and each parameter's first gradient agree to 1e-5, every token goes to the same experts,",
        f"and each final weight is off by no more than {WEIGHTS_REL['adamw']:.0e} of the way that it moved under AdamW,",
        f"{WEIGHTS_REL['sgd']:.0e} under SGD.",
        "The models are small (`tests/distributed/grid.py`): what is proved is the arithmetic, not the speed.",
        "",
    ]
    for model, about in ABOUT.items():
        cases_of_model = [c for c in PROVED.values() if c.model == model and str(c) in passed]
        lines += [f"## {about}", "", "| ranks | case |", "|---|---|"]
        cases_of_model.sort(key=lambda case: (case.world, len(case.degrees)))
        lines += [f"| {case.world} | `{case}` |" for case in cases_of_model]
        lines.append("")
    waiting = [name for name in PROVED if name not in passed]
    if waiting:
        lines += ["## In the grid, not run yet", "", *(f"- {name}" for name in waiting), ""]
    lines += ["## Refused before the start", "", "| case | why |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in REFUSED.items()]
    return "\n".join(lines) + "\n"


ABOUT = {
    "dense": "Dense, with grouped heads and norms of queries and keys",
    "tied": "The same with tied embeddings",
    "deep": "Eight blocks, for eight stages",
    "moe": "Experts",
    "deep moe": "Eight blocks with experts, for eight stages",
}


def test_a_run_of_some_cases_keeps_what_the_page_says_of_others():
    first, second, third, fourth = list(PROVED)[:4]
    text = composability({first, second, third})
    assert proved(text, {}) == {first, second, third}
    assert proved(text, {second: False, third: True, fourth: True}) == {first, third, fourth}
    gone = text.replace(f"`{first}`", "`a case that is no longer in the grid`")
    assert proved(gone, {}) == {second, third}


def test_the_page_is_about_this_grid():
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"\| `(.+)` \|", text))
    assert named >= {str(case) for case in SLICE}
    assert text == composability(named), (
        "run tests/distributed/test_composition.py with --slow: it proves the grid and writes the page"
    )
