"""The parity grid: every mesh that is proved equal to one process, as data.

A case is a model, the degrees of a mesh and options. `cases()` makes all of them; `SLICE` are those of each test run,
the others are for ``--slow``, which writes `docs/composability.md` from what passed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from math import prod
from typing import Any

from tests.distributed.test_expert_parallel import moe_model
from tests.tiny import tiny, tiny_model
from torchtitan.config import check_tree
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.norm import RMSNorm
from torchtitan.optim.sgd import SGD
from torchtitan.parallel.activation_checkpointing import ActivationCheckpointing
from torchtitan.trainer import Trainer

N_ROWS = 16
NORMED = GQA.Config(n_heads=8, n_kv_heads=4, qk_norm=RMSNorm.Config())
SHAPE = {"dim": 32, "n_layers": 4, "vocab_size": 4099}  # 4099 divides by nothing
MODELS = {
    "dense": tiny_model(attention=NORMED, **SHAPE),
    "tied": tiny_model(attention=NORMED, tied=True, **SHAPE),
    "deep": tiny_model(attention=NORMED, **{**SHAPE, "n_layers": 8}),
    # Without norms of queries and keys: here one process's own gradient of such a norm is 8e-6 off in float32.
    "moe": moe_model(attention=GQA.Config(n_heads=8, n_kv_heads=4), **SHAPE),
    "deep moe": moe_model(
        attention=GQA.Config(n_heads=8, n_kv_heads=4), **{**SHAPE, "n_layers": 8}
    ),
}
SCHEDULES = (
    "1F1B",
    "GPipe",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
SINGLE_STAGE = ("1F1B", "GPipe")
# Of each axis the usual variant first, then the others.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "dp_shard": [{}],
    "dp_replicate": [{}],
    "tp": [{}, {"sequence_parallel": False}],
    "cp": [{"kind": kind} for kind in ("all_gather", "ring", "ulysses")],
    "pp": [{"schedule": schedule} for schedule in SCHEDULES],
}
PAIRED = {
    **VARIANTS,
    "pp": [{"schedule": schedule} for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")],
}
"""Those that are paired with variants of other axes."""

USUAL = [{}, VARIANTS["cp"][0], VARIANTS["pp"][0], {**VARIANTS["cp"][0], **VARIANTS["pp"][0]}]


@dataclass(frozen=True)
class Case:
    """A combination to be proved.

    Attributes:
        model: of `MODELS`.
        degrees: of the mesh; 1 for those that are not there.
        options: ``sequence_parallel``, ``kind`` (of context parallel), ``schedule``, ``recompute`` (activation
            checkpointing), ``compile``, ``optimizer``.
    """

    model: str
    degrees: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return prod(degree for axis, degree in self.degrees.items() if axis != "ep")

    @property
    def data_ranks(self) -> int:
        return self.degrees.get("dp_shard", 1) * self.degrees.get("dp_replicate", 1)

    def __str__(self) -> str:
        words = [f"{axis}={degree}" for axis, degree in self.degrees.items()]
        words += [f"{name}={value}" for name, value in self.options.items()]
        return " ".join([self.model, *words])

    def config(self, folder: Any) -> Trainer.Config:
        options = self.options
        # Two micro-batches at least, and as many as there are stages in the longest pipeline.
        micro_batches = 2 * self.degrees.get("pp", 1)
        config = tiny(
            folder,
            global_batch_rows=N_ROWS,
            micro_batch_rows=N_ROWS // self.data_ranks // micro_batches,
        )
        config.model = MODELS[self.model]
        config.optimizer.lr = 1e-3  # a larger one grows rounding faster than 1e-5 in five steps
        if (
            options.get("optimizer") == "sgd"
        ):  # far enough that the rounding of the weights is small beside it
            config.optimizer = SGD.Config(lr=1.0, momentum=0.0, weight_decay=0.0)
        config.training.max_grad_norm = None  # the gradients are compared as they are
        parallelism = config.parallelism
        parallelism.dp_shard = 1
        for name, degree in self.degrees.items():
            setattr(parallelism, name, degree)
        parallelism.sequence_parallel = options.get("sequence_parallel", True)
        parallelism.context.kind = options.get("kind", "all_gather")
        parallelism.pipeline.schedule = options.get("schedule", "1F1B")
        config.compile.enabled = options.get("compile", False)
        if "recompute" in options:
            config.activation_checkpointing = ActivationCheckpointing.Config(
                mode=options["recompute"]
            )
        return config

    def refusal(self) -> str | None:
        """Why the config is refused, if it is."""
        problems = check_tree(self.config("unused"), self.world)
        return "; ".join(map(str, problems)) or None


def cases() -> list[Case]:
    """All cases, each once; those that are refused too (`Case.refusal`)."""
    found = {str(case): case for case in [*_dense(), *_tied(), *_moe()]}
    return list(found.values())


def _meshes() -> Iterator[tuple[dict[str, int], dict[str, Any]]]:
    """Degrees and options: each axis alone at 2 and 4 in each variant, each pair, each triple."""
    for axis, variants in VARIANTS.items():
        for degree, options in product((2, 4), variants):
            yield {axis: degree}, options
    for a, b in combinations(VARIANTS, 2):
        usual = {**VARIANTS[a][0], **VARIANTS[b][0]}
        yield {a: 2, b: 2}, usual
        yield {a: 2, b: 2}, {**usual, "recompute": "full"}
        if {a, b} <= {"tp", "cp", "pp"}:  # they meet inside of a block, or where it is cut
            for first, second in ((f, s) for f in VARIANTS[a] for s in PAIRED[b]):
                if (first == VARIANTS[a][0]) != (second == VARIANTS[b][0]):
                    yield {a: 2, b: 2}, {**first, **second}
    for axes in combinations(VARIANTS, 3):
        usual = {k: v for axis in axes for k, v in VARIANTS[axis][0].items()}
        yield dict.fromkeys(axes, 2), usual


def _dense() -> Iterator[Case]:
    for degrees, options in _meshes():
        several = degrees.get("pp", 1) == 4 and options.get("schedule") not in SINGLE_STAGE
        yield Case("deep" if several else "dense", degrees, options)
    for axis in VARIANTS:
        options = VARIANTS[axis][0]
        yield Case("dense", {axis: 2}, {**options, "recompute": "full"})
        yield Case("dense", {axis: 2}, {**options, "recompute": "selective"})
        yield Case("dense", {axis: 2}, {**options, "compile": True})
        yield Case("dense", {axis: 2}, {**options, "optimizer": "sgd"})
    # Tensor parallel's hooks exchange parameters within a block, where a compiled recomputation meets them.
    for degrees in ({"tp": 2}, {"tp": 2, "dp_shard": 2}):
        for recompute, options in product(("full", "selective"), VARIANTS["tp"]):
            yield Case("dense", degrees, {**options, "recompute": recompute, "compile": True})


def _tied() -> Iterator[Case]:
    """Tied embeddings matter where the vocabulary or the ends of the model are cut."""
    for schedule in SCHEDULES:
        yield Case("tied", {"pp": 2}, {"schedule": schedule})
    for degrees, options in _meshes():
        if degrees.keys() & {"tp", "pp"} and len(degrees) > 1 and options in USUAL:
            yield Case("tied", degrees, options)
    for axis in ("dp_shard", "dp_replicate", "tp"):
        yield Case("tied", {axis: 2})


def _moe() -> Iterator[Case]:
    """Experts lie on ranks that data, context and tensor parallelism lend: all of them, or 2 of 4."""
    for degrees, options in _meshes():
        several = degrees.get("pp") == 4 and options["schedule"] not in SINGLE_STAGE
        model = "deep moe" if several else "moe"
        lendable = prod(degrees.get(axis, 1) for axis in ("dp_shard", "cp", "tp"))
        eps = {lendable, min(lendable, 2)} if options in USUAL else {lendable}
        if list(degrees.values()) == [2]:
            eps |= {1}
        for ep in sorted(eps):
            yield Case(model, {**degrees, "ep": ep} if ep > 1 else degrees, options)


SLICE = [
    Case("dense", {"dp_shard": 4}),
    Case("dense", {"dp_shard": 2, "dp_replicate": 2}),
    Case("dense", {"pp": 2, "cp": 2}, {"kind": "ring", "schedule": "Interleaved1F1B"}),
    Case("tied", {"pp": 2, "cp": 2}, {"kind": "ulysses", "recompute": "full"}),
    Case("dense", {"cp": 2, "dp_shard": 2}, {"recompute": "full"}),
    Case("moe", {"cp": 2, "dp_shard": 2, "ep": 4}, {"kind": "ring"}),
    Case("moe", {"pp": 2, "dp_shard": 2, "ep": 2}),
    Case("moe", {"dp_shard": 2, "ep": 2}, {"recompute": "full"}),
    Case("dense", {"tp": 2, "dp_replicate": 2}),
    Case("dense", {"tp": 2, "dp_shard": 2}, {"recompute": "selective", "sequence_parallel": False}),
    Case("tied", {"tp": 2, "dp_shard": 2}, {"recompute": "full"}),
    Case("dense", {"tp": 2, "cp": 2}, {"kind": "ulysses"}),
    Case("tied", {"tp": 2, "pp": 2}, {"schedule": "ZBVZeroBubble", "recompute": "full"}),
    Case("moe", {"tp": 2, "dp_shard": 2, "ep": 2}),
    Case("moe", {"tp": 2, "cp": 2, "ep": 4}),
]
"""What every test run proves: each axis and model, in combinations that others rest on."""


def alone(case: Case) -> Case:
    """The same on one process."""
    options = {k: v for k, v in case.options.items() if k == "optimizer"}
    return replace(case, degrees={}, options=options)
