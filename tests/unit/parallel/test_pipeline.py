"""Where a model is cut, and what is refused."""

import pytest
import torch

from tests.tiny import tiny, tiny_model
from torchtitan.config import check_tree
from torchtitan.models.llama3.sizes import llama3
from torchtitan.parallel.pipeline import Pipeline, balanced, pipeline_picture, splits_backward


@pytest.mark.parametrize(
    ("n_blocks", "n_stages", "first", "last", "expected"),
    [
        (8, 2, 1, 1, (4, 4)),
        (8, 4, 1, 1, (1, 2, 3, 2)),
        (9, 4, 1, 1, (1, 3, 3, 2)),
        (126, 16, 1, 1, (7, *[8] * 14, 7)),
        (7, 2, 0, 3, (5, 2)),
        (4, 4, 5, 5, (1, 1, 1, 1)),
        (3, 1, 1, 1, (3,)),
    ],
)
def test_balanced_split(n_blocks, n_stages, first, last, expected):
    counts = balanced(n_blocks, n_stages, first=first, last=last)
    assert sum(counts) == n_blocks
    assert counts == expected


def test_no_split_has_a_lighter_heaviest_stage():
    def heaviest(counts):
        return max(c + (i == 0) + 2 * (i == len(counts) - 1) for i, c in enumerate(counts))

    for n_blocks in range(3, 12):
        every = [
            (a, b, n_blocks - a - b) for a in range(1, n_blocks - 1) for b in range(1, n_blocks - a)
        ]
        assert heaviest(balanced(n_blocks, 3, first=1, last=2)) == min(map(heaviest, every))


@pytest.mark.parametrize(
    ("schedule", "per_rank", "ranks", "of_rank_0"),
    [
        ("1F1B", None, [0, 1], [0]),
        ("Interleaved1F1B", None, [0, 1, 0, 1], [0, 2]),
        ("InterleavedZeroBubble", 3, [0, 1, 0, 1, 0, 1], [0, 2, 4]),
        ("ZBVZeroBubble", None, [0, 1, 1, 0], [0, 3]),
    ],
)
def test_stages_of_a_rank(schedule, per_rank, ranks, of_rank_0):
    config = Pipeline.Config(schedule=schedule, stages_per_rank=per_rank)
    pipeline = config.build(pp=2, n_blocks=8)
    assert pipeline.rank_of_stage == ranks
    assert pipeline.stages_of(0) == of_rank_0
    assert [i for blocks in pipeline.blocks for i in blocks] == list(range(8))


def test_explicit_split():
    pipeline = Pipeline.Config(blocks_per_stage=(1, 5)).build(pp=2, n_blocks=6)
    assert pipeline.blocks == [range(1), range(1, 6)]
    named = Pipeline.Config(
        schedule="Interleaved1F1B", stages_begin_with=("layers.1", "layers.3", "layers.4")
    )
    assert named.build(pp=2, n_blocks=6).blocks == [range(1), range(1, 3), range(3, 4), range(4, 6)]
    assert problems(named, n_layers=6) == []


def problems(pipeline, *, pp=2, n_layers=8, world=None, micro_batch_rows=1, rows=8):
    config = tiny("unused", global_batch_rows=rows, micro_batch_rows=micro_batch_rows)
    config.model = tiny_model(n_layers=n_layers)
    config.parallelism.pp = pp
    config.parallelism.pipeline = pipeline
    return [str(p) for p in check_tree(config, world or pp)]


def test_sound_pipelines_have_no_problems():
    for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"):
        assert problems(Pipeline.Config(schedule=schedule)) == []
    assert problems(Pipeline.Config(blocks_per_stage=(3, 5))) == []
    assert problems(Pipeline.Config(schedule="DualPipeV"), pp=1, n_layers=1) == []


