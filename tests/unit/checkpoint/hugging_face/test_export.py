import json

import pytest
import torch
from safetensors import safe_open

from tests.unit.checkpoint.hugging_face.helpers import exported, read_json, small
from torchtitan.checkpoint.hugging_face.export import Target
from torchtitan.checkpoint.hugging_face.tokenizer_files import write_tokenizer_files
from torchtitan.data.tokenizer import BUNDLED, Tokenizer
from torchtitan.errors import CheckpointError, ConfigError
from torchtitan.generation.stops import stop_ids
from torchtitan.models.layers.attention import GQA
from torchtitan.models.layers.moe import MoE
from torchtitan.models.layers.norm import RMSNorm
from torchtitan.models.layers.router import Router


def dtypes(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {file.get_slice(name).get_dtype() for name in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.mark.parametrize(("dtype", "tag"), [("float32", "F32"), ("bfloat16", "BF16"), ("float16", "F16")])  # fmt: skip
def test_weights_and_config_have_the_type_that_was_asked_for(dtype, tag, tmp_path):
    config, model = small()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    verdict = exported(tmp_path / "m", config, model, dtype=dtype)
    assert dtypes(tmp_path / "m") == ({tag}, {"format": "pt"})
    hf = read_json(tmp_path / "m" / "config.json")
    assert hf["dtype"] == hf["torch_dtype"] == dtype
    assert hf["architectures"] == ["LlamaForCausalLM"]
    assert ("bit for bit" in str(verdict)) == (dtype == "float32")
    assert verdict.n_tensors == 21
    for name, parameter in model.named_parameters():  # masters stay as they are
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, before[name])


def test_the_verdict_says_by_how_much_weights_were_rounded(tmp_path):
    config, model = small()
    with torch.no_grad():
        model.norm.weight.fill_(1 + 2**-9)
    verdict = exported(tmp_path / "m", config, model, dtype="bfloat16")
    assert verdict.rounding == 2**-9
    assert "rounded to bfloat16, by at most 0.002" in str(verdict)


def test_a_folder_in_use_is_not_touched(tmp_path):
    config, model = small()
    (tmp_path / "note").write_text("mine")
    with pytest.raises(CheckpointError, match="it exists and is not empty"):
        exported(tmp_path, config, model)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


@pytest.mark.parametrize(("value", "dtype", "message"), [
    (1e6, "float16", "norm.weight has a number that does not fit in float16"),
    (float("nan"), "float32", "norm.weight is not what was written"),
    (float("inf"), "bfloat16", "norm.weight has a number that is not finite in bfloat16"),
])  # fmt: skip
def test_weights_that_are_no_numbers_are_refused_and_leave_nothing(value, dtype, message, tmp_path):
    config, model = small()
    with torch.no_grad():
        model.norm.weight[3] = value
    with pytest.raises(CheckpointError, match=message):
        exported(tmp_path / "m", config, model, dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def moe():
    config, model = small(
        hf_model_type="qwen3_moe",
        attention=GQA.Config(n_heads=2, n_kv_heads=1, qk_norm=RMSNorm.Config()),
        feed_forward=MoE.Config(n_experts=4, ffn_dim=8, router=Router.Config(top_k=2, bias_rate=1e-3)),
    )  # fmt: skip
    return config, model


def test_what_the_format_has_no_place_for_is_refused_unless_it_is_nothing(tmp_path, caplog):
    config, model = moe()
    exported(tmp_path / "zero", config, model)
    model.layers[1].feed_forward.router.expert_bias[2] = 0.5
    with pytest.raises(CheckpointError, match=r"no place for layers\.1\.feed_forward\.router\.expert_bias, which is not 0"):  # fmt: skip
        exported(tmp_path / "m", config, model)
    exported(tmp_path / "m", config, model, allow_loss=True)
    assert "left out, the format has no place for it: layers.1.feed_forward.router.expert_bias" in caplog.text  # fmt: skip


def test_a_model_without_a_family_is_refused(tmp_path):
    config, model = small(hf_model_type="")
    with pytest.raises(ConfigError, match=r"model\.hf_model_type is empty"):
        exported(tmp_path / "m", config, model)


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def tokenizer(folder, template="jinja"):
    """The bundled tokenizer, which has ChatML's tokens, as a folder of the old or the new kind."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(BUNDLED.read_bytes())
    settings = {"eos_token": {"content": "<|end_of_text|>"}, "pad_token": "<|end_of_text|>"}
    if template == "jinja":
        (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    elif template == "old":
        settings["chat_template"] = CHATML
    else:
        settings["chat_template"] = [
            {"name": "default", "template": CHATML},
            {"name": "tool_use", "template": "{{ tools }}"},
        ]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder, Tokenizer.Config().build().vocab["<|im_end|>"]


@pytest.mark.parametrize("template", ["jinja", "old", "named"])
def test_tokenizer_template_and_the_end_of_turn_are_written_where_loaders_look(template, tmp_path):
    source, turn_end = tokenizer(tmp_path / "t", template)
    config, model = small()
    exported(tmp_path / "m", config, model, tokenizer=source, generation={"eos_token_id": 7, "top_p": 0.9})  # fmt: skip
    folder = tmp_path / "m"
    assert (folder / "chat_template.jinja").read_text(encoding="utf-8") == CHATML
    assert "chat_template" not in read_json(folder / "tokenizer_config.json")
    assert (folder / "additional_chat_templates/tool_use.jinja").exists() == (template == "named")
    eos = Tokenizer.Config().build().eos_id
    generation = read_json(folder / "generation_config.json")
    assert generation == {"eos_token_id": [7, eos, turn_end], "top_p": 0.9, "pad_token_id": eos}
    hf = read_json(folder / "config.json")
    assert (hf["eos_token_id"], hf["pad_token_id"]) == ([7, eos, turn_end], eos)


def test_the_end_of_turn_is_the_one_that_the_template_really_writes(tmp_path):
    """Also if its name is none that is known, and is no text of the template."""
    source, _ = tokenizer(tmp_path / "t")
    text = source.joinpath("tokenizer.json").read_text(encoding="utf-8")
    source.joinpath("tokenizer.json").write_text(text.replace("<|im_end|>", "<|over|>"), encoding="utf-8")  # fmt: skip
    template = CHATML.replace("<|im_end|>", "{{ '<|' + 'over' + '|>' }}")
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    source.joinpath("chat_template.jinja").write_text(template, encoding="utf-8")
    config, model = small()
    exported(tmp_path / "m", config, model, tokenizer=source)
    built = Tokenizer.Config(path=str(source)).build()
    ends = [built.eos_id, built.vocab["<|over|>"]]
    assert read_json(tmp_path / "m" / "generation_config.json")["eos_token_id"] == ends
    assert set(ends) <= stop_ids(built)


def test_the_bundled_tokenizer_names_its_end(tmp_path):
    config, model = small()
    exported(tmp_path / "m", config, model, tokenizer=BUNDLED)
    settings = read_json(tmp_path / "m" / "tokenizer_config.json")
    built = Tokenizer.Config(path=str(tmp_path / "m")).build()
    assert built.vocab[settings["eos_token"]] == built.eos_id
    assert read_json(tmp_path / "m" / "generation_config.json")["eos_token_id"] == [built.eos_id]


@pytest.mark.filterwarnings("ignore")  # those of transformers
def test_text_begins_in_transformers_as_it_did_in_training(tmp_path):
    transformers = pytest.importorskip("transformers")
    config, model = small()
    exported(tmp_path / "m", config, model, tokenizer=BUNDLED)
    bundled = Tokenizer.Config().build()
    want = [bundled.bos_id, *bundled.encode("def main")]
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "m")("def main").input_ids == want
    again = Tokenizer.Config(path=str(tmp_path / "m")).build()
    assert [again.bos_id, *again.encode("def main")] == want


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    config, model = small()
    (tmp_path / "t").mkdir()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json; name the folder of a tokenizer"):  # fmt: skip
        exported(tmp_path / "m", config, model, tokenizer=tmp_path / "t")


def test_whoever_may_read_other_files_may_read_the_weights(tmp_path):
    """A server often runs as another user."""
    config, model = small()
    exported(tmp_path / "m", config, model)
    modes = {(tmp_path / "m" / name).stat().st_mode for name in ("config.json", "model.safetensors")}  # fmt: skip
    assert len(modes) == 1


def test_files_are_5_gib_by_default(tmp_path):
    assert Target(folder=tmp_path).max_shard_bytes == 5 * 2**30


def test_every_file_of_the_tokenizer_is_copied(tmp_path):
    """Programs differ in which of them they read."""
    source, _ = tokenizer(tmp_path / "t")
    names = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model")  # fmt: skip
    for name in names:
        (source / name).write_bytes(name.encode() + b"\x80\r\n")
    (source / "pytorch_model.bin").write_bytes(b"no part of a tokenizer")
    config, model = small()
    exported(tmp_path / "m", config, model, tokenizer=source)
    for name in (*names, "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "m" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "m" / "pytorch_model.bin").exists()


@pytest.mark.parametrize("as_object", [False, True])
def test_the_tokens_of_a_document_have_their_ids_in_the_generation_config(as_object, tmp_path):
    source, turn_end = tokenizer(tmp_path / "t")
    named = {"eos_token": "<|end_of_text|>", "bos_token": "<|begin_of_text|>", "pad_token": "<|im_end|>"}  # fmt: skip
    settings = {key: {"content": name} if as_object else name for key, name in named.items()}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    config, model = small()
    exported(tmp_path / "m", config, model, tokenizer=source)
    vocab = Tokenizer.Config().build().vocab
    want = {
        "eos_token_id": [vocab["<|end_of_text|>"], turn_end],
        "bos_token_id": vocab["<|begin_of_text|>"],
        "pad_token_id": turn_end,
    }
    assert read_json(tmp_path / "m" / "generation_config.json") == want
    assert want.items() <= read_json(tmp_path / "m" / "config.json").items()


@pytest.mark.parametrize("template", ["jinja", "old"])
def test_the_template_of_the_training_wins_over_that_of_the_tokenizer(template, tmp_path):
    tokenizer(tmp_path / "tokenizer", template)
    (tmp_path / "m").mkdir()
    write_tokenizer_files(tmp_path / "tokenizer", tmp_path / "m", "{{ messages }}")
    assert (tmp_path / "m/chat_template.jinja").read_text(encoding="utf-8") == "{{ messages }}"
