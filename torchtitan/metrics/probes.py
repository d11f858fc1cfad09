"""Metrics measured on the models themselves, at logged steps."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from torchtitan.config.configurable import Configurable
from torchtitan.errors import ConfigError


class Probe(Configurable):
    """Base of the probes: a callable from the trainer's models to numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of a probe."""

        def build(self) -> "Probe":
            """Make the probe."""
            raise NotImplementedError(f"{type(self).__qualname__} must define build()")

    def __call__(self, models: Mapping[str, nn.Module]) -> dict[str, Tensor | float]:
        """Measure, without gradients. Called on every rank, so it may use collectives.

        Args:
            models: the trainer's models by name (``policy``, ...), sharded as they are.

        Returns:
            Metric name -> one number, the same on all ranks; tensors stay on their device.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define __call__()")


@runtime_checkable
class InStages(Protocol):
    """A model whose stages are on several ranks: this one's parameters are not all."""

    def names_elsewhere(self) -> Iterable[str]:
        """Names of the parameters that this rank has not."""
        ...

    def sum_over_stages(self, tensor: Tensor) -> Tensor:
        """Add ``tensor`` up over the ranks that hold the stages, in place, and return it."""
        ...


class WeightNorm(Probe):
    """L2 norm of all the weights that a pattern matches, as one vector."""

    @dataclass(kw_only=True, slots=True)
    class Config(Probe.Config):
        """Settings of the weight norm."""

        pattern: str = "*"
        """Which parameters, as a shell pattern on `<model>.<parameter>`: `policy.*norm.weight`. It must match some."""

        name: str = "weight_norm"
        """Name of the metric."""

        def build(self) -> "WeightNorm":
            """Make the probe."""
            return WeightNorm(self)

    def __init__(self, config: "WeightNorm.Config") -> None:
        self._pattern = config.pattern
        self._name = config.name

    def __call__(self, models: Mapping[str, nn.Module]) -> dict[str, Tensor | float]:
        """The norm, accumulated in float32 and complete over all shards.

        Raises:
            ConfigError: if the pattern matches no parameter.
        """
        names: list[str] = []
        norms: list[Tensor] = []
        for model_name, model in models.items():
            parameters = {f"{model_name}.{n}": p for n, p in model.named_parameters()}
            elsewhere = model.names_elsewhere() if isinstance(model, InStages) else ()
            known = [*parameters, *(f"{model_name}.{name}" for name in elsewhere)]
            names += known
            if not any(fnmatchcase(name, self._pattern) for name in known):
                continue
            chosen = [p for name, p in parameters.items() if fnmatchcase(name, self._pattern)]
            device = next(iter(parameters.values())).device
            norm = global_norm(chosen) if chosen else torch.zeros((), device=device)
            if isinstance(model, InStages):
                norm = model.sum_over_stages(norm.square()).sqrt()
            norms.append(norm)
        if not norms:
            raise ConfigError(
                f"metrics.probes pattern={self._pattern!r} matches none of {len(names)} parameters "
                f"(such as {', '.join(names[:3])}); change the pattern"
            )
        return {self._name: torch.linalg.vector_norm(torch.stack(norms))}


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norm of plain tensors and DTensors together; ``()``, float32, one collective for each way of sharding."""
    norms_by_sharding: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        sharding = (
            getattr(tensor, "device_mesh", None),
            getattr(tensor, "placements", None),
            tensor.device,
        )
        norm = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32)
        norms_by_sharding.setdefault(sharding, []).append(norm)
    totals: list[Tensor] = []
    for norms in norms_by_sharding.values():
        total = torch.linalg.vector_norm(torch.stack(norms))
        full_tensor = getattr(total, "full_tensor", None)
        totals.append(full_tensor() if full_tensor is not None else total)
    return torch.linalg.vector_norm(torch.stack([total.to(totals[0].device) for total in totals]))
