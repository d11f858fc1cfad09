"""What each way to save memory saves, on Llama 3.2 3B and one GPU of the eight: the ladder of torchtune's README.

    python -m benchmarks.h100x8.memory_ladder_3b [--only offload] [--json FILE]
    python -m benchmarks.h100x8.memory_ladder_3b --device cpu --smoke        the same code on a tiny shape

Weights, gradients and states in bfloat16, two rows of 4,096 tokens; each row of the table on top of the one before.
"""

from collections.abc import Iterator, Sequence

from benchmarks.suite import Case, Public, ladder, main, with_all_logits
from torchtitan.data.embedded import Embedded
from torchtitan.data.loader import Loader
from torchtitan.models.llama3.sizes import llama3
from torchtitan.optim.optimizer import AdamW
from torchtitan.trainer import Trainer
from torchtitan.training.settings import Training

WHERE = "torchtune, README.md, table of optimization flags; A100"
PUBLIC = {
    "baseline": Public(7075, 60.0, WHERE),
    "+ torch.compile": Public(8998, 51.0, WHERE),
    "+ linear cross-entropy": Public(9174, 42.9, WHERE),
    "+ activation checkpointing": Public(7210, 24.9, WHERE),
    "+ optimizer in backward": Public(7309, 23.1, WHERE),
    "+ activation offload": Public(7301, 21.8, WHERE),
    "+ 8-bit states": Public(6960, 17.6, WHERE),
}
NOTES = f"""\
Published: {WHERE} (its baseline with packed rows); it says itself that the values may need to be verified again. Its linear
cross-entropy keeps the chunks' logits, ours computes their gradients in the forward. The plan is for eager runs: what
torch.compile saves is in the measured column alone."""


def baseline() -> Trainer.Config:
    """Nothing saved, all logits at once."""
    config = Trainer.Config(
        model=llama3("3b"),
        data=Loader.Config(sources=[Embedded.Config()]),
        optimizer=AdamW.Config(lr=2e-5, state_dtype="bfloat16"),
        training=Training.Config(
            steps=10_000, seq_len=4096, global_batch_rows=2, parameter_dtype="bfloat16"
        ),
    )
    return with_all_logits(config)


def cases() -> Iterator[Case]:
    """The ladder, in the order of the published one."""
    group, config = "Llama 3.2 3B", baseline()
    yield Case(group=group, name="baseline", config=config, public=PUBLIC["baseline"])
    for name, changed in ladder(config, [name.removeprefix("+ ") for name in list(PUBLIC)[1:]]):
        yield Case(group=group, name=name, config=changed, public=PUBLIC[name])


def suite(argv: Sequence[str] | None = None) -> None:
    """Measure, or show the plan."""
    main("One GPU of eight: memory of Llama 3.2 3B, step by step", list(cases()), argv, notes=NOTES)


if __name__ == "__main__":
    suite()
