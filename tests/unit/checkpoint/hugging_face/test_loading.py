import json
import re

import pytest
import torch

from tests.unit.checkpoint.hugging_face.helpers import edit, exported, nan_like, read_json, small
from torchtitan.checkpoint.agreement import Agreement
from torchtitan.checkpoint.hugging_face.folder import family_of
from torchtitan.checkpoint.hugging_face.loading import load_weights
from torchtitan.checkpoint.hugging_face.weight_files import INDEX, WeightFiles
from torchtitan.errors import CheckpointError


def load(folder, config):
    model = nan_like(config)
    load_weights(WeightFiles(folder), family_of(config).layout(config), model, Agreement())
    return model


def failure(folder, config):
    model = nan_like(config)
    with pytest.raises(CheckpointError) as error:
        load_weights(WeightFiles(folder), family_of(config).layout(config), model, Agreement())
    assert all(p.isnan().all() for p in model.parameters())  # nothing was changed
    return str(error.value)


def equal(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_every_misfit_is_listed_at_once_with_near_names(tmp_path):
    config, model = small()
    exported(tmp_path / "m", config, model)

    def spoil(tensors):
        tensors["model.layers.0.self_attn.q_projj.weight"] = tensors.pop(
            "model.layers.0.self_attn.q_proj.weight"
        )
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 4)
        tensors["model.norm.weight"] = torch.zeros(16, dtype=torch.int8)

    edit(tmp_path / "m", spoil)
    text = failure(tmp_path / "m", config)
    assert "4 tensors do not fit the model" in text
    assert "missing: model.layers.0.self_attn.q_proj.weight [16, 16]; the folder has model.layers.0.self_attn.q_projj.weight" in text  # fmt: skip
    assert "unknown: model.layers.0.self_attn.q_projj.weight (float32 [16, 16]); the model has model.layers.0.self_attn.q_proj.weight" in text  # fmt: skip
    assert "wrong shape: model.layers.1.mlp.up_proj.weight is [3, 4], the model has [24, 16]" in text  # fmt: skip
    assert "wrong type: model.norm.weight is I8, weights are one of float64, float32" in text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_any_type_of_weights_is_read(dtype, tmp_path):
    config, model = small()
    exported(tmp_path / "m", config, model)
    edit(tmp_path / "m", lambda t: t.update({k: v.to(dtype) for k, v in t.items()}))
    loaded = load(tmp_path / "m", config)
    for (name, have), want in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert have.dtype == torch.float32
        assert torch.equal(have, want.to(dtype).float()), name


def test_tables_of_old_files_are_left_alone(tmp_path):
    config, model = small()
    exported(tmp_path / "m", config, model)
    table = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    edit(tmp_path / "m", lambda t: t.update(table))
    assert equal(load(tmp_path / "m", config), model)


def test_a_tied_model_loads_with_either_name_or_both(tmp_path):
    config, model = small(tied=True)
    exported(tmp_path / "m", config, model)
    names = WeightFiles(tmp_path / "m").stored
    assert "lm_head.weight" not in names
    embedding = model.embedding.weight.detach()
    edit(tmp_path / "m", lambda t: t.update({"lm_head.weight": embedding.clone()}))
    loaded = load(tmp_path / "m", config)
    assert equal(loaded, model)
    assert loaded.head.weight is loaded.embedding.weight
    edit(tmp_path / "m", lambda t: t.pop("model.embed_tokens.weight"))
    assert equal(load(tmp_path / "m", config), model)


def test_a_head_that_is_not_the_embedding_is_no_tied_model(tmp_path):
    config, model = small(tied=True)
    exported(tmp_path / "m", config, model)
    head = model.embedding.weight.detach().clone()
    head[4000, 3] += 1e-3
    edit(tmp_path / "m", lambda t: t.update({"lm_head.weight": head}))
    text = failure(tmp_path / "m", config)
    assert "lm_head.weight is not model.embed_tokens.weight, although the model ties them; set model.tied=False" in text  # fmt: skip


def test_pickles_are_refused_and_the_safe_way_is_named(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"as pickles only \(pytorch_model\.bin\); they are not loaded.*weights_only=True"):  # fmt: skip
        WeightFiles(tmp_path)


def test_a_folder_without_weights(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no weights: neither model\.safetensors nor"):
        WeightFiles(tmp_path)


def sharded(tmp_path):
    config, model = small()
    exported(tmp_path / "m", config, model, max_shard_bytes=40_000)
    return config, model, tmp_path / "m"


def test_several_files_and_an_index(tmp_path):
    config, model, folder = sharded(tmp_path)
    index = read_json(folder / INDEX)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in model.parameters())
    assert equal(load(folder, config), model)


def test_index_and_files_must_agree(tmp_path):
    _, _, folder = sharded(tmp_path)
    index = read_json(folder / INDEX)
    files = list(index["weight_map"].values())
    first = max(files, key=files.count)  # it stays in the index when one tensor moves
    second = next(file for file in files if file != first)
    name = next(n for n, file in index["weight_map"].items() if file == first)
    moved = {**index["weight_map"], name: second}
    (folder / INDEX).write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(CheckpointError, match=re.escape(f"{name} is in {first}, but {INDEX} says {second}")):  # fmt: skip
        WeightFiles(folder)
    edit(folder, lambda t: t.update({name: torch.zeros(2)}), second)
    with pytest.raises(CheckpointError, match=rf"duplicate: {name} is in \S+ and in \S+"):  # fmt: skip
        WeightFiles(folder)


def test_an_index_may_lack_files_or_promise_tensors(tmp_path):
    _, _, folder = sharded(tmp_path)
    index = read_json(folder / INDEX)
    file = max(index["weight_map"].values())
    promised = {**index["weight_map"], "model.extra": file}
    (folder / INDEX).write_text(json.dumps({"weight_map": promised}))
    with pytest.raises(CheckpointError, match=f"{file} lacks model.extra, which {INDEX} says is there"):  # fmt: skip
        WeightFiles(folder)
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=f"not whole; download or export it again:\n  {file} cannot be read"):  # fmt: skip
        WeightFiles(folder)


def test_a_cut_off_file_is_noticed(tmp_path):
    config, model = small()
    exported(tmp_path / "m", config, model)
    path = tmp_path / "m" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        WeightFiles(tmp_path / "m")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {"a": "../secret.safetensors"}}', r"is refused: it points outside its folder, to \.\./secret"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "it names a twice"),
        ("{}", "cannot be read: KeyError"),
    ],
)  # fmt: skip
def test_a_bad_index_is_refused(text, message, tmp_path):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        WeightFiles(tmp_path)
