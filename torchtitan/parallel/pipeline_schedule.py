"""The order in which a pipeline's ranks work: as torch runs it, from a file, laid out in time, and as a picture."""

import csv
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from torchtitan import torch_api
from torchtitan.errors import ConfigError

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Rank r has stages r and n - 1 - r: the first and the last stage are both on rank 0."""
SINGLE = ("GPipe", "1F1B")
"""One stage a rank."""
SPLITS_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""The gradient of a stage's input is computed before that of its weights, which fills gaps."""

_COST = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Duration of each kind of action, in forwards of one stage: a backward is two matmuls for each of the forward's."""
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Action:
    """What a rank does at a time: stage, kind and micro-batch, written ``3F0``.

    Attributes:
        stage: number of the stage in the whole pipeline.
        kind: F forward, B backward, I backward to the stage's input alone, W backward to its weights alone.
        microbatch: number of the micro-batch in the step.
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Timed:
    """An action laid out in time; a forward of one stage takes 1.

    Attributes:
        action: what is done.
        start: when it begins.
    """

    action: Action
    start: int

    @property
    def end(self) -> int:
        """When it is done."""
        return self.start + _COST[self.action.kind]


Order = list[list[Action]]
"""For each rank its actions, in order."""


@functools.lru_cache(maxsize=16)
def make_order(schedule: str, pp: int, stages_per_rank: int, n_microbatches: int) -> Order:
    """The order of a named schedule, made once: torch takes a second for 64 micro-batches on 8 ranks.

    Args:
        schedule: a name of `Pipeline.Config.schedule`, ``CSV`` aside.
        pp: number of ranks.
        stages_per_rank: stages of each rank.
        n_microbatches: micro-batches of a step, of a number that the schedule takes.
    """
    forwards = [[Action(rank, "F", i) for i in range(n_microbatches)] for rank in range(pp)]
    backwards = [[Action(rank, "B", i) for i in range(n_microbatches)] for rank in range(pp)]
    if schedule == "GPipe":
        return [f + b for f, b in zip(forwards, backwards, strict=True)]
    if schedule == "1F1B":
        return [_one_forward_one_backward(forwards[r], backwards[r], pp - r) for r in range(pp)]
    stages = [_PaperStage(i, pp, pp * stages_per_rank) for i in range(stages_per_rank)]
    maker = torch_api.pipeline_schedules.get_schedule_class(schedule)
    made = maker(stages, n_microbatches).pipeline_order
    return [_flatten(made[rank]) for rank in range(pp)]


def read_order(path: str) -> Order:
    """Read a schedule from a file: a line a rank, actions such as ``0F1`` between commas, gaps left empty.

    The format is that of torch's ``_dump_csv(..., format="compute_only")``.

    Raises:
        ConfigError: if the file cannot be read, or a cell is no action.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            lines = [line for line in csv.reader(file) if any(cell.strip() for cell in line)]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}") from error
    return [
        [
            action
            for column, cell in enumerate(line)
            for action in _parse(cell.strip(), rank, column)
        ]
        for rank, line in enumerate(lines)
    ]


def simulate(order: Order) -> list[list[Timed]]:
    """Lay an order out in time, each action as early as its rank and what it waits for allow.

    A forward waits for that of the stage before; a backward for the own forward and the backward of the stage after.

    Raises:
        ConfigError: if no rank can go on, naming what each waits for.
    """
    n_stages = 1 + max(action.stage for line in order for action in line)
    done: dict[Action, int] = {}
    timed: list[list[Timed]] = [[] for _ in order]
    left = [list(reversed(line)) for line in order]
    while any(left):
        progress = False
        for rank, waiting in enumerate(left):
            while waiting:
                ready = _ready_at(waiting[-1], done, n_stages)
                if ready is None:
                    break
                free = timed[rank][-1].end if timed[rank] else 0
                timed[rank].append(Timed(waiting.pop(), max(free, ready)))
                done[timed[rank][-1].action] = timed[rank][-1].end
                progress = True
        if not progress:
            stuck = ", ".join(f"rank {r} at {w[-1]}" for r, w in enumerate(left) if w)
            raise ConfigError(f"deadlocks: {stuck}, each waiting for another")
    return timed


def bubble(timed: Sequence[Sequence[Timed]]) -> float:
    """Share of the ranks' time that is spent waiting, 0 to 1, with equal stages and a backward of two forwards."""
    busy = sum(t.end - t.start for line in timed for t in line)
    return 1 - busy / (len(timed) * max(line[-1].end for line in timed))


def draw(timed: Sequence[Sequence[Timed]], *, width: int = 120) -> str:
    """The schedule as text: a line a rank, a column for each forward's time; an action stands where it begins.

    Args:
        timed: from `simulate`.
        width: characters of a line; what comes later is cut off.
    """
    cell = 1 + max(len(str(t.action)) for line in timed for t in line)
    rows = []
    for rank, line in enumerate(timed):
        text = [" ." + " " * (cell - 2)] * max(each[-1].end for each in timed)
        for t in line:
            text[t.start] = f" {t.action}".ljust(cell)
            for later in range(t.start + 1, t.end):
                text[later] = " " + "-" * (cell - 2) + " "
        row = f"rank {rank:<{len(str(len(timed) - 1))}} |" + "".join(text).rstrip()
        rows.append(row if len(row) <= width else row[: width - 4] + " ...")
    return "\n".join(rows)


def _one_forward_one_backward(
    forwards: list[Action], backwards: list[Action], warm_up: int
) -> list[Action]:
    """``warm_up`` forwards, then a backward and a forward in turn, then the backwards that are left."""
    line = forwards[:warm_up]
    for i, backward in enumerate(backwards):
        line.append(backward)
        line += forwards[warm_up + i : warm_up + i + 1]
    return line


def _ready_at(action: Action, done: dict[Action, int], n_stages: int) -> int | None:
    """When what ``action`` waits for is done; None if that is not known yet."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return done.get(Action(stage - 1, "F", microbatch)) if stage else 0
    if action.kind == "W":
        return done.get(Action(stage, "I", microbatch))
    own = done.get(Action(stage, "F", microbatch))
    if stage == n_stages - 1 or own is None:
        return own
    later = Action(stage + 1, "B", microbatch), Action(stage + 1, "I", microbatch)
    ends = [done[each] for each in later if each in done]
    return max(own, ends[0]) if ends else None


def _flatten(line: Sequence["torch_api.pipeline_schedules._Action | None"]) -> list[Action]:
    """Torch's actions as ours; a forward overlapped with a backward is one after the other, as torch runs it."""
    found = []
    for action in line:
        for each in (action.sub_actions or (action,)) if action is not None else ():
            if each.computation_type.value in _COST and each.microbatch_index is not None:
                found.append(
                    Action(each.stage_index, each.computation_type.value, each.microbatch_index)
                )
    return found


def _parse(cell: str, rank: int, column: int) -> list[Action]:
    overlap = _OVERLAP.fullmatch(cell)
    actions = []
    for part in overlap[1].split(";") if overlap else [cell] if cell else []:
        match = _ACTION.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"has {cell!r} in line {rank + 1}, column {column + 1}, which is no action such as 0F1 "
                "(stage, one of F B I W, micro-batch)"
            )
        actions.append(Action(int(match[1]), match[2], int(match[3])))
    return actions


class _PaperStage:
    """As much of a stage as torch's schedules look at to make their order: no model, no process group."""

    def __init__(self, index: int, group_size: int, num_stages: int) -> None:
        self.stage_index = index
        self.group_rank = 0
        self.group_size = group_size
        self.num_stages = num_stages
        self.submod = nn.Module()
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
