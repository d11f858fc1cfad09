"""What slow tests need from outside, made at the first use and kept: TORCHTITAN_TEST_CACHE, or ~/.cache/torchtitan/tests."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def cache() -> Path:
    """The folder where such things are kept."""
    named = os.environ.get("TORCHTITAN_TEST_CACHE", "~/.cache/torchtitan/tests")
    folder = Path(named).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder in float32."""
    folder = cache() / "SmolLM2-135M-Instruct"
    if not folder.exists():
        subprocess.run([sys.executable, ROOT / "scripts" / "smollm2_folder.py", folder], check=True)
    return folder
