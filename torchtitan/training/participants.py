"""The modules of a model that take part in a step besides their forward, together."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.models.layers.participant import Reading, StepParticipant
from torchtitan.parallel.mesh import Mesh

_REDUCE = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_NEUTRAL = {"sum": 0.0, "max": -float("inf"), "min": float("inf")}


class Participants:
    """Finds every `StepParticipant` of a model and serves them with one all-reduce a step.

    Args:
        model: whose modules are walked, once: each module counts once, however often it is called.
        mesh: of the run.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._mesh = mesh
        self._modules = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, StepParticipant)
        }
        self._names: dict[str, list[str]] | None = None

    def before_step(self, normalizer: Tensor) -> None:
        """Begin a step whose main loss is divided by ``normalizer``."""
        for module in self._modules.values():
            module.before_step(normalizer)

    @torch.no_grad()
    def after_update(self, skip: Tensor) -> dict[str, Tensor]:
        """Add the sums up over all ranks with other tokens, let each module update, and return the step's metrics.

        Args:
            skip: scalar, 1 where the optimizer changed nothing.

        Returns:
            Name -> scalar, the same on all ranks, of the modules of all pipeline stages.
        """
        local = [module.step_sums() for module in self._modules.values()]
        readings: list[dict[str, Reading]] = []
        if local:
            everywhere = self._mesh.sum_over_tokens(torch.cat(local))
            parts = everywhere.split([len(part) for part in local])
            for (name, module), sums in zip(self._modules.items(), parts, strict=True):
                module.after_update(sums, skip)
                readings.append(dict(module.readings(name, sums)))
        return self._join(readings)

    def _join(self, readings: list[dict[str, Reading]]) -> dict[str, Tensor]:
        """One number per name: over the modules here, then over the pipeline's stages, which may have other names."""
        if self._names is None:
            self._names = self._agree_on_names(readings)
        joined: dict[str, Tensor] = {}
        for join, names in self._names.items():
            values: dict[str, list[Tensor]] = {name: [] for name in names}
            for found in readings:
                for name in found.keys() & values.keys():
                    values[name].append(found[name].value)
            neutral = torch.full((), _NEUTRAL[join], dtype=torch.float64, device=self._mesh.device)
            here = [
                _REDUCE[join](torch.stack(each)) if each else neutral for each in values.values()
            ]
            vector = torch.stack(here)
            if self._mesh.pp.size() > 1:
                dist.all_reduce(vector, op=_OPS[join], group=self._mesh.pp.get_group())
            joined.update(zip(names, vector.unbind(), strict=True))
        return joined

    def _agree_on_names(self, readings: list[dict[str, Reading]]) -> dict[str, list[str]]:
        """The names that any stage has, for each way to join that occurs: the same on every rank."""
        own = sorted({(r.join, name) for found in readings for name, r in found.items()})
        everyone = [own]
        if self._mesh.pp.size() > 1:
            everyone = [own] * self._mesh.pp.size()
            dist.all_gather_object(everyone, own, group=self._mesh.pp.get_group())
        names: dict[str, list[str]] = {}
        for join, name in sorted({pair for found in everyone for pair in found}):
            names.setdefault(join, []).append(name)
        return names
