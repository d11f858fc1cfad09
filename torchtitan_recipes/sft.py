"""Supervised fine-tuning of the public families, and of debug models on questions that need no download."""

from torchtitan.checkpoint import Checkpointer
from torchtitan.checkpoint.hugging_face.component import HuggingFaceExport
from torchtitan.data.chat.docstrings import Docstrings
from torchtitan.data.chat.loader import ChatLoader
from torchtitan.data.chat.source import Chat
from torchtitan.data.huggingface import HuggingFace
from torchtitan.data.source import Source
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.models.llama3.sizes import llama3
from torchtitan.models.mistral.sizes import mistral
from torchtitan.models.model import Model
from torchtitan.models.qwen3.sizes import qwen3
from torchtitan.models.smollm2.sizes import smollm2
from torchtitan.optim.optimizer import AdamW
from torchtitan.optim.schedule import Schedule
from torchtitan.trainer import Trainer
from torchtitan.training.samples import Samples
from torchtitan.training.settings import Training
from torchtitan.training.validation import Validation

_Sources = tuple[Source.Config, Source.Config]
"""Rows to train on, and held-out ones."""


def _docstrings() -> _Sources:
    """Questions and answers made from the docstrings of the running Python: no download."""
    return (
        Chat.Config(rows=Docstrings.Config()),
        Chat.Config(rows=Docstrings.Config(split="validation")),
    )


def _alpaca() -> _Sources:
    """52,000 instructions with answers by a model."""
    rows = [
        HuggingFace.Config(name="tatsu-lab/alpaca", split=split)
        for split in ("train[:98%]", "train[98%:]")
    ]
    return Chat.Config(rows=rows[0]), Chat.Config(rows=rows[1])


def _slim_orca() -> _Sources:
    """500,000 answers with reasoning by GPT-4, in the ShareGPT format that OpenHermes has too."""
    rows = [
        HuggingFace.Config(name="Open-Orca/SlimOrca", split=split)
        for split in ("train[:99%]", "train[99%:]")
    ]
    return Chat.Config(rows=rows[0]), Chat.Config(rows=rows[1])


def _gsm8k() -> _Sources:
    """7,500 sums in words with worked answers."""
    columns = {"instruction": "question", "output": "answer"}
    rows = [
        HuggingFace.Config(name="openai/gsm8k", subset="main", split=split)
        for split in ("train", "test")
    ]
    return (
        Chat.Config(rows=rows[0], columns=columns),
        Chat.Config(rows=rows[1], columns=dict(columns)),
    )


_SETS = {
    "docstrings": _docstrings,
    "alpaca": _alpaca,
    "slim_orca": _slim_orca,
    "gsm8k": _gsm8k,
}
"""Data sets by name."""


def llama3_debugmodel_sft() -> Trainer.Config:
    """A 5M-parameter Llama 3 on questions about the running Python: no download, minutes on a CPU."""
    return _debug(llama3("debug"))


def qwen3_debugmodel_sft() -> Trainer.Config:
    """A 4M-parameter Qwen3 on questions about the running Python, one epoch."""
    config = _debug(qwen3("debug"))
    config.training.steps, config.training.epochs = None, 1
    return config


def smollm2_debugmodel_sft() -> Trainer.Config:
    """A 3M-parameter SmolLM2 on questions about the running Python."""
    return _debug(smollm2("debug"))


def smollm2_135m_sft() -> Trainer.Config:
    """SmolLM2-135M-Instruct on questions about the running Python: small enough for a CPU."""
    config = _sft(
        smollm2("135m"),
        hub_name="HuggingFaceTB/SmolLM2-135M-Instruct",
        data="docstrings",
        lr=3e-4,
        steps=40,
        every_n_steps=20,
        seq_len=256,
        global_batch_rows=8,
    )
    config.training.micro_batch_rows = 4
    config.metrics.every_n_steps = 5
    return config