@pytest.mark.parametrize(
    ("pipeline", "options", "expected"),
    [
        (
            Pipeline.Config(),
            {"pp": 4, "n_layers": 3},
            "model.n_layers=3: is fewer than parallelism.pp=4, and each rank of a pipeline needs a block; "
            "set parallelism.pp to 3 or less",
        ),
        (
            Pipeline.Config(schedule="Interleaved1F1B", stages_per_rank=3),
            {"n_layers": 5},
            "parallelism.pipeline.stages_per_rank=3: makes pp=2 * 3 = 6 stages of 5 blocks, and each needs one; "
            "set stages_per_rank to 2 or less, or pp to 1 or less",
        ),
        (
            Pipeline.Config(schedule="ZBVZeroBubble"),
            {"n_layers": 3},
            "parallelism.pipeline.stages_per_rank=None: makes pp=2 * 2 = 4 stages of 3 blocks, and each needs one; "
            "set a schedule of 1 stage a rank (GPipe, 1F1B), or pp to 1 or less",
        ),
        (
            Pipeline.Config(),
            {"micro_batch_rows": 8},
            "training.micro_batch_rows=8: makes 1 micro-batches of the 8 rows of a data rank, but "
            "parallelism.pipeline.schedule=1F1B with pp=2 needs at least 2, one a stage; choose one of [1, 2, 4]",
        ),
        (
            Pipeline.Config(schedule="DualPipeV"),
            {"micro_batch_rows": 4},
            "training.micro_batch_rows=4: makes 2 micro-batches of the 8 rows of a data rank, but "
            "parallelism.pipeline.schedule=DualPipeV with pp=2 needs at least 4, one a stage; choose one of [1, 2]",
        ),
        (
            Pipeline.Config(schedule="Interleaved1F1B"),
            {"rows": 14, "micro_batch_rows": 2},
            "training.micro_batch_rows=2: makes 7 micro-batches of the 14 rows of a data rank, but "
            "parallelism.pipeline.schedule=Interleaved1F1B with pp=2 runs them in 3 equal rounds, so it needs a "
            "multiple of 3; choose one of [1, 7, 14]",
        ),
        (
            Pipeline.Config(schedule="DualPipeV"),
            {"rows": 3, "micro_batch_rows": None},
            "training.micro_batch_rows=None: makes 3 micro-batches of the 3 rows of a data rank, but "
            "parallelism.pipeline.schedule=DualPipeV with pp=2 needs at least 4, one a stage; "
            "set more training.global_batch_rows",
        ),
        (
            Pipeline.Config(schedule="1F1B", stages_per_rank=2),
            {},
            "parallelism.pipeline.stages_per_rank=2: does not go with schedule=1F1B, which needs exactly 1; "
            "set 1, or leave it None",
        ),
        (
            Pipeline.Config(schedule="ZBVZeroBubble", stages_per_rank=1),
            {},
            "parallelism.pipeline.stages_per_rank=1: does not go with schedule=ZBVZeroBubble, which needs exactly 2; "
            "set 2, or leave it None",
        ),
        (
            Pipeline.Config(blocks_per_stage=(3, 4)),
            {},
            "parallelism.pipeline.blocks_per_stage=(3, 4): has 2 stages of 7 blocks in all, but there are 2 stages "
            "(pp=2 * 1) and the model has 8 blocks; set 2 numbers with the sum 8, or None for a balanced split",
        ),
        (
            Pipeline.Config(blocks_per_stage=(8,)),
            {},
            "parallelism.pipeline.blocks_per_stage=(8,): has 1 stages of 8 blocks in all, but there are 2 stages "
            "(pp=2 * 1) and the model has 8 blocks; set 2 numbers with the sum 8, or None for a balanced split",
        ),
        (
            Pipeline.Config(stages_begin_with=("layers.8",)),
            {},
            "parallelism.pipeline.stages_begin_with=('layers.8',): makes stages of 8, 0 blocks, but there are 2 stages "
            "(pp=2 * 1) and the model has 8 blocks; name 1 blocks, the last at most number 7, or None for a balanced split",
        ),
        (
            Pipeline.Config(stages_begin_with=("head",)),
            {},
            "parallelism.pipeline.stages_begin_with=('head',): are not blocks in the order of the forward; "
            "write such as layers.7 layers.16, rising",
        ),
        (
            Pipeline.Config(stages_begin_with=("layers.4",), blocks_per_stage=(4, 4)),
            {},
            "parallelism.pipeline.stages_begin_with=('layers.4',): and blocks_per_stage=(4, 4) both say where the model "
            "is cut; set one of them to None",
        ),
        (
            Pipeline.Config(blocks_per_stage=(8, 0)),
            {},
            "parallelism.pipeline.blocks_per_stage=(8, 0): has a stage without a block; give every stage at least 1",
        ),
        (
            Pipeline.Config(stages_per_rank=0),
            {},
            "parallelism.pipeline.stages_per_rank=0: is not positive; set 1 or more",
        ),
        (
            Pipeline.Config(head_layers=-1),
            {},
            "parallelism.pipeline.head_layers=-1: is negative; set 0 or more",
        ),
        (
            Pipeline.Config(schedule="CSV"),
            {},
            "parallelism.pipeline.csv=: does not go with schedule=CSV; "
            "set schedule=CSV and a path here, or another schedule and no path",
        ),
    ],
)
def test_what_cannot_work_is_refused(pipeline, options, expected):
    assert problems(pipeline, **options) == [expected]


