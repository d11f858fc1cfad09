from torchtitan.config.configurable import ChecksWorld, Configurable, DescribesRun, Problem
from torchtitan.config.differences import Difference, differences
from torchtitan.config.serialize import from_dict, to_dict
from torchtitan.config.show import format_tree
from torchtitan.config.tree import Entry, check_tree, clone, entries, leaves, walk

__all__ = [
    "ChecksWorld",
    "Configurable",
    "DescribesRun",
    "Difference",
    "Entry",
    "Problem",
    "check_tree",
    "clone",
    "differences",
    "entries",
    "format_tree",
    "from_dict",
    "leaves",
    "to_dict",
    "walk",
]
