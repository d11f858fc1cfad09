"""Which combinations of parallelisms can work: the rules that span them, all found before anything is built."""

from torchtitan.config.configurable import Problem
from torchtitan.models.model import Model
from torchtitan.parallel.activation_checkpointing import ActivationCheckpointing
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.pipeline import splits_backward


def check_composition(
    mesh: Mesh.Config,
    model: Model.Config,
    recompute: ActivationCheckpointing.Config,
    world_size: int,
    *,
    seq_len: int,
    rows: int,
    micro_batch_rows: int | None,
) -> list[tuple[Problem, str]]:
    """Everything about a run's shape that cannot work on ``world_size`` ranks.

    Args:
        mesh: degrees, and the settings of each parallelism.
        model: to be cut.
        recompute: of the blocks.
        world_size: ranks of the run.
        seq_len: tokens of a row.
        rows: of the global batch.
        micro_batch_rows: of a data rank; None for as many as are sensible.

    Returns:
        Problems, each with the section of the run's config that it is about.
    """
    found = [(p, "parallelism") for p in mesh.check_world(world_size)]
    if found:
        return found  # the degrees are not known
    degrees, pipeline = mesh.resolve(world_size), mesh.pipeline
    unfit = list(pipeline.check_cut(degrees.pp, model.n_blocks))
    found += [(p, "parallelism.pipeline") for p in unfit]
    if not unfit and rows % degrees.data == 0:
        of_a_rank = rows // degrees.data
        found += [
            (p, "training") for p in pipeline.check_rows(degrees.pp, of_a_rank, micro_batch_rows)
        ]
    sound = not unfit and not any(True for _ in pipeline.check())
    if degrees.pp > 1 and sound and splits_backward(pipeline):
        problems = recompute.check_split_backward(pipeline.schedule)
        found += [(p, "activation_checkpointing") for p in problems]
    found += [(p, "training") for p in mesh.check_seq_len(seq_len)]
    found += [(p, "model") for p in model.check_degrees(degrees, seq_len)]
    return found
