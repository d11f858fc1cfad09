"""The optimizer as the trainer sees it: a step that can be masked on the device, and state by parameter name."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.optim.param_groups import ParamGroup, group_parameters


class Optimizer(Configurable):
    """Wraps one ``torch.optim`` optimizer whose kernel knows ``found_inf`` (all the fused ones do).

    Its state exists from the start, so a checkpoint has the same names before the first step as after it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings common to all optimizers."""

        lr: float = 3e-4
        """Peak learning rate; the schedule multiplies it."""
        weight_decay: float = 0.1
        """Decoupled weight decay of matrices; vectors (norms, biases) have none unless a group says so."""
        param_groups: list[ParamGroup.Config] = field(default_factory=list)
        """Other settings for parameters by name; the first pattern that matches wins, an unmatched one is an error."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            if not 0 <= self.lr < float("inf"):
                yield Problem("lr", self.lr, "is not 0 or more and finite", "set one such as 3e-4")
            if self.weight_decay < 0:
                yield Problem("weight_decay", self.weight_decay, "is negative", "set 0 or more")

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

        @property
        def steps_in_backward(self) -> bool:
            """Whether each gradient is used and freed in the backward, so that they do not pile up."""
            return False

        def state_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
            """Bytes of state of a parameter; for the planner.

            Args:
                shape: of the rank's part of it.
                itemsize: bytes of one of its elements.
            """
            raise TypeError(f"{type(self).__qualname__} is a base; choose AdamW.Config")

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        names: dict[nn.Parameter, str],
        init_state: "dict[nn.Parameter, dict[str, Tensor]]",
    ) -> None:
        self.inner = inner
        self._names = names
        for parameter, state in init_state.items():
            inner.state[parameter] = state

    def set_lr_factor(self, factor: float) -> float:
        """Set each group's rate to ``factor`` times its peak; return that of the first group."""
        for group in self.inner.param_groups:
            group["lr"] = group["peak_lr"] * factor
        return self.inner.param_groups[0]["lr"] if self.inner.param_groups else 0.0

    def step(self, skip: Tensor) -> None:
        """Update all parameters, or none of them and no state where ``skip`` is 1.

        Args:
            skip: scalar float32 on the parameters' device, 0 or 1; it is read by the kernel, not by the host.
        """
        # The fused kernels take the mask as GradScaler does: attributes of the optimizer.
        self.inner.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue] - torch's own protocol
        self.inner.grad_scale = None  # pyright: ignore[reportAttributeAccessIssue]
        self.inner.step()

    def zero_grad(self) -> None:
        """Free the gradients."""
        self.inner.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """Live state tensors by ``<parameter name>.<state name>``; loading writes into them."""
        return {
            f"{name}.{key}": value
            for parameter, name in self._names.items()
            for key, value in self.inner.state[parameter].items()
        }


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

        def state_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
            """Two running means in the parameter's type, and the step in float32."""
            return 2 * prod(shape) * itemsize + 4

    def __init__(
        self,
        config: Config,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        other_names: Iterable[str] = (),
    ) -> None:
        groups = group_parameters(
            named_parameters,
            config.param_groups,
            weight_decay=config.weight_decay,
            other_names=other_names,
        )
        names = {parameter: name for _, members in groups for name, parameter in members}
        inner = torch.optim.AdamW(
            [
                {
                    "params": [parameter for _, parameter in members],
                    "peak_lr": config.lr * settings.lr_scale,
                    "weight_decay": settings.weight_decay,
                }
                for settings, members in groups
            ],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        state = {
            parameter: {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            for parameter in names
        }
        super().__init__(inner, names, state)
