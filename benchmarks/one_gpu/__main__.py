"""How fast, and how large, is training on this GPU, beside what the planner says and beside a loop written by hand?

    python -m benchmarks.one_gpu [--minutes 8] [--only 0.6B 8B] [--peak-tflops 989] [--json FILE]
    python -m benchmarks.one_gpu --device cpu --smoke        the same code on a tiny shape, without a GPU

One GPU of any kind, torch 2.11 or newer, no download. Ceilings first: matrix products in bfloat16 and copies. Then shapes
of 0.6B to 8B in bfloat16, with random weights and rows of 4,096 random tokens: a bare loop, the Trainer with all logits at
once, compiled, and from there (not compiled) one saving on top of the other. Each case is a process of its own. What the
planner says does not fit is left out, and what the minutes do not suffice for; both are said. A GPU's known peak, or the one
given, makes MFU; without one the rate of the matrix products measured before is the measure.
"""

from collections.abc import Iterator, Sequence

from benchmarks.suite import Case, ladder, main, with_all_logits
from torchtitan.data.embedded import Embedded
from torchtitan.data.loader import Loader
from torchtitan.models.llama3.sizes import llama3
from torchtitan.models.model import Model
from torchtitan.models.qwen3.sizes import qwen3
from torchtitan.optim.optimizer import AdamW
from torchtitan.trainer import Trainer
from torchtitan.training.settings import Training

SEQ_LEN = 4096
SHAPES = {  # name: (model, rows of a step)
    "Qwen3 0.6B": (qwen3("0.6b"), 2),
    "Qwen3 1.7B": (qwen3("1.7b"), 2),
    "Llama 3.2 3B": (llama3("3b"), 1),
    "Llama 3.1 8B": (llama3("8b"), 1),
}
SAVINGS = (
    "activation checkpointing",
    "linear cross-entropy",
    "optimizer in backward",
    "8-bit states",
)


def run_of(model: Model.Config, rows: int) -> Trainer.Config:
    """Weights, gradients and states in bfloat16, all logits at once, nothing computed again."""
    config = Trainer.Config(
        model=model,
        data=Loader.Config(sources=[Embedded.Config()]),
        optimizer=AdamW.Config(lr=1e-5, state_dtype="bfloat16"),
        training=Training.Config(
            steps=10_000, seq_len=SEQ_LEN, global_batch_rows=rows, parameter_dtype="bfloat16"
        ),
    )
    return with_all_logits(config)


def cases() -> Iterator[Case]:
    """Of each shape; a short budget tells of the first, the plain and the smallest of all shapes before the rest."""
    for group, (model, rows) in SHAPES.items():
        plain = run_of(model, rows)
        yield Case(group=group, name="bare loop", config=plain, bare=True)
        yield Case(group=group, name="eager", config=plain)
        for _, config in ladder(plain, ["torch.compile"]):
            yield Case(group=group, name="compiled", config=config, later=1)
        for name, config in ladder(plain, SAVINGS):
            last = name == f"+ {SAVINGS[-1]}"
            yield Case(group=group, name=name, config=config, later=0 if last else 2)


def suite(argv: Sequence[str] | None = None) -> None:
    """Measure, or show the plan."""
    main("One GPU: speed and memory, measured and planned", list(cases()), argv, minutes=8)


if __name__ == "__main__":
    suite()
