"""The examples of docs/checkpoints.md run as they stand there."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "checkpoints.md"


def test_the_examples_run():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    assert len(blocks) == 4
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
