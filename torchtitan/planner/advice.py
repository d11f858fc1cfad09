"""What to change when a run does not fit: tried in order, each with its new figure."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchtitan.config.tree import check_tree
from torchtitan.planner.memory import plan_memory
from torchtitan.trainer import Trainer

_WORTH = 0.01
"""A change that saves less than this part is left out."""
_MOST_RANKS = 4096


@dataclass(frozen=True, slots=True)
class Change:
    """One change, on top of those before it that helped.

    Attributes:
        flags: how to write it on the command line; empty where it is more ranks.
        costs: what is paid for it.
        total: bytes with it.
        fits: whether that is enough.
        ranks: of the run.
    """

    flags: str
    costs: str
    total: int
    fits: bool
    ranks: int


@dataclass(frozen=True, slots=True)
class _Idea:
    flags: str
    costs: str
    apply: Callable[[Trainer.Config], bool]
    """Change the config in place; False if there is nothing to change."""


def advise(config: Trainer.Config, world_size: int, memory: int) -> Iterator[Change]:
    """Yield changes that save memory until the run fits into ``memory`` bytes; then more ranks.

    What changes nothing of the result comes first, what costs speed or digits later; after each change it begins at the
    first again, which may help now that the peak has moved.
    """
    now, left = config, _ideas()
    total = plan_memory(now, world_size).total
    while total > memory:
        found = _first_that_helps(left, now, total, world_size)
        if found is None:
            yield from _more_ranks(now, world_size, memory)
            return
        idea, now, total = found
        left.remove(idea)
        yield Change(idea.flags, idea.costs, total, total <= memory, world_size)


def _first_that_helps(
    ideas: list[_Idea], config: Trainer.Config, total: int, world_size: int
) -> tuple[_Idea, Trainer.Config, int] | None:
    """The first idea that saves enough of ``total``, with the changed run and its bytes."""
    for idea in ideas:
        tried = copy.deepcopy(config)
        if not idea.apply(tried) or check_tree(tried, world_size):
            continue
        figure = plan_memory(tried, world_size).total
        if figure <= total * (1 - _WORTH):
            return idea, tried, figure
    return None


def _more_ranks(config: Trainer.Config, world_size: int, memory: int) -> Iterator[Change]:
    """The fewest ranks, doubling, on which it fits."""
    ranks, rows = world_size, config.training.global_batch_rows
    while ranks < _MOST_RANKS:
        ranks *= 2
        tried = copy.deepcopy(config)
        tried.parallelism.dp_shard = -1
        tried.training.global_batch_rows = max(rows, tried.parallelism.resolve(ranks).data)
        if check_tree(tried, ranks):
            continue
        total = plan_memory(tried, ranks).total
        if total <= memory:
            yield Change("", f"{ranks} ranks instead of {world_size}", total, True, ranks)
            return


def _ideas() -> list[_Idea]:
    return [
        _Idea(
            "--parallelism.reshard-after-forward True",
            "one more all-gather a block",
            lambda c: _set(c.parallelism, "reshard_after_forward", True),
        ),
        _Idea(
            "--training.micro-batch-rows 1",
            "smaller matmuls",
            lambda c: _set(c.training, "micro_batch_rows", 1),
        ),
        _Idea(
            "--activation-checkpointing.mode full",
            "a third more FLOPs",
            lambda c: _set(c.activation_checkpointing, "mode", "full"),
        ),
        _Idea(
            "--optimizer.in-backward True --training.clip-by parameter",
            "no clipping by the norm of all gradients",
            _in_backward,
        ),
        _Idea("--model.head.chunk-tokens 256", "smaller matmuls of the head", _small_chunks),
        _Idea(
            "--model.head.weight-gradient by_vocabulary",
            "one more matmul of the head",
            _by_vocabulary,
        ),
        _Idea(
            "--optimizer.state-dtype int8",
            "optimizer state of 8 bits",
            lambda c: _set(c.optimizer, "state_dtype", "int8"),
        ),
        _Idea(
            "--training.parameter-dtype bfloat16",
            "no float32 weights: updates are rounded stochastically",
            lambda c: _set(c.training, "parameter_dtype", "bfloat16"),
        ),
        _Idea(
            "--activation-checkpointing.offload True",
            "activations cross to the host and back in each step",
            lambda c: _set(c.activation_checkpointing, "offload", True),
        ),
        _Idea(
            "--optimizer.offload True",
            "optimizer state crosses to the host and back in each step",
            lambda c: _set(c.optimizer, "offload", True),
        ),
    ]


def _set(node: object, name: str, value: object) -> bool:
    """Set a field; False if it has the value already."""
    if getattr(node, name) == value:
        return False
    setattr(node, name, value)
    return True


def _in_backward(config: Trainer.Config) -> bool:
    if config.training.max_grad_norm is not None:
        config.training.clip_by = "parameter"
    return _set(config.optimizer, "in_backward", True)


def _by_vocabulary(config: Trainer.Config) -> bool:
    head = getattr(config.model, "head", None)
    return head is not None and _set(head, "weight_gradient", "by_vocabulary")


def _small_chunks(config: Trainer.Config) -> bool:
    head = getattr(config.model, "head", None)
    if head is None or head.chunk_tokens <= 256:
        return False
    head.chunk_tokens = 256
    return True
