"""The optimizer as the trainer sees it: updates that can be masked on the device, and state by parameter name."""

# Shapes: R rows and C columns of a rank's part of a parameter, all its dimensions but the last flattened into rows.

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.errors import ConfigError
from torchtitan.optim.param_groups import ParamGroup, check_patterns, group_parameters
from torchtitan.optim.rounding import Noise, stochastic_round
from torchtitan.optim.state import (
    Plain,
    State,
    StateDtype,
    block_of,
    cuts_blocks,
    element_bytes,
    fitting_block,
    make_state,
    matrix_of,
    misfit,
)

_CHUNK_NUMEL = 1 << 23
"""Elements that are widened to float32 at once, so that a large parameter needs no large temporaries."""


@dataclass(slots=True)
class Group:
    """Parameters with the same settings.

    Attributes:
        peak_lr: learning rate at the schedule's factor 1.
        lr: learning rate of the next update.
        weight_decay: decoupled.
    """

    peak_lr: float
    lr: float
    weight_decay: float


@dataclass(slots=True)
class Slot:
    """A parameter with what the optimizer keeps for it.

    Attributes:
        name: of the parameter.
        parameter: tensor or DTensor.
        group: its settings.
        step: float32 scalar on its device, how often it was updated.
        states: by name.
        noise: rounds a bfloat16 parameter.
    """

    name: str
    parameter: nn.Parameter
    group: Group
    step: Tensor
    states: dict[str, State]
    noise: Noise

    @property
    def direct(self) -> bool:
        """Whether a kernel can work on parameter, gradient and state where they lie."""
        grad = self.parameter.grad
        types = {self.parameter.dtype, None if grad is None else grad.dtype}
        return types == {torch.float32} and all(
            isinstance(state, Plain) and state.in_place for state in self.states.values()
        )

    def chunks(self) -> Iterator[slice]:
        """Rows of this rank's part, a bounded number of elements at a time."""
        rows, columns = matrix_of(self.parameter).shape
        size = max(1, _CHUNK_NUMEL // max(1, columns))
        return (slice(start, min(rows, start + size)) for start in range(0, rows, size))

    def load(self, rows: slice) -> Tensor:
        """The parameter's rows in float32, ``(r, C)``: themselves, or a copy of a bfloat16 one."""
        return matrix_of(self.parameter)[rows].float()

    def store(self, rows: slice, values: Tensor, skip: Tensor) -> None:
        """Keep ``values`` ``(r, C)`` as the parameter's rows, or what there was where ``skip`` is 1."""
        target = matrix_of(self.parameter)[rows]
        if target.dtype != torch.float32:
            values = stochastic_round(values.contiguous(), self.noise.bits(self.step, rows))
        target.copy_(torch.where(skip > 0, target, values))


class Optimizer(Configurable):
    """An update rule for each parameter, and state that exists from the start.

    So a checkpoint has the same names before the first step as after it. A subclass says what it keeps
    (`state_signs`) and how it moves float32 numbers (`rule`); how they are stored is none of its business.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings common to all optimizers."""

        OPERATIONAL: ClassVar[frozenset[str]] = frozenset({"in_backward", "offload"})

        lr: float = 3e-4
        """Peak learning rate; the schedule multiplies it."""
        weight_decay: float = 0.1
        """Decoupled weight decay of matrices; vectors (norms, biases) have none unless a group says so."""
        param_groups: list[ParamGroup.Config] = field(default_factory=list)
        """Other settings for parameters by name; the first pattern that matches wins, an unmatched one is an error."""
        state_dtype: StateDtype = "float32"
        """How state is stored: float32; bfloat16, rounded stochastically; or codes of 8 or 4 bits in blocks with a
        scale each. Vectors, and matrices of less than 4096 elements, keep float32 instead of codes."""
        block_size: int | None = None
        """Elements of a block of codes, which lie in one row; None means 256 for 8 bits and 128 for 4."""
        in_backward: bool = False
        """Update each parameter, and free its gradient, as soon as that is complete in the backward. Same numbers,
        less memory; not with micro-batches, global clipping or a pipeline."""
        offload: bool = False
        """Keep state in host memory and bring it to the GPU for each update: less memory, slower steps."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            if not 0 <= self.lr < float("inf"):
                yield Problem("lr", self.lr, "is not 0 or more and finite", "set one such as 3e-4")
            if self.weight_decay < 0:
                yield Problem("weight_decay", self.weight_decay, "is negative", "set 0 or more")
            if self.block_size is not None and (self.block_size < 16 or self.block_size % 2):
                yield Problem(
                    "block_size", self.block_size, "is not even and at least 16", "set 64 or 256"
                )

        def check_parameters(
            self, named_parameters: Mapping[str, tuple[Tensor, int]], tp: int
        ) -> Iterator[Problem]:
            """Yield what does not fit the parameters of a model.

            Args:
                named_parameters: name -> the whole trainable parameter, and the ranks that its last dimension is dealt to.
                tp: ranks of tensor parallelism, for the text.
            """
            yield from check_patterns(self.param_groups, list(named_parameters))
            cut: dict[str, tuple[int, int]] = {}
            fitting: set[int | None] = set()
            for name, (parameter, ranks) in named_parameters.items():
                block, columns = (
                    block_of(parameter, self.state_dtype, self.block_size),
                    parameter.shape[-1],
                )
                if block and cuts_blocks(columns, ranks, block):
                    cut.setdefault(re.sub(r"\.\d+\.", ".*.", name), (columns, block))
                    fitting.add(fitting_block(columns, ranks, block))
            if cut:
                parts = [f"{name} ({columns} columns)" for name, (columns, _) in cut.items()]
                blocks = sorted({str(block) for _, block in cut.values()})
                sizes = [size for size in fitting if size is not None]
                smaller = [] if None in fitting else [f"optimizer.block_size={gcd(*sizes)}"]
                yield Problem(
                    "state_dtype",
                    self.state_dtype,
                    f"keeps blocks of {' or '.join(blocks)} elements, and parallelism.tp={tp} cuts them in "
                    f"{', '.join(parts)}",
                    f"set {' or '.join([*smaller, 'optimizer.state_dtype=bfloat16'])}",
                )

        def build(
            self,
            named_parameters: Iterable[tuple[str, nn.Parameter]],
            other_names: Iterable[str] = (),
        ) -> "Optimizer":
            """Make the optimizer of the trainable ones among ``named_parameters``.

            Args:
                named_parameters: those of this rank.
                other_names: parameters that are on other ranks alone (pipeline stages).
            """
            raise TypeError(f"{type(self).__qualname__} is a base; choose AdamW.Config")

        def n_states(self, name: str, parameter: Tensor) -> int:
            """Quantities that are kept for each element of a parameter: the length of `Optimizer.state_signs`."""
            raise TypeError(f"{type(self).__qualname__} does not say how much state it keeps")

        def state_bytes(self, name: str, parameter: Tensor, part: Sequence[int]) -> int:
            """Bytes of state on the device for a rank's part of a parameter; for the planner.

            Args:
                name: of the parameter.
                parameter: whole.
                part: shape of the rank's part.
            """
            per_element = element_bytes(self.state_dtype, parameter, self.block_size)
            stored = 0 if self.offload else int(prod(part) * per_element)
            return 4 + self.n_states(name, parameter) * stored

        def update_bytes(self, name: str, parameter: Tensor, part: Sequence[int]) -> int:
            """Bytes that the update of a rank's part needs at once besides; for the planner, see `state_bytes`.

            Nothing where a kernel works in place; otherwise a chunk of states and, if it is not in float32, of the parameter
            in float32, and three more while one of them is stored.
            """
            coded = element_bytes(self.state_dtype, parameter, self.block_size) != 4
            if parameter.dtype == torch.float32 and not coded and not self.offload:
                return 0
            states = self.n_states(name, parameter) if coded or self.offload else 0
            widened = states + (parameter.dtype != torch.float32)
            return 4 * min(prod(part), _CHUNK_NUMEL) * (widened + 3)

    def __init__(
        self,
        config: Config,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        other_names: Iterable[str] = (),
    ) -> None:
        grouped = group_parameters(
            named_parameters,
            config.param_groups,
            weight_decay=config.weight_decay,
            other_names=other_names,
        )
        _check_blocks(config, [member for _, members in grouped for member in members])
        self.groups: list[Group] = []
        self.slots: dict[nn.Parameter, Slot] = {}
        """By parameter, group by group."""
        for settings, members in grouped:
            peak_lr = config.lr * settings.lr_scale
            self.groups.append(Group(peak_lr, peak_lr, settings.weight_decay))
            for name, parameter in members:
                self.slots[parameter] = self._make_slot(config, name, parameter, self.groups[-1])

    @abstractmethod
    def state_signs(self, name: str, parameter: nn.Parameter) -> Mapping[str, bool]:
        """What is kept for each element of a parameter: name -> whether it can be negative."""

    @abstractmethod
    def rule(
        self,
        group: Group,
        parameters: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Mapping[str, Sequence[Tensor]],
        steps: Sequence[Tensor],
        skip: Tensor,
    ) -> None:
        """Move parameters and their state in place; element by element, so parts of a parameter may come alone.

        Args:
            group: settings of all of them.
            parameters: float32.
            grads: float32, of the same shapes.
            states: for each name of `state_signs` as many tensors, of the same shapes.
            steps: number of this update for each, counted from 1; float32 scalars.
            skip: scalar float32; where it is 1, nothing changes, whatever the gradients hold.
        """

    def set_lr_factor(self, factor: float) -> float:
        """Set each group's rate to ``factor`` times its peak; return that of the first group."""
        for group in self.groups:
            group.lr = group.peak_lr * factor
        return self.groups[0].lr if self.groups else 0.0

    def step(self, skip: Tensor) -> None:
        """Update all parameters that have a gradient, or none of them and no state where ``skip`` is 1.

        Args:
            skip: scalar float32 on the parameters' device, 0 or 1; it is read by the kernels, not by the host.
        """
        self.update([p for p in self.slots if p.grad is not None], skip)

    @torch.no_grad()
    def update(self, parameters: Sequence[nn.Parameter], skip: Tensor) -> None:
        """`step` for some of the parameters, each of which has a gradient."""
        slots = [self.slots[parameter] for parameter in parameters]
        if not slots:
            return
        torch._foreach_add_([slot.step for slot in slots], 1 - skip)  # pyright: ignore[reportPrivateImportUsage] - one kernel for all
        for group in self.groups:
            members = [slot for slot in slots if slot.group is group]
            self._update_whole([slot for slot in members if slot.direct], group, skip)
            for slot in members:
                if not slot.direct:
                    self._update_in_chunks(slot, skip)

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter in self.slots:
            parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Live state tensors by ``<parameter name>.<state name>``; loading writes into them."""
        found: dict[str, Tensor] = {}
        for slot in self.slots.values():
            found[f"{slot.name}.step"] = slot.step
            for name, state in slot.states.items():
                for suffix, tensor in state.tensors().items():
                    found[f"{slot.name}.{name}{suffix}"] = tensor
        return found

    def _make_slot(self, config: Config, name: str, parameter: nn.Parameter, group: Group) -> Slot:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        states = {
            state: make_state(
                config.state_dtype,
                parameter,
                f"{name}.{state}",
                step,
                signed=signed,
                block_size=config.block_size,
                offload=config.offload,
            )
            for state, signed in self.state_signs(name, parameter).items()
        }
        return Slot(name, parameter, group, step, states, Noise(name, parameter))

    def _update_whole(self, slots: Sequence[Slot], group: Group, skip: Tensor) -> None:
        """Parameters whose tensors a kernel can take as they are, in one launch."""
        if not slots:
            return
        everything = slice(None)
        names = slots[0].states
        self.rule(
            group,
            [matrix_of(slot.parameter) for slot in slots],
            [matrix_of(_grad(slot.parameter)) for slot in slots],
            {name: [slot.states[name].load(everything) for slot in slots] for name in names},
            [slot.step for slot in slots],
            skip,
        )

    def _update_in_chunks(self, slot: Slot, skip: Tensor) -> None:
        """One parameter, widened to float32 and stored again."""
        grad = matrix_of(_grad(slot.parameter))
        for rows in slot.chunks():
            values = slot.load(rows)
            states = {name: state.load(rows) for name, state in slot.states.items()}
            self.rule(
                slot.group,
                [values],
                [grad[rows].float()],
                {name: [loaded] for name, loaded in states.items()},
                [slot.step],
                skip,
            )
            for name, state in slot.states.items():
                state.store(rows, states[name], skip)
            if values.dtype != slot.parameter.dtype:
                slot.store(rows, values, skip)


class AdamW(Optimizer):
    """Adam with decoupled weight decay (arXiv:1711.05101), in torch's fused kernel."""

    @dataclass(kw_only=True, slots=True)
    class Config(Optimizer.Config):
        """Settings of `AdamW`."""

        betas: tuple[float, float] = (0.9, 0.95)
        """Decay of the running means of the gradient and of its square."""
        eps: float = 1e-8
        """Added to the root of the second moment."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            yield from Optimizer.Config.check(self)
            if not all(0 <= beta < 1 for beta in self.betas):
                yield Problem("betas", self.betas, "are not in [0, 1)", "set such as 0.9 0.95")
            if self.eps < 0:
                yield Problem("eps", self.eps, "is negative", "set one such as 1e-8")

        def build(
            self,
            named_parameters: Iterable[tuple[str, nn.Parameter]],
            other_names: Iterable[str] = (),
        ) -> "AdamW":
            """Make the optimizer; see `Optimizer.Config.build`."""
            return AdamW(self, named_parameters, other_names)

        def n_states(self, name: str, parameter: Tensor) -> int:
            """See `Optimizer.Config.n_states`."""
            del name, parameter
            return 2

    def __init__(
        self,
        config: Config,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        other_names: Iterable[str] = (),
    ) -> None:
        self._betas, self._eps = config.betas, config.eps
        super().__init__(config, named_parameters, other_names)

    def state_signs(self, name: str, parameter: nn.Parameter) -> Mapping[str, bool]:
        """See `Optimizer.state_signs`."""
        return {"exp_avg": True, "exp_avg_sq": False}

    def rule(
        self,
        group: Group,
        parameters: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Mapping[str, Sequence[Tensor]],
        steps: Sequence[Tensor],
        skip: Tensor,
    ) -> None:
        """See `Optimizer.rule`."""
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage] - what torch.optim.AdamW calls
            list(parameters),
            list(grads),
            list(states["exp_avg"]),
            list(states["exp_avg_sq"]),
            [],
            list(steps),
            lr=group.lr,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=group.weight_decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
            found_inf=skip,
        )


def _grad(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("a parameter without a gradient cannot be updated")
    return parameter.grad


def _check_blocks(config: Optimizer.Config, members: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse blocks of codes that the mesh would cut.

    Raises:
        ConfigError: naming every such parameter.
    """
    problems = []
    for name, parameter in members:
        block = block_of(parameter, config.state_dtype, config.block_size)
        problem = misfit(parameter, block) if block else None
        if problem:
            problems.append(f"{name}: {problem}")
    if problems:
        raise ConfigError(f"optimizer.state_dtype={config.state_dtype}: " + "; ".join(problems))
