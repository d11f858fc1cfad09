"""Stochastic gradient descent."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchtitan.config.configurable import Problem
from torchtitan.optim.optimizer import Group, Optimizer


class SGD(Optimizer):
    """SGD with momentum and decoupled weight decay (SGDW, arXiv:1711.05101 algorithm 1), in torch's fused kernel.

    Without momentum it keeps no state.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Optimizer.Config):
        """Settings of `SGD`."""

        momentum: float = 0.9
        """Decay of the running sum of gradients; 0 for none."""
        nesterov: bool = False
        """Step along the gradient as it will be after the momentum's part of the step."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            yield from Optimizer.Config.check(self)
            if not 0 <= self.momentum < 1:
                yield Problem("momentum", self.momentum, "is not in [0, 1)", "set one such as 0.9")
            if self.nesterov and self.momentum == 0:
                yield Problem("nesterov", True, "needs momentum, which is 0", "set momentum=0.9")

        def build(
            self,
            named_parameters: Iterable[tuple[str, nn.Parameter]],
            other_names: Iterable[str] = (),
        ) -> "SGD":
            """Make the optimizer; see `Optimizer.Config.build`."""
            return SGD(self, named_parameters, other_names)

        def n_states(self, name: str, parameter: Tensor) -> int:
            """See `Optimizer.Config.n_states`."""
            del name, parameter
            return 1 if self.momentum else 0

    def __init__(
        self,
        config: Config,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        other_names: Iterable[str] = (),
    ) -> None:
        self._momentum, self._nesterov = config.momentum, config.nesterov
        super().__init__(config, named_parameters, other_names)

    def state_signs(self, name: str, parameter: nn.Parameter) -> Mapping[str, bool]:
        """See `Optimizer.state_signs`."""
        return {"momentum_buffer": True} if self._momentum else {}

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
        if group.weight_decay:  # the kernel's own is not decoupled
            torch._foreach_mul_(list(parameters), 1 - group.lr * group.weight_decay * (1 - skip))  # pyright: ignore[reportPrivateImportUsage] - one kernel for all
        torch._fused_sgd_(  # pyright: ignore[reportPrivateImportUsage] - what torch.optim.SGD calls
            list(parameters),
            list(grads),
            list(states.get("momentum_buffer", ())),
            weight_decay=0.0,
            momentum=self._momentum,
            lr=group.lr,
            dampening=0.0,
            nesterov=self._nesterov,
            maximize=False,
            is_first_step=False,  # the buffer starts at 0, which comes to the same
            found_inf=skip,
        )
