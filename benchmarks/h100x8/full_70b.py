"""Full fine-tuning of Llama 3.3 70B on 8 H100 with 80 GB: what the recipe llama3_3_70b_full_h100x8 needs, and what it needs it for.

    python -m benchmarks.h100x8.full_70b [--only backward] [--json FILE]
    python -m benchmarks.h100x8.full_70b --device cpu --smoke        the same code on a tiny shape and two CPU ranks

From plain AdamW with weights and states in bfloat16, one saving on top of the other. What the plan says does not fit is not
tried. The weights are random, the rows are random tokens: nothing is downloaded.
"""

import copy
from collections.abc import Iterator, Sequence

from benchmarks.suite import Case, ladder, main, with_all_logits
from torchtitan.trainer import Trainer
from torchtitan_recipes.sft import llama3_3_70b_full_h100x8

NOTES = """\
Rows of T tokens, one a GPU, full activation checkpointing. The last case is the recipe llama3_3_70b_full_h100x8. No published
number of this very run could be checked, so none is shown."""
SEQ_LENS = (4096, 8192)


def plain(seq_len: int) -> Trainer.Config:
    """The recipe without its savings but activation checkpointing."""
    config = copy.deepcopy(llama3_3_70b_full_h100x8())
    config.training.seq_len = seq_len
    config.optimizer.in_backward, config.optimizer.state_dtype = False, "bfloat16"
    return config


def cases() -> Iterator[Case]:
    """Of two lengths."""
    for seq_len in SEQ_LENS:
        group, config = f"70B, T={seq_len:,}", with_all_logits(plain(seq_len))
        yield Case(group=group, name="bfloat16 AdamW", config=config, ranks=8)
        for name, changed in ladder(
            config, ["linear cross-entropy", "optimizer in backward", "8-bit states"]
        ):
            yield Case(group=group, name=name, config=changed, ranks=8)


def suite(argv: Sequence[str] | None = None) -> None:
    """Measure, or show the plan."""
    main("8 GPUs: full fine-tuning of Llama 3.3 70B", list(cases()), argv, notes=NOTES)


if __name__ == "__main__":
    suite()
