"""Pretraining of Llama 3.1 8B by FSDP on 8 H100, with and without torch.compile, float8 off: the first table of torchtitan's report.

python -m benchmarks.h100x8.fsdp_8b [--only compile] [--json FILE]
python -m benchmarks.h100x8.fsdp_8b --device cpu --smoke        the same code on a tiny shape and two CPU ranks
"""

from collections.abc import Iterator, Sequence

from benchmarks.suite import Case, Public, ladder, main, with_all_logits
from torchtitan.trainer import Trainer
from torchtitan_recipes.models.llama3 import llama3_8b

WHERE = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 1; H100 with 96 GB, 500 W"
PUBLIC = {"FSDP": Public(5762, 82.4, WHERE), "+ torch.compile": Public(6667, 77.0, WHERE)}
NOTES = f"""\
Published: {WHERE}; December 2024. Rows of 8,192 tokens (its llama3_8b.toml), two a GPU, selective activation checkpointing,
float32 weights, GPUs of 96 GB. Its loss had all logits at once, in more copies than the first two rows here; the third has the
recipe's linear cross-entropy. Its memory is what the allocator reserved."""


def recipe() -> Trainer.Config:
    """The recipe llama3_8b, not compiled, with the batch of the report."""
    config = llama3_8b()
    config.training.micro_batch_rows, config.training.global_batch_rows = 2, 16
    config.compile.enabled = False
    return config


def cases() -> Iterator[Case]:
    """As published, and with the recipe's loss."""
    group, plain = "Llama 3.1 8B", with_all_logits(recipe())
    yield Case(group=group, name="FSDP", config=plain, ranks=8, public=PUBLIC["FSDP"])
    for name, config in ladder(plain, ["torch.compile", "linear cross-entropy"]):
        yield Case(group=group, name=name, config=config, ranks=8, public=PUBLIC.get(name))


def suite(argv: Sequence[str] | None = None) -> None:
    """Measure, or show the plan."""
    main("8 GPUs: Llama 3.1 8B by FSDP", list(cases()), argv, notes=NOTES)


if __name__ == "__main__":
    suite()
