"""Muon: orthogonalised momentum for matrices, AdamW for the rest."""

# Shapes: E matrices of a stack, M rows and N columns of each.

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from torchtitan import torch_api
from torchtitan.config.configurable import Problem
from torchtitan.models.layers.init import held_indices
from torchtitan.optim.optimizer import AdamW, Slot
from torchtitan.optim.state import element_bytes, matrix_of

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(AdamW):
    """Momentum of each matrix, made orthogonal by a Newton-Schulz iteration (Jordan et al., "Muon", 2024).

    A matrix that is sharded is gathered for the iteration, in bfloat16 and one at a time, and each rank keeps its part of the result;
    matrices of a stack (experts) that lie whole on a rank are not. What has fewer dimensions, and what
    `Config.adamw_patterns` names, is updated by `AdamW`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AdamW.Config):
        """Settings of `Muon`; those of `AdamW` are for the rest, but for rate and decay, which are for all."""

        momentum: float = 0.95
        """Decay of the running mean of the gradient."""
        nesterov: bool = True
        """Orthogonalise the mean as it will be, not as it is."""
        iterations: int = 5
        """Of Newton-Schulz."""
        scale: Literal["adamw", "shape"] = "adamw"
        """Factor on the rate of an M x N matrix: adamw is 0.2 sqrt(max(M, N)), which makes updates as large as AdamW's,
        so that one rate fits all (arXiv:2502.16982, equation 4); shape is sqrt(max(1, M / N))."""
        adamw_patterns: tuple[str, ...] = ("*embedding*", "*head.weight", "*router*")
        """Shell-style patterns over names of parameters that AdamW updates although they are matrices."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            yield from AdamW.Config.check(self)
            if not 0 <= self.momentum < 1:
                yield Problem("momentum", self.momentum, "is not in [0, 1)", "set one such as 0.95")
            if not 1 <= self.iterations <= 20:
                yield Problem("iterations", self.iterations, "is not in [1, 20]", "set 5")

        def build(
            self,
            named_parameters: Iterable[tuple[str, nn.Parameter]],
            other_names: Iterable[str] = (),
        ) -> "Muon":
            """Make the optimizer; see `Optimizer.Config.build`."""
            return Muon(self, named_parameters, other_names)

        def orthogonalises(self, name: str, parameter: Tensor) -> bool:
            """Whether a parameter is one of Muon's."""
            return parameter.ndim >= 2 and not any(
                fnmatch.fnmatchcase(name, pattern) for pattern in self.adamw_patterns
            )

        def n_states(self, name: str, parameter: Tensor) -> int:
            """See `Optimizer.Config.n_states`."""
            return 1 if self.orthogonalises(name, parameter) else 2

        def update_bytes(self, name: str, parameter: Tensor, part: Sequence[int]) -> int:
            """See `Optimizer.Config.update_bytes`; a matrix is whole in the iteration, in bfloat16.

            Float32 copies of the rank's part: momentum, direction and what is kept, and of a gradient or state in another
            type. Bfloat16: the direction; then the gathered matrices, the iteration's and the next, and two squares; or the
            result, and the parameter's new values in float32 with what rounding them makes.
            """
            if not self.orthogonalises(name, parameter):
                return AdamW.Config.update_bytes(self, name, parameter, part)
            rows, columns = parameter.shape[-2:]
            n_matrices = prod(part[:-2])
            numel, whole = prod(part), n_matrices * rows * columns
            square = n_matrices * min(rows, columns) ** 2
            low_bit = parameter.dtype != torch.float32
            coded = element_bytes(self.state_dtype, parameter, self.block_size) != 4
            copies = 2 + self.nesterov + low_bit + (coded or self.offload)
            gathered = whole if whole > numel else 0
            iteration = 2 * (gathered + 2 * whole + 2 * square)
            result = 2 * whole + 4 * numel * (2 + 3 * low_bit)
            return (4 * copies + 2) * numel + max(iteration, result)

    def __init__(
        self,
        config: Config,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        other_names: Iterable[str] = (),
    ) -> None:
        self._config = config
        self._held: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        super().__init__(config, named_parameters, other_names)

    def state_signs(self, name: str, parameter: nn.Parameter) -> Mapping[str, bool]:
        """See `Optimizer.state_signs`."""
        if self._config.orthogonalises(name, parameter):
            return {"momentum_buffer": True}
        return AdamW.state_signs(self, name, parameter)

    @torch.no_grad()
    def update(self, parameters: Sequence[nn.Parameter], skip: Tensor) -> None:
        """See `Optimizer.update`."""
        slots = [self.slots[parameter] for parameter in parameters]
        matrices = [slot for slot in slots if "momentum_buffer" in slot.states]
        for slot in matrices:
            slot.step += 1 - skip
            self._update_matrix(slot, skip)
        super().update([s.parameter for s in slots if "momentum_buffer" not in s.states], skip)

    def _held_of(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        """Numbers of the rows and columns of its matrices that this rank holds."""
        if parameter not in self._held:
            *_, rows, columns = held_indices(parameter)
            self._held[parameter] = rows, columns
        return self._held[parameter]

    def _update_matrix(self, slot: Slot, skip: Tensor) -> None:
        parameter, grad = slot.parameter, slot.parameter.grad
        if grad is None:
            raise RuntimeError(f"{slot.name} has no gradient")
        config, state, everything = self._config, slot.states["momentum_buffer"], slice(None)
        local = matrix_of(grad).float()
        before = state.load(everything)
        momentum = before.lerp(local, 1 - config.momentum)
        direction = local.lerp(momentum, config.momentum) if config.nesterov else momentum
        moved = torch.where(skip > 0, before, momentum)
        if state.in_place:
            before.copy_(moved)
        else:
            state.store(everything, moved, skip)
        shape = parameter.shape[-2:]
        factor = (
            0.2 * max(shape) ** 0.5
            if config.scale == "adamw"
            else max(1, shape[0] / shape[1]) ** 0.5
        )
        part = direction.to(torch.bfloat16).view(_local_shape(grad))
        orthogonal = newton_schulz(gather_matrices(part, parameter), config.iterations)
        if orthogonal.shape != part.shape:
            rows, columns = self._held_of(parameter)
            orthogonal = orthogonal.index_select(-2, rows).index_select(-1, columns)
        values = slot.load(everything) * (1 - slot.group.lr * slot.group.weight_decay)
        values.add_(orthogonal.reshape(values.shape), alpha=-slot.group.lr * factor)
        slot.store(everything, values, skip)


def gather_matrices(local: Tensor, like: Tensor) -> Tensor:
    """Whole matrices from the parts that the ranks hold, those that are here whole being left alone.

    Args:
        local: this rank's part, ``like``'s in shape.
        like: parameter that is sharded in the same way.

    Returns:
        ``(E.., M, N)``, E.. being as many as ``local`` has.
    """
    if not isinstance(like, torch_api.DTensor):
        return local
    within = {like.ndim - 2, like.ndim - 1}
    wanted = [
        torch_api.Replicate()
        if getattr(p, "dim", None) in within
        else p  # is_shard() denies strided shards
        for p in like.placements
    ]
    sharded = torch_api.DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return sharded.redistribute(placements=wanted).to_local()


def newton_schulz(matrices: Tensor, iterations: int) -> Tensor:
    """``(..., M, N)`` matrices with their singular values moved to about 1 (0.7 to 1.2), in bfloat16.

    The quintic iteration of Jordan et al., with their coefficients: steep at zero, not convergent to one.
    """
    a, b, c = _COEFFICIENTS
    x = (
        matrices.to(torch.bfloat16).flatten(0, -3)
        if matrices.ndim > 2
        else matrices.bfloat16()[None]
    )
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # (E, min(M, N), max(M, N))
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape)


def _local_shape(grad: Tensor) -> torch.Size:
    return grad.to_local().shape if isinstance(grad, torch_api.DTensor) else grad.shape
