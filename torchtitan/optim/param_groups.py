"""Which parameter gets which settings."""

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from torchtitan.config.configurable import Configurable, Problem
from torchtitan.errors import ConfigError


class ParamGroup(Configurable):
    """Settings for the parameters whose names match a pattern."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of `ParamGroup`."""

        pattern: str
        """Shell-style pattern over full parameter names, such as `layers.*.attention.*` or `embedding.weight`."""
        lr_scale: float = 1.0
        """Factor on the learning rate; 0 keeps the parameters as they are."""
        weight_decay: float | None = None
        """Decoupled weight decay; None means as without the group."""

        def check(self) -> Iterator[Problem]:
            """See `Configurable.Config.check`."""
            if self.lr_scale < 0:
                yield Problem("lr_scale", self.lr_scale, "is negative", "set 0 or more")
            if self.weight_decay is not None and self.weight_decay < 0:
                yield Problem("weight_decay", self.weight_decay, "is negative", "set 0 or more")


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What one optimizer group applies: factor on the learning rate, and decoupled weight decay."""

    lr_scale: float
    weight_decay: float


def group_parameters(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    patterns: list[ParamGroup.Config],
    *,
    weight_decay: float,
    other_names: Iterable[str] = (),
) -> list[tuple[GroupSettings, list[tuple[str, nn.Parameter]]]]:
    """Sort trainable parameters into groups of equal settings, in order of first appearance.

    The first pattern that matches a name wins. Without a match, matrices (two or more dimensions) get
    ``weight_decay`` and vectors (norm weights, biases) get none.

    Args:
        named_parameters: those of this rank.
        patterns: settings by name.
        weight_decay: of matrices.
        other_names: parameters of other ranks (pipeline stages); a pattern may match one of those alone.

    Raises:
        ConfigError: if a pattern matches no trainable parameter.
    """
    groups: dict[GroupSettings, list[tuple[str, nn.Parameter]]] = {}
    matched: set[str] = set()
    names: list[str] = []
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        names.append(name)
        default_decay = weight_decay if parameter.ndim >= 2 else 0.0
        settings = GroupSettings(lr_scale=1.0, weight_decay=default_decay)
        fitting = [group for group in patterns if fnmatch.fnmatchcase(name, group.pattern)]
        matched.update(group.pattern for group in fitting)
        if fitting:
            own_decay = fitting[0].weight_decay
            settings = GroupSettings(
                lr_scale=fitting[0].lr_scale,
                weight_decay=default_decay if own_decay is None else own_decay,
            )
        groups.setdefault(settings, []).append((name, parameter))
    for name in other_names:
        names.append(name)
        matched.update(g.pattern for g in patterns if fnmatch.fnmatchcase(name, g.pattern))
    unmatched = [group.pattern for group in patterns if group.pattern not in matched]
    if unmatched:
        raise ConfigError(
            f"optimizer.param_groups: {unmatched} match none of the {len(names)} trainable parameters; "
            f"write patterns over names such as {names[:3]}"
        )
    return list(groups.items())


def check_patterns(patterns: list[ParamGroup.Config], names: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each pattern that matches none of ``names``, those of all trainable parameters."""
    for i, group in enumerate(patterns):
        if not any(fnmatch.fnmatchcase(name, group.pattern) for name in names):
            yield Problem(
                f"param_groups.{i}.pattern",
                group.pattern,
                f"matches none of the {len(names)} trainable parameters",
                f"write one over names such as {', '.join(names[:3])}",
            )
