"""Every python block of the README and of docs/ runs; the blocks of a page share a namespace."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, namespace = page.read_text(encoding="utf-8"), {"__name__": page.stem}
    for found in BLOCK.finditer(text):
        code = "\n" * text.count("\n", 0, found.start(1)) + found[1]  # tracebacks point at the line
        exec(compile(code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_named_in_a_page_exist(page):
    text = page.read_text(encoding="utf-8")
    for path in re.findall(
        r"`((?:torchtitan|torchtitan_recipes|tests|docs|benchmarks|scripts)/[\w/.-]+)`", text
    ):
        assert (ROOT / path).exists(), path
