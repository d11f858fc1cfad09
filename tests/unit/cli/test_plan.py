"""The command ``torchtitan plan``."""

import pytest

from torchtitan.cli.main import main


def run(capsys, *arguments):
    code = main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_70b_recipe_fits(capsys):
    code, out, _ = run(
        capsys,
        "--module",
        "torchtitan_recipes.sft",
        "--config",
        "llama3_3_70b_full_h100x8",
        "--ngpu",
        "8",
    )
    assert code == 0
    for text in (
        "loss",
        "backward",
        "update",
        "optimizer",
        "of 79.10 GiB (H100-80GB): fits,",
        "TFLOP",
    ):
        assert text in out
    assert "what to change" not in out


def test_what_does_not_fit_comes_with_what_to_change(capsys):
    code, out, _ = run(
        capsys, "--config", "llama3_8b", "--device", "RTX4090", "--training.global-batch-rows", "1"
    )
    assert code == 0
    assert "does not fit" in out
    assert "--activation-checkpointing.mode full" in out


def test_an_amount_of_memory_has_no_rates(capsys):
    _, out, _ = run(capsys, "--device", "6GiB")
    assert "of 6.00 GiB (6GiB): fits" in out
    assert "peak rates" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "X1"], "--device X1: is neither a known device nor an amount of memory"),
        (["--device", "1e400"], "--device 1e400: is no amount of memory; write one such as 24GiB"),
        (["--device", "0GiB"], "--device 0GiB: is no amount of memory"),
        (["--dry-run"], "is torchtitan train's; leave it out"),
        (["--device"], "takes one value, got 0; write --device H100-80GB"),
        (["--verify", "yes"], "takes no value; write --verify alone"),
        (["--ngpu", "8", "--parallelism.tp", "3"], "parallelism.dp_shard"),
        (["--model.n-layer", "3"], "did you mean --model.n_layers"),
    ],
)
def test_errors_name_the_remedy(capsys, arguments, message):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert message in err


def test_what_the_run_would_refuse_as_it_is_built_is_refused(capsys):
    """Blocks of codes and the mesh: 704 columns over two ranks; and names of parameters."""
    arguments = ["--ngpu", "8", "--parallelism.tp", "2", "--optimizer.state-dtype", "int4"]
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert (
        "parallelism.tp=2 cuts them in layers.*.feed_forward.down_proj.weight (704 columns)" in err
    )
    code, _, _ = run(capsys, *arguments, "--optimizer.block-size", "32")
    assert code == 0


def test_advice_leaves_out_what_the_run_would_refuse_as_it_is_built(capsys):
    code, out, _ = run(capsys, "--ngpu", "2", "--parallelism.tp", "2", "--device", "2.03GiB")
    assert code == 0
    assert "what to change" in out
    assert "state-dtype int8" not in out


def test_verify_prints_both_figures(capsys):
    code, out, _ = run(
        capsys,
        "--verify",
        "--training.seq-len",
        "64",
        "--training.compute-dtype",
        "bfloat16",
        "--model.n-layers",
        "5",
    )
    assert code == 0
    assert "5 layers:" in out
    assert "extrapolated" in out


def test_help(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "--device D" in out
