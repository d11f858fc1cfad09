import pytest

from torchtitan.secrets import masked


@pytest.mark.parametrize(
    "name",
    ["hf_token", "token", "api_key", "WANDB_API_KEY", "password", "db_password", "client_secret"],
)
def test_values_under_a_secret_name_are_masked(name):
    assert masked({"a": [{name: "s3cret"}]}) == {"a": [{name: "***"}]}


def test_other_values_stay():
    tree = {
        "tokenizer": {"path": "x"},
        "eos_token": "<eos>",
        "tokens_per_step": 8,
        "token_key_count": 1,
        "hf_token": None,
        "url": "https://host/path@2",
        "t": (1.5, True),
    }
    assert masked(tree) == {**tree, "t": [1.5, True]}


def test_password_in_a_url_is_masked():
    text = masked({"path": "see https://me:s3cret@host/data"})["path"]
    assert text == "see https://***@host/data"
