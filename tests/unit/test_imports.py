"""Dependencies point one way, and starting stays cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIERS = [  # a module may import from its own row and from the rows above
    {"torchtitan.errors", "torchtitan.batch", "torchtitan.optional", "torchtitan.torch_api", "torchtitan.secrets", "torchtitan.environment", "torchtitan"},
    {"torchtitan.config"},
    {"torchtitan.ops", "torchtitan.data", "torchtitan.optim", "torchtitan.metrics", "torchtitan.models.layers"},
    {"torchtitan.models", "torchtitan.objectives", "torchtitan.parallel", "torchtitan.checkpoint"},
    {"torchtitan.training", "torchtitan.debug", "torchtitan.generation", "torchtitan.evaluation"},
    {"torchtitan.trainer"},
    {"torchtitan.planner"},
    {"torchtitan.launch", "torchtitan.train", "torchtitan.cli", "torchtitan.__main__"},
    {"torchtitan_recipes"},
]  # fmt: skip


def modules():
    for package in ("torchtitan", "torchtitan_recipes"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def tier(module):
    best = max(
        (
            (len(name), row)
            for row, names in enumerate(TIERS)
            for name in names
            if module == name or (name != "torchtitan" and module.startswith(name + "."))
        ),
        default=None,
    )
    assert best is not None, f"{module} has no tier: add it to TIERS, and to docs/architecture.md"
    return best[1]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_module = (ROOT / Path(*name.split("."))).with_suffix(".py").exists()
                yield name if is_module else node.module


@pytest.mark.parametrize(("module", "path"), [pytest.param(m, p, id=m) for m, p in modules()])
def test_imports_point_one_way(module, path):
    for name in imports(path):
        if name.split(".")[0] in ("torchtitan", "torchtitan_recipes"):
            assert tier(name) <= tier(module), f"{module} imports {name}, which is above it"


def test_the_check_notices_an_import_of_the_trainer_by_a_model():
    assert tier("torchtitan.trainer") > tier("torchtitan.models.decoder")
    assert tier("torchtitan.models.llama3.sizes") > tier("torchtitan.models.layers.linear")


def loaded_by(statement):
    code = f"import sys; {statement}; print(*sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(out.stdout.split())


def test_a_recipe_does_not_load_what_it_may_not_need():
    loaded = loaded_by("import torchtitan_recipes.models.llama3")
    assert "torch" in loaded
    slow = {
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "tokenizers",
        "datasets",
        "pyarrow",
        "matplotlib",
        "tensorboard",
        "wandb",
    }
    assert loaded & slow == set()


def test_config_and_cli_do_not_load_torch():
    assert "torch" not in loaded_by("import torchtitan.config, torchtitan.cli.main")


def test_a_run_does_not_load_the_compiler_that_it_does_not_use(tmp_path):
    loaded = loaded_by(f"from tests.tiny import tiny; tiny({str(tmp_path)!r}).build().close()")
    assert "tokenizers" in loaded
    assert loaded & {"torch._dynamo", "torch._inductor", "matplotlib", "datasets"} == set()
