"""Every rank of any mesh reads its part of a Hugging Face folder, and all of them write one."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import running, tiny, tiny_model, weights
from torchtitan.checkpoint.hugging_face import loading
from torchtitan.checkpoint.hugging_face.component import HuggingFaceExport
from torchtitan.checkpoint.hugging_face.weight_files import WeightFiles
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.moe import MoE
from torchtitan.models.layers.norm import RMSNorm
from torchtitan.models.layers.router import Router

HEADS = {"n_heads": 4, "n_kv_heads": 2}
MODELS = {
    "llama": tiny_model(n_layers=4, vocab_size=4099, attention=GQA.Config(**HEADS), hf_model_type="llama"),
    "tied": tiny_model(n_layers=4, vocab_size=4099, attention=GQA.Config(**HEADS), hf_model_type="llama", tied=True),
    "qwen2": tiny_model(n_layers=4, vocab_size=4099, attention=GQA.Config(**HEADS, qkv_bias=True), hf_model_type="qwen2"),
    "moe": tiny_model(
        n_layers=4, vocab_size=4099, hf_model_type="qwen3_moe",
        attention=GQA.Config(**HEADS, qk_norm=RMSNorm.Config()),
        feed_forward=MoE.Config(n_experts=4, ffn_dim=8, router=Router.Config(top_k=2, bias_rate=1e-3)),
    ),
}  # fmt: skip
MESHES = [
    ("qwen2", {"tp": 2, "dp_shard": 2}),
    ("tied", {"pp": 2, "dp_shard": 2}),
    ("moe", {"ep": 2, "dp_shard": 2, "tp": 2}),
    ("moe", {"pp": 2, "tp": 2, "ep": 2}),
]


def configured(folder, model, degrees, source=""):
    config = tiny(folder, steps=1)
    config.model = MODELS[model]
    config.training.seed = 5 if source else 1  # another start, unless it is loaded
    config.parallelism.dp_shard = 1
    for name, degree in degrees.items():
        setattr(config.parallelism, name, degree)
    config.checkpoint.initial_load = source
    config.checkpoint.export = HuggingFaceExport.Config(dtype="float32", max_shard_gib=6_000 / 2**30)  # fmt: skip
    return config


def train_here(folder, model, degrees, source):
    """Load, export before and after a step; return what was loaded, and how much of the files was read."""
    read_bytes = 0
    read = WeightFiles.read

    def counting(self, name, box):
        nonlocal read_bytes
        tensor = read(self, name, box)
        read_bytes += tensor.nbytes
        return tensor

    WeightFiles.read = counting
    try:
        with running(configured(folder, model, degrees, source)) as trainer:
            policy, loaded_bytes = trainer.models["policy"], read_bytes
            held = sum(
                (t.to_local() if hasattr(t, "to_local") else t).nbytes
                for t in loading.local_tensors(policy.model).values()
            )
            before = weights(trainer)
            trainer.checkpointer.export(trainer.config.model, policy.model, None)
            after = weights(trainer)
            assert all(torch.equal(before[name], after[name]) for name in before)
        return before, loaded_bytes, held
    finally:
        WeightFiles.read = read


@pytest.mark.parametrize(("model", "degrees"), MESHES, ids=str)
def test_any_mesh_reads_its_part_and_writes_the_whole(ranks, tmp_path, model, degrees):
    with running(configured(tmp_path / "one", model, {})) as trainer:
        expected = weights(trainer)
        trainer.checkpointer.export(trainer.config.model, trainer.models["policy"].model, None)
    source = tmp_path / "one" / "hugging_face"
    results = ranks(train_here, 4, str(tmp_path / "four"), model, degrees, str(source))
    loaded = {}
    for before, loaded_bytes, held in results:
        loaded |= before
        if model != "tied":
            assert loaded_bytes <= held
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name
    written = tmp_path / "four" / "hugging_face"
    assert len(list(written.glob("*.safetensors"))) > 4

    def all_of(folder):
        return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}

    have, want = all_of(written), all_of(source)
    assert have.keys() == want.keys()
    assert all(torch.equal(have[name], want[name]) for name in want)


def wrong_folder(folder, source):
    config = configured(folder, "llama", {"dp_shard": 2}, source)
    with pytest.raises(Exception, match="do not fit the model") as error:
        config.build()
    return str(error.value)


def test_all_ranks_say_the_same_of_a_folder_that_does_not_fit(ranks, tmp_path):
    with running(configured(tmp_path / "one", "llama", {})) as trainer:
        trainer.checkpointer.export(trainer.config.model, trainer.models["policy"].model, None)
    source = tmp_path / "one" / "hugging_face"
    file = next(f for f in sorted(source.glob("*.safetensors")) if "model.norm.weight" in load_file(f))  # fmt: skip
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.zeros(3)
    save_file(tensors, file)
    texts = ranks(wrong_folder, 2, str(tmp_path / "two"), str(source))
    assert texts[0] == texts[1]
    assert "wrong shape: model.norm.weight is [3], the model has [16]" in texts[0]