def llama3_1b_sft() -> Trainer.Config:
    """Llama 3.2 1B on Alpaca, three epochs."""
    name = "meta-llama/Llama-3.2-1B"
    template = "llama3"
    return _sft(
        llama3("1b"), hub_name=name, data="alpaca", lr=2e-5, epochs=3, chat_template=template
    )


def llama3_3b_sft() -> Trainer.Config:
    """Llama 3.2 3B on Alpaca, three epochs."""
    name = "meta-llama/Llama-3.2-3B"
    template = "llama3"
    return _sft(
        llama3("3b"), hub_name=name, data="alpaca", lr=2e-5, epochs=3, chat_template=template
    )


def llama3_8b_sft() -> Trainer.Config:
    """Llama 3.1 8B on SlimOrca, one epoch."""
    return _sft(
        llama3("8b"),
        hub_name="meta-llama/Llama-3.1-8B",
        data="slim_orca",
        lr=1e-5,
        epochs=1,
        every_n_steps=200,
        chat_template="llama3",
        seq_len=4096,
    )


def qwen3_0_6b_sft() -> Trainer.Config:
    """Qwen3-0.6B on GSM8K, three epochs."""
    return _sft(
        qwen3("0.6b"),
        hub_name="Qwen/Qwen3-0.6B",
        data="gsm8k",
        lr=2e-5,
        epochs=3,
        every_n_steps=10,
    )


def qwen3_1_7b_sft() -> Trainer.Config:
    """Qwen3-1.7B on GSM8K, three epochs."""
    return _sft(
        qwen3("1.7b"),
        hub_name="Qwen/Qwen3-1.7B",
        data="gsm8k",
        lr=1e-5,
        epochs=3,
        every_n_steps=10,
    )


def qwen3_8b_sft() -> Trainer.Config:
    """Qwen3-8B on SlimOrca, one epoch."""
    return _sft(
        qwen3("8b"),
        hub_name="Qwen/Qwen3-8B",
        data="slim_orca",
        lr=1e-5,
        epochs=1,
        every_n_steps=200,
        seq_len=4096,
    )


def mistral_7b_sft() -> Trainer.Config:
    """Mistral 7B Instruct v0.3 on Alpaca, three epochs."""
    name = "mistralai/Mistral-7B-Instruct-v0.3"
    return _sft(mistral("7b"), hub_name=name, data="alpaca", lr=5e-6, epochs=3)


def llama3_3_70b_full_h100x8() -> Trainer.Config:
    """Llama 3.3 70B Instruct on SlimOrca, one epoch, all weights, on 8 H100 with 80 GB."""
    name = "meta-llama/Llama-3.3-70B-Instruct"
    config = _sft(
        llama3("70b"),
        hub_name=name,
        data="slim_orca",
        lr=1e-5,
        epochs=1,
        every_n_steps=500,
        seq_len=8192,
        global_batch_rows=8,
    )
    return _lean(config)


def llama3_1_8b_full_x1() -> Trainer.Config:
    """Llama 3.1 8B Instruct on Alpaca, three epochs, all weights, on one GPU with 48 GB or more."""
    return _one_gpu(llama3("8b"), "meta-llama/Llama-3.1-8B-Instruct", rows=1)


def qwen3_8b_full_x1() -> Trainer.Config:
    """Qwen3-8B on Alpaca, three epochs, all weights, on one GPU with 48 GB or more."""
    return _one_gpu(qwen3("8b"), "Qwen/Qwen3-8B", rows=1)


def qwen3_1_7b_full_x1() -> Trainer.Config:
    """Qwen3-1.7B on Alpaca, three epochs, all weights, on one GPU with 24 GB or more."""
    return _one_gpu(qwen3("1.7b"), "Qwen/Qwen3-1.7B", rows=2)


def qwen3_0_6b_full_x1() -> Trainer.Config:
    """Qwen3-0.6B on Alpaca, three epochs, all weights, on one GPU with 12 GB or more."""
    return _one_gpu(qwen3("0.6b"), "Qwen/Qwen3-0.6B", rows=2)


