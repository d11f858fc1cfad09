"""``torchtitan export``, ``import`` and ``download``, and runs that start from a folder."""

import json

import pytest
import torch

from tests.tiny import running, tiny, weights
from torchtitan.checkpoint.hugging_face.component import HuggingFaceExport
from torchtitan.checkpoint.hugging_face.folder import download, find_folder
from torchtitan.checkpoint.hugging_face.weight_files import WeightFiles
from torchtitan.cli import download as download_command
from torchtitan.cli import export as export_command
from torchtitan.cli import import_folder
from torchtitan.cli.main import main
from torchtitan.config import check_tree
from torchtitan.errors import CheckpointError, ConfigError
from torchtitan.planner.tracker import MemoryTracker


def run(folder, **checkpoint):
    config = tiny(folder, steps=1)
    config.model.hf_model_type = "llama"
    for name, value in checkpoint.items():
        setattr(config.checkpoint, name, value)
    return config


def read(folder, name="model.norm.weight"):
    return WeightFiles(folder).read(name, (slice(0, 16),))


def test_a_run_is_exported_imported_and_gone_on_from(tmp_path, capsys):
    config = run(tmp_path / "a", export=HuggingFaceExport.Config(dtype="float32"))
    with running(config) as trainer:
        trainer.train()
        trained = weights(trainer)
    folder = tmp_path / "a" / "hugging_face"
    assert torch.equal(read(folder), trained["norm.weight"])

    assert export_command.main([str(tmp_path / "a"), str(tmp_path / "out"), "--dtype", "float32"]) == 0  # fmt: skip
    assert "read back: all equal the model's weights, bit for bit" in capsys.readouterr().out
    for name in ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes(), name

    assert import_folder.main([str(tmp_path / "out"), str(tmp_path / "in")]) == 0
    assert "imported 21 tensors" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="in exists and is not empty; name another folder"):
        import_folder.main([str(tmp_path / "out"), str(tmp_path / "in")])
    for place in ("in", "out"):  # an imported checkpoint answers as the folder does
        ask = [str(tmp_path / place), "--prompt", "def main", "--max-new-tokens", "4"]
        assert main(["generate", *ask, "--temperature", "0"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second != ""
    settings = tmp_path / "out" / "generation_config.json"
    kept = json.loads(settings.read_text()) | {"temperature": 0.6, "do_sample": True}
    settings.write_text(json.dumps(kept))
    assert export_command.main([str(tmp_path / "in"), str(tmp_path / "again"), "--dtype", "float32"]) == 0  # fmt: skip
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text()) == kept
    assert (tmp_path / "again/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()  # fmt: skip

    for source in (folder, tmp_path / "in", tmp_path / "a" / "checkpoints" / "step-00000001"):
        config = run(tmp_path / f"from-{source.name}", initial_load=str(source))
        config.training.seed = 77
        assert check_tree(config, 1) == []
        with running(config) as trainer:
            assert trainer.step == 0
            for name, tensor in weights(trainer).items():
                assert torch.equal(tensor, trained[name]), name


class InMemory(MemoryTracker):
    """Counts what is in memory; files are mapped by safetensors, and read a page at a time."""

    def _see(self, tensor):
        if tensor.is_meta or tensor.untyped_storage().filename is None:
            super()._see(tensor)


def test_an_import_holds_one_tensor_at_a_time(tmp_path):
    config = run(tmp_path / "a", export=HuggingFaceExport.Config(dtype="float32"))
    config.model.n_layers, config.model.dim, config.model.vocab_size = 12, 64, 4200
    config.model.feed_forward.ffn_dim = 4000
    with running(config) as trainer:
        trainer.checkpointer.export(config.model, trainer.models["policy"].model, None)
        sizes = [p.nbytes for p in trainer.models["policy"].model.parameters()]
    tracker = InMemory()
    with tracker:
        assert import_folder.main([str(tmp_path / "a" / "hugging_face"), str(tmp_path / "in")]) == 0
    assert max(sizes) <= tracker.peak <= 2.1 * max(sizes)  # the largest, and what of it is read
    assert tracker.peak < sum(sizes) / 15


def test_a_damaged_or_missing_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is no checkpoint and no run's folder with one"):
        export_command.main([str(tmp_path), str(tmp_path / "out")])
    with running(run(tmp_path / "a")) as trainer:
        trainer.train()
    (shard,) = (tmp_path / "a" / "checkpoints" / "step-00000001").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged: .*sha256.*; restore it from a copy"):
        export_command.main([str(tmp_path / "a"), str(tmp_path / "out")])


def test_usage_errors_are_ours(capsys):
    with pytest.raises(ConfigError, match="torchtitan export: the following arguments are required"):  # fmt: skip
        export_command.main([])
    with pytest.raises(ConfigError, match="argument --dtype: invalid choice: 'int8'"):
        export_command.main(["a", "b", "--dtype", "int8"])
    assert download_command.main(["--help"]) == 0
    assert "HF_HUB_OFFLINE=1" in capsys.readouterr().out


def problems(config):
    return [str(p) for p in check_tree(config, 1)]


def test_a_source_that_cannot_be_is_refused_before_anything_is_built(tmp_path):
    (text,) = problems(run(tmp_path, initial_load=str(tmp_path / "nothing")))
    assert "is neither a checkpoint (with manifest.json) nor a Hugging Face folder (with config.json)" in text  # fmt: skip
    config = run(tmp_path / "a", export=HuggingFaceExport.Config())
    with running(config) as trainer:
        trainer.checkpointer.export(config.model, trainer.models["policy"].model, None)
    folder = tmp_path / "a" / "hugging_face"
    config = run(tmp_path / "b", initial_load=str(folder))
    assert problems(config) == []
    config.model.rope.theta = 7.0
    config.model.dim = 32
    (text,) = problems(config)
    assert "is another model; model.dim=32, the folder has 16; " in text
    assert "model.rope.theta=7.0, the folder has 500000.0" in text
    config.model.hf_model_type = ""
    (text,) = problems(config)
    assert "cannot be loaded; model.hf_model_type is empty" in text
    config.model.hf_model_type = "mistral"
    (text,) = problems(config)
    assert "model.hf_model_type='mistral', the folder has 'llama'" in text
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (text,) = problems(run(tmp_path / "b", initial_load=str(folder)))
    assert "as pickles only (pytorch_model.bin)" in text


def test_rows_longer_than_the_models_context_are_refused(tmp_path):
    config = run(tmp_path / "a", export=HuggingFaceExport.Config())
    config.model.context_length = 48
    assert problems(config) == []
    with running(config) as trainer:
        trainer.checkpointer.export(config.model, trainer.models["policy"].model, None)
    config.training.seq_len = 64
    (text,) = problems(config)
    assert text.startswith("training.seq_len=64: is more than the 48 tokens that the model is made")

    folder = tmp_path / "a" / "hugging_face"
    imported = run(tmp_path / "b", initial_load=str(folder))  # and a recipe that does not say it
    assert problems(imported) == []
    imported.training.seq_len = 64
    (text,) = problems(imported)
    assert text.startswith(
        f"checkpoint.initial_load={folder}: is for shorter rows; training.seq_len=64: is more than"
    )
    assert (
        "set at most 48; to train the model for longer texts, set model.context_length=64" in text
    )
    imported.model.context_length = 64  # on purpose
    assert problems(imported) == []


def test_a_model_without_format_is_refused_at_once(tmp_path):
    config = run(tmp_path, export=HuggingFaceExport.Config(max_shard_gib=0))
    config.model.attention.qkv_bias = True
    text = "\n".join(problems(config))
    assert "checkpoint.export=set: the model cannot be exported; a llama config.json has no words" in text  # fmt: skip
    assert "max_shard_gib=0: is not positive" in text


def hub(home, name, files):
    """A model in the hub's own store, as if it had been downloaded."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file, content in files.items():
        (snapshot / file).write_bytes(content)
    return snapshot


@pytest.fixture
def store(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    return tmp_path / "home"


def test_a_name_of_the_hub_is_found_in_its_store(store, tmp_path, capsys):
    config = run(tmp_path / "a", export=HuggingFaceExport.Config(dtype="float32"))
    with running(config) as trainer:
        trainer.checkpointer.export(config.model, trainer.models["policy"].model, None)
        want = weights(trainer)
    made = tmp_path / "a" / "hugging_face"
    snapshot = hub(store, "org/small", {f.name: f.read_bytes() for f in made.iterdir()})
    assert find_folder("org/small") == snapshot
    assert download_command.main(["org/small"]) == 0
    assert capsys.readouterr().out.strip() == str(snapshot)
    config = run(tmp_path / "b", initial_load="org/small")
    config.training.seed = 77
    assert problems(config) == []
    with running(config) as trainer:
        assert torch.equal(weights(trainer)["head.weight"], want["head.weight"])


def test_what_the_hub_does_not_have_is_said(store):
    with pytest.raises(CheckpointError, match=r"org/none: cannot get the model from the hub .*HF_HUB_OFFLINE"):  # fmt: skip
        download("org/none")
    hub(store, "org/pickled", {"config.json": json.dumps({}).encode()})
    with pytest.raises(CheckpointError, match=r"weights as pickles, \*\.bin.*are not fetched.*refs/pr/1"):  # fmt: skip
        download("org/pickled")
    with pytest.raises(CheckpointError, match="is no folder; name one that exists"):
        find_folder("/no/such/folder")
    with pytest.raises(CheckpointError, match="is on this machine already; use it as it is"):
        download(str(store))
