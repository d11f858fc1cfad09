"""The mixture-of-experts layer."""

# Shapes: B batch, S sequence, T = B * S tokens, D dim, E experts, K experts of a token, N = T * K slots.

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchtitan.config.configurable import Problem
from torchtitan.models.layers.balance import AuxLoss, Ledger, contribute
from torchtitan.models.layers.dispatch import Dispatcher, Slots
from torchtitan.models.layers.experts import Experts, Matmul
from torchtitan.models.layers.feed_forward import FeedForward, SwiGLU
from torchtitan.models.layers.participant import Reading
from torchtitan.models.layers.plan import EXPERTS, SEQUENCE, Cut
from torchtitan.models.layers.router import Router
from torchtitan.models.layers.tape import Op, Tape, Value
from torchtitan.ops.grouped_matmul import ALIGNMENT


class MoE(FeedForward):
    """Each token goes to the `top_k` experts that the router chooses, and to the shared ones; none is ever dropped."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        """Settings of `MoE`."""

        OPERATIONAL = frozenset({"matmul", "log_experts"})
        ONE_GRAPH: ClassVar[bool] = False

        n_experts: int
        """Experts of the layer, of which a token uses `router.top_k`."""
        ffn_dim: int
        """Width of one expert's hidden layer."""
        router: Router.Config
        """How tokens choose."""
        shared: SwiGLU.Config | None = None
        """Experts that every token uses, as one layer of their joint width; None for none."""
        aux_loss: AuxLoss.Config | None = None
        """Loss that asks for an equal load; None for none."""
        matmul: Matmul = "grouped"
        """One kernel for all experts, or one matmul after the other: the reference, which takes any width."""
        log_experts: bool = False
        """Log the tokens of every single expert, besides the extremes."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            for name in ("n_experts", "ffn_dim"):
                if getattr(self, name) < 1:
                    yield Problem(name, getattr(self, name), "is not positive", "set at least 1")
            if self.n_experts >= 1:
                for problem in self.router.check_experts(self.n_experts):
                    yield problem.within("router")
            if self.matmul == "grouped" and self.ffn_dim % ALIGNMENT:
                yield self._unaligned("ffn_dim", self.ffn_dim)

        def check_dim(self, dim: int) -> Iterator[Problem]:
            """See `FeedForward.Config.check_dim`."""
            if self.matmul == "grouped" and dim % ALIGNMENT:
                yield self._unaligned("dim", dim)

        def divided_sizes(self) -> dict[str, int]:
            """See `FeedForward.Config.divided_sizes`: those of the shared experts; routed ones are not cut."""
            shared = self.shared.divided_sizes() if self.shared else {}
            return {f"shared.{key}": size for key, size in shared.items()}

        def check_stream(self, tp: int, sequence_shards: int) -> Iterator[Problem]:
            """See `FeedForward.Config.check_stream`."""
            if tp > 1 and sequence_shards == 1:
                yield Problem(
                    "",
                    type(self).__qualname__,
                    f"routes each token on one rank, but parallelism.sequence_parallel=False gives all tp={tp} ranks the "
                    "same tokens",
                    "set parallelism.sequence_parallel to True, or tp to 1",
                )

        def check_ep(self, ep: int, lendable: int) -> Iterator[Problem]:
            """See `FeedForward.Config.check_ep`."""
            if self.n_experts % ep:
                valid = [
                    n for n in range(1, lendable + 1) if not (self.n_experts % n or lendable % n)
                ]
                yield Problem(
                    "n_experts",
                    self.n_experts,
                    f"does not divide by the parallelism.ep={ep} ranks that share the experts",
                    f"set parallelism.ep to one of {valid}",
                )

        @staticmethod
        def _unaligned(name: str, value: int) -> Problem:
            return Problem(
                "matmul",
                "grouped",
                f"needs rows of whole 16 bytes, but {name}={value} is not a multiple of {ALIGNMENT}",
                f"set {name} to {-(-value // ALIGNMENT) * ALIGNMENT}, or matmul to loop",
            )

        def build(self, *, dim: int, init_std: float, residual_std: float) -> "MoE":
            """Make the layer; ``residual_std`` is for the projections that write to the residual stream."""
            return MoE(self, dim=dim, init_std=init_std, residual_std=residual_std)

    def __init__(self, config: Config, *, dim: int, init_std: float, residual_std: float) -> None:
        super().__init__()
        self.config = config
        self.router = config.router.build(dim=dim, n_experts=config.n_experts, init_std=init_std)
        self.experts = Experts(
            config.n_experts,
            dim,
            config.ffn_dim,
            init_std=init_std,
            residual_std=residual_std,
            matmul=config.matmul,
        )
        self.shared = config.shared and config.shared.build(
            dim=dim, init_std=init_std, residual_std=residual_std
        )
        self.aux_loss = config.aux_loss and config.aux_loss.build()
        self.dispatcher = Dispatcher()
        """Brings tokens to experts; replaced where ranks share them."""
        self._ledger = Ledger()
        self._normalizer: Tensor | None = None
        self.forward = torch.compiler.disable(self.forward)  # pyright: ignore[reportAttributeAccessIssue] - wraps, keeps the signature

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``(B, S/tp, D) -> (B, S/tp, D)``. Never compiled: how many tokens each expert gets is known only as it runs."""
        tokens = hidden_states.flatten(0, 1)  # (T, D)
        routing = self.router(tokens)
        slots = Slots(routing.experts, self.config.n_experts)
        rows, computed = self.dispatcher.run(
            self.experts, slots.scatter(tokens), slots.counts
        )  # (N, D)
        out = slots.gather(rows, routing.weights).view_as(hidden_states)  # (B, S, D)
        if self.shared is not None:
            out = out + self.shared(hidden_states)
        if not torch.is_grad_enabled():
            return out
        missing = slots.counts.sum() - computed  # over all ranks these are the dropped tokens
        sums = torch.cat((slots.counts, missing[None])).double()  # (E + 1,)
        if self.aux_loss is None:
            return contribute(out, self._ledger, torch.cat((sums, sums.new_zeros(1))))
        if self._normalizer is None:
            raise RuntimeError(
                "an auxiliary loss has nothing to be divided by: call before_step(normalizer) before the forward"
            )
        experts = routing.experts.unflatten(0, hidden_states.shape[:2])  # (B, S, K)
        probabilities = routing.probabilities.unflatten(0, hidden_states.shape[:2])  # (B, S, E)
        costs = self.aux_loss.costs(experts, self.config.n_experts, self.dispatcher)[
            :, None
        ]  # (B or 1, 1, E)
        loss = (probabilities.detach() * costs).sum(dtype=torch.float64)
        gradient = (costs / self._normalizer).expand_as(probabilities)
        return contribute(out, self._ledger, torch.cat((sums, loss[None])), probabilities, gradient)

    def record(self, tape: Tape, x: Value) -> Value:
        """See `Recorded`; every expert gets as many tokens as every other."""
        dim, b, top_k = x.features, x.itemsize, self.config.router.top_k
        slots = x.tokens * top_k
        weights = self._record_router(tape, x)
        rows = Value(slots, dim, b)
        indices = 8 * 4 * slots  # order, inverse and what they are made of
        tape.ops.append(Op("other", (x,), rows, keeps=indices, backward_scratch=rows.nbytes))
        numel = self.experts.gate_proj.weight.numel() // tape.place.ep
        if tape.place.ep > 1:  # there, and sorted by expert
            rows = tape.exchange(tape.exchange(rows))
        gate = tape.elementwise(tape.linear(rows, self.config.ffn_dim, weight_numel=numel))
        up = tape.linear(rows, self.config.ffn_dim, weight_numel=numel)
        done = tape.linear(tape.multiply(gate, up), dim, weight_numel=numel)
        if tape.place.ep > 1:
            done = tape.exchange(tape.exchange(done))
        done = tape.elementwise(done, saves=False)  # in the order of the tokens
        out = Value(x.tokens, dim, b)
        tape.ops.append(Op("matmul", (done, weights), out, saves=(done,), keeps=b * slots))
        return out if self.shared is None else tape.add(out, self.shared.record(tape, x))

    def _record_router(self, tape: Tape, x: Value) -> Value:
        """Record what makes the weights of each token's experts, in float32."""
        n_experts, top_k = self.config.n_experts, self.config.router.top_k
        scores, states = 4 * x.tokens * n_experts, 4 * x.tokens * x.features
        copied = x.itemsize != 4
        out = Value(x.tokens, top_k, 4)
        tape.ops.append(
            Op(
                "matmul",
                (x,),
                out,
                saves=() if copied else (x,),
                keeps=scores
                + 24 * x.tokens * top_k
                + copied * (states + 4 * n_experts * x.features),
                scratch=2 * scores,
                backward_scratch=2 * scores + copied * states,
                weights=n_experts * x.features * x.itemsize,
            )
        )
        return out

    def parallel_plan(self) -> Mapping[str, Cut]:
        """See `HasParallelPlan`: each rank routes its part of the residual stream's tokens."""
        stacks = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
        return {"router.gate": SEQUENCE, **dict.fromkeys(stacks, EXPERTS)}

    def before_step(self, normalizer: Tensor) -> None:
        """See `StepParticipant.before_step`."""
        self._normalizer = normalizer
        self._ledger.clear()

    def step_sums(self) -> Tensor:
        """See `StepParticipant.step_sums`: tokens of each expert, missing ones, and the auxiliary loss's sum: ``(E + 2,)``."""
        if self._ledger.sums is not None:
            return self._ledger.sums
        return torch.zeros(
            self.config.n_experts + 2, dtype=torch.float64, device=self.router.gate.weight.device
        )

    def after_update(self, sums: Tensor, skip: Tensor) -> None:
        """See `StepParticipant.after_update`: the router's bias."""
        self.router.balance(sums[:-2], skip)

    def readings(self, name: str, sums: Tensor) -> dict[str, Reading]:
        """See `StepParticipant.readings`."""
        counts = sums[:-2]
        load = counts / counts.mean().clamp(min=1e-9)
        found = {
            "moe_load_max": Reading(load.max(), "max"),
            "moe_load_min": Reading(load.min(), "min"),
            "moe_dropped_tokens": Reading(sums[-2], "sum"),
        }
        if self.aux_loss is not None and self._normalizer is not None:
            found["moe_aux_loss"] = Reading(sums[-1] / self._normalizer.double(), "sum")
        if self.config.log_experts:
            for expert, count in enumerate(counts.unbind()):
                found[f"moe_tokens.{name}.{expert}"] = Reading(count, "sum")
        return found

    def expert_parameters(self) -> tuple[int, int]:
        """Numbers of the routed experts' parameters: all of them, and those that a token is multiplied with."""
        total = sum(p.numel() for p in self.experts.parameters())
        return total, total * self.config.router.top_k // self.config.n_experts
