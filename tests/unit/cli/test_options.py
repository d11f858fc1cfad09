import pytest

from torchtitan.cli.options import DEFAULT_CONFIG, DEFAULT_MODULE, parse_options
from torchtitan.config.overrides import Flag
from torchtitan.errors import ConfigError


def test_nothing_given():
    options = parse_options([])
    assert (options.module, options.config) == (DEFAULT_MODULE, DEFAULT_CONFIG)
    assert (options.ngpu, options.nnodes, options.log_ranks) == (None, 1, frozenset({0}))
    assert not options.dry_run
    assert not options.help
    assert options.flags == ()


def test_options_and_overrides_in_any_order():
    line = "--a.b 1 2 --module m.n --ngpu=4 --config c --dry-run --nnodes 2 --log-rank 0,2 --x -h"
    options = parse_options(line.split())
    assert (options.module, options.config) == ("m.n", "c")
    assert (options.ngpu, options.nnodes, options.log_ranks) == (4, 2, frozenset({0, 2}))
    assert options.dry_run
    assert options.help
    assert options.flags == (Flag("a.b", ("1", "2")), Flag("x", ()))
    assert parse_options(["--log-rank", "all"]).log_ranks is None


def test_the_rank_of_a_dry_run_makes_it_one():
    options = parse_options(["--dry-run-rank", "3"])
    assert (options.dry_run, options.dry_run_rank) == (True, 3)
    assert parse_options(["--dry-run"]).dry_run_rank == 0


def test_a_later_option_wins():
    assert parse_options(["--ngpu", "1", "--ngpu", "2"]).ngpu == 2


def test_all_misuse_is_listed():
    line = "stray --ngpu many --nnodes 0 --log-rank x --dry-run yes --module --config a b"
    with pytest.raises(ConfigError) as caught:
        parse_options(line.split())
    assert str(caught.value).splitlines() == [
        "7 problems, nothing was started",
        "  stray: belongs to no flag; write overrides as --section.field value",
        "  --module=: takes one value, got 0; write --module VALUE",
        "  --config=a b: takes one value, got 2; write --config VALUE",
        "  --ngpu=many: is not a whole number above 0; write --ngpu 1 or more",
        "  --nnodes=0: is not a whole number above 0; write --nnodes 1 or more",
        "  --log-rank=x: names no ranks; write --log-rank 0 or 0,1 or all",
        "  --dry-run=yes: takes no value; write --dry-run alone",
    ]