def _one_gpu(model: Model.Config, hub_name: str, *, rows: int) -> Trainer.Config:
    config = _sft(
        model,
        hub_name=hub_name,
        data="alpaca",
        lr=1e-5,
        epochs=3,
        every_n_steps=200,
        seq_len=4096,
        global_batch_rows=rows,
    )
    return _lean(config)


def _lean(config: Trainer.Config) -> Trainer.Config:
    """Save memory wherever that costs little: `docs/planner.md` has what each measure saves.

    Weights in bfloat16 (rounded stochastically), two states of 8 bits, each parameter updated and its gradient freed in
    the backward, activations computed again. That leaves one micro-batch a step, and clipping by parameter.
    """
    config.optimizer = AdamW.Config(
        lr=config.optimizer.lr, weight_decay=0.0, state_dtype="int8", in_backward=True
    )
    config.training.parameter_dtype = "bfloat16"
    config.training.clip_by = "parameter"
    config.training.micro_batch_rows = None
    config.activation_checkpointing.mode = "full"
    return config


def _debug(model: Model.Config) -> Trainer.Config:
    """A debug model on the embedded questions, with the bundled tokenizer: no download, minutes on a CPU."""
    train, _ = _docstrings()
    return Trainer.Config(
        model=model,
        data=ChatLoader.Config(sources=[train]),
        optimizer=AdamW.Config(lr=2e-3),
        schedule=Schedule.Config(warmup_steps=10, min_factor=0.1),
        training=Training.Config(steps=120, seq_len=256, global_batch_rows=8),
        validation=_validation("docstrings", every_n_steps=40, steps=2),
        samples=Samples.Config(every_n_steps=40),
    )


def _sft(
    model: Model.Config,
    *,
    hub_name: str,
    data: str,
    lr: float,
    epochs: float | None = None,
    steps: int | None = None,
    every_n_steps: int = 25,
    chat_template: str | None = None,
    seq_len: int = 2048,
    global_batch_rows: int = 32,
) -> Trainer.Config:
    """Full fine-tuning of a model of the hub, with what practitioners keep: a low rate, 3 % warm-up, cosine, packing.

    Args:
        model: its architecture.
        hub_name: where its weights and tokenizer are.
        data: name in `_SETS`.
        lr: highest learning rate.
        epochs: how often the data is read.
        steps: optimizer steps, instead of epochs.
        every_n_steps: optimizer steps between evaluations, samples and checkpoints.
        chat_template: for a base model, which has none.
        seq_len: tokens of a row.
        global_batch_rows: rows of a step.
    """
    train, _ = _SETS[data]()
    return Trainer.Config(
        model=model,
        tokenizer=Tokenizer.Config(path=hub_name, chat_template=chat_template),
        data=ChatLoader.Config(sources=[train]),
        optimizer=AdamW.Config(lr=lr, weight_decay=0.0),
        schedule=Schedule.Config(warmup_fraction=0.03, decay="cosine", min_factor=0.1),
        training=Training.Config(
            steps=steps,
            epochs=epochs,
            seq_len=seq_len,
            global_batch_rows=global_batch_rows,
            micro_batch_rows=1,
        ),
        validation=_validation(data, every_n_steps=every_n_steps, steps=4),
        samples=Samples.Config(every_n_steps=every_n_steps),
        checkpoint=Checkpointer.Config(
            every_n_steps=every_n_steps,
            initial_load=hub_name,
            export=HuggingFaceExport.Config(),
        ),
    )


def _validation(data: str, *, every_n_steps: int, steps: int) -> Validation.Config:
    """Loss on held-out rows of a data set; the best checkpoint is kept."""
    _, held_out = _SETS[data]()
    return Validation.Config(
        every_n_steps=every_n_steps,
        at_start=True,
        steps=steps,
        data=ChatLoader.Config(sources=[held_out], shuffle=False, n_workers=0),
        keep_best=True,
    )