def test_all_problems_come_at_once():
    pipeline = Pipeline.Config(schedule="Interleaved1F1B", blocks_per_stage=(2, 2, 2, 3))
    found = problems(pipeline, n_layers=8, rows=7, micro_batch_rows=2)
    assert {text.partition("=")[0] for text in found} == {
        "training.micro_batch_rows",
        "parallelism.pipeline.blocks_per_stage",
    }


def csv_problem(tmp_path, text, **options):
    path = tmp_path / "schedule.csv"
    path.write_text(text)
    (problem,) = problems(Pipeline.Config(schedule="CSV", csv=str(path)), **options)
    return problem.removeprefix(f"parallelism.pipeline.csv={path}: ")


GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1I1,1W1\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0,0X1\n1F0\n", "has '0X1' in line 1, column 2, which is no action such as 0F1"),
        ("0F0,0B0\n", "has 1 lines, one a rank, but pp=2"),
        ("0F0,0B0\n0F1,0B1\n", "must give each rank equally many of the stages 0 to 0"),
        (GOOD.replace(",1W1", ""), "has ['F', 'I'] for stage 1 and micro-batch 1"),
        ("0B0,0F0\n1F0,1B0\n", "deadlocks: rank 0 at 0B0, rank 1 at 1F0, each waiting for another"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused(tmp_path, text, expected):
    assert csv_problem(tmp_path, text, micro_batch_rows=4).startswith(expected)


def test_a_schedule_from_a_file(tmp_path):
    path = tmp_path / "good.csv"
    path.write_text(GOOD)
    config = Pipeline.Config(schedule="CSV", csv=str(path))
    assert problems(config, micro_batch_rows=4) == []
    assert config.micro_batch_rows(2, 8) == 4
    assert splits_backward(config)
    assert config.build(pp=2, n_blocks=8).rank_of_stage == [0, 1]
    (problem,) = problems(config, micro_batch_rows=2)
    assert "is of exactly 2; choose one of [4]" in problem
    (problem,) = problems(Pipeline.Config(schedule="CSV", csv=str(tmp_path / "none.csv")))
    assert "cannot be read: [Errno 2]" in problem
    config.stages_per_rank = 2
    (problem,) = problems(config, micro_batch_rows=4)
    assert problem.endswith(f"is not what {path} has; set 1, or leave it None")


@pytest.mark.parametrize(
    ("schedule", "rows", "expected"),
    [
        ("1F1B", 8, 4),
        ("1F1B", 9, 3),
        ("DualPipeV", 8, 2),
        ("Interleaved1F1B", 8, 2),
        ("GPipe", 1, 1),
    ],
)
def test_default_rows_of_a_micro_batch_keep_every_stage_busy(schedule, rows, expected):
    assert Pipeline.Config(schedule=schedule).micro_batch_rows(2, rows) == expected
    assert Pipeline.Config(schedule=schedule).micro_batch_rows(1, rows) == rows


@pytest.mark.parametrize("tied", [False, True])
def test_stages_of_a_decoder_are_the_decoder(tied):
    config = tiny_model(tied=tied, n_layers=3)
    with torch.device("meta"):
        whole, first, last = config.build(), config.build(), config.build()
    first.keep(range(2), True, False)
    last.keep(range(2, 3), False, True)
    names = {name for name, _ in whole.named_parameters()}
    kept = [{name for name, _ in part.named_parameters()} for part in (first, last)]
    copies = set(whole.shared_parameters())
    assert kept[0] | kept[1] == names | copies
    assert kept[0] & kept[1] == set()
    assert "layers.2.attention.q_proj.weight" in kept[1]
    assert [len(part.edge_units()) for part in (first, last)] == [1, 1]


def test_picture():
    text = pipeline_picture(Pipeline.Config(), 2, 8, 3)
    assert text == (
        "1F1B, 2 stages on 2 ranks, 3 micro-batches; idle 25% of the time if all stages are equal and a backward "
        "takes two forwards\n"
        "stage 0: rank 0, embedding, blocks 0-3\n"
        "stage 1: rank 1, blocks 4-7, norm and head\n"
        "rank 0 | 0F0 0F1 .   .   0B0 --  0F2 0B1 --  .   0B2 --\n"
        "rank 1 | .   1F0 1B0 --  1F1 1B1 --  1F2 1B2 --  .   .\n"
        "0F1 = stage 0, forward of micro-batch 1; B backward, I and W its halves (inputs, weights); . idle"
    )


def test_picture_of_a_large_pipeline_stays_within_its_width():
    blocks = llama3("405b").n_blocks
    text = pipeline_picture(Pipeline.Config(schedule="Interleaved1F1B"), 16, blocks, 64, width=100)
    lines = [line for line in text.splitlines() if line.startswith("rank")]
    assert len(lines) == 16
    assert all(len(line) <= 100 for line in lines)
    assert lines[0].endswith(" ...")
