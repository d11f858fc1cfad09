"""How the weights of a model correspond to the tensors of a Hugging Face folder, declared as data.

A family lists rules. Laid out for one model they become pieces: each says which part of which tensor there is which
part of which parameter here. Reading and writing walk the pieces; they know no family.
"""

# Shapes: E entries of a stack, R rows; "..." the other dimensions.

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Shape = tuple[int, ...]
Box = tuple[slice, ...]
"""A part of a tensor: a range in each dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a parameter that is a part of a tensor of the folder.

    Attributes:
        ours: name of the parameter.
        theirs: name of the tensor.
        their_shape: of the whole tensor.
        entry: the piece is this entry of our first dimension, which the tensor lacks; None where it has it.
        dim: dimension along which the piece is a part of the tensor.
        start: where in that dimension it starts.
        length: its size there.
        head_dim: their rows are heads of so many rows with the features of a rotary pair side by side, ours has them
            half a head apart; None where the order is the same.
    """

    ours: str
    theirs: str
    their_shape: Shape
    entry: int | None = None
    dim: int = 0
    start: int = 0
    length: int
    head_dim: int | None = None

    @property
    def their_box(self) -> Box:
        """The part of the tensor that the piece is."""
        box = [slice(0, size) for size in self.their_shape]
        box[self.dim] = slice(self.start, self.start + self.length)
        return tuple(box)

    def source(self, box: Box) -> Box | None:
        """The smallest part of the tensor that has ``box`` of our parameter; None if the piece has nothing of it."""
        if self.entry is not None:
            if not box[0].start <= self.entry < box[0].stop:
                return None
            box = box[1:]
        if self.head_dim is not None:
            rows = self._their_rows(box[0])
            box = (slice(int(rows.min()), int(rows.max()) + 1), *box[1:])
        moved = list(box)
        moved[self.dim] = slice(box[self.dim].start + self.start, box[self.dim].stop + self.start)
        return tuple(moved)

    def to_ours(self, part: Tensor, box: Box) -> Tensor:
        """What was read from ``source(box)`` as ``box`` of our parameter (without the entry's dimension)."""
        if self.head_dim is None:
            return part
        rows = self._their_rows(box[0])
        return part.index_select(0, rows - rows.min())

    def to_theirs(self, parameter: Tensor) -> Tensor:
        """The piece of our whole parameter, as it stands in `their_box`."""
        part = parameter if self.entry is None else parameter[self.entry]
        if self.head_dim is None:
            return part
        out = torch.empty_like(part)
        out[self._their_rows(slice(0, len(part)))] = part
        return out

    def _their_rows(self, ours: slice) -> Tensor:
        """For each of our rows the row of the piece where it stands there: half by half to pair by pair."""
        row = torch.arange(ours.start, ours.stop)  # (R,)
        head_dim = self.head_dim or 1
        head, feature = row // head_dim, row % head_dim
        half, pair = feature // (head_dim // 2), feature % (head_dim // 2)
        return head * head_dim + 2 * pair + half


class Rule(ABC):
    """One line of a family's table; ``{layer}`` in a name stands for a block's number."""

    @abstractmethod
    def patterns(self) -> Sequence[str]:
        """Names of our parameters that the rule is for."""

    @abstractmethod
    def pieces(self, pattern: str, layer: str, shapes: Mapping[str, Shape]) -> Iterator[Piece]:
        """The pieces of the parameter that ``pattern`` is in block ``layer``.

        Args:
            pattern: one of `patterns`.
            layer: number of the block, "" outside of blocks.
            shapes: of all our parameters.
        """


@dataclass(frozen=True, slots=True)
class Rename(Rule):
    """The same tensor under another name."""

    ours: str
    theirs: str

    def patterns(self) -> Sequence[str]:
        """See `Rule.patterns`."""
        return (self.ours,)

    def pieces(self, pattern: str, layer: str, shapes: Mapping[str, Shape]) -> Iterator[Piece]:
        """See `Rule.pieces`."""
        name = _fill(pattern, layer)
        shape = shapes[name]
        yield Piece(ours=name, theirs=_fill(self.theirs, layer), their_shape=shape, length=shape[0])


@dataclass(frozen=True, slots=True)
class Permute(Rule):
    """The same rows in another order: rotary pairs side by side there, half a head of `head_dim` apart here."""

    ours: str
    theirs: str
    head_dim: int

    def patterns(self) -> Sequence[str]:
        """See `Rule.patterns`."""
        return (self.ours,)

    def pieces(self, pattern: str, layer: str, shapes: Mapping[str, Shape]) -> Iterator[Piece]:
        """See `Rule.pieces`."""
        name = _fill(pattern, layer)
        shape = shapes[name]
        yield Piece(
            ours=name,
            theirs=_fill(self.theirs, layer),
            their_shape=shape,
            length=shape[0],
            head_dim=self.head_dim,
        )


@dataclass(frozen=True, slots=True)
class Stack(Rule):
    """A tensor for each entry of our first dimension; ``{entry}`` in the name is its number. ``(E, ...) <-> E x (...)``."""

    ours: str
    theirs: str

    def patterns(self) -> Sequence[str]:
        """See `Rule.patterns`."""
        return (self.ours,)

    def pieces(self, pattern: str, layer: str, shapes: Mapping[str, Shape]) -> Iterator[Piece]:
        """See `Rule.pieces`."""
        name = _fill(pattern, layer)
        n_entries, *shape = shapes[name]
        for entry in range(n_entries):
            yield Piece(
                ours=name,
                theirs=_fill(self.theirs, layer).replace("{entry}", str(entry)),
                their_shape=tuple(shape),
                entry=entry,
                length=shape[0],
            )


@dataclass(frozen=True, slots=True)
class Split(Rule):
    """Several of our parameters, laid end to end along `dim` in one tensor."""

    ours: tuple[str, ...]
    theirs: str
    dim: int = 0

    def patterns(self) -> Sequence[str]:
        """See `Rule.patterns`."""
        return self.ours

    def pieces(self, pattern: str, layer: str, shapes: Mapping[str, Shape]) -> Iterator[Piece]:
        """See `Rule.pieces`."""
        sizes = {other: shapes[_fill(other, layer)][self.dim] for other in self.ours}
        whole = list(shapes[_fill(pattern, layer)])
        whole[self.dim] = sum(sizes.values())
        before = self.ours[: self.ours.index(pattern)]
        yield Piece(
            ours=_fill(pattern, layer),
            theirs=_fill(self.theirs, layer),
            their_shape=tuple(whole),
            dim=self.dim,
            start=sum(sizes[other] for other in before),
            length=sizes[pattern],
        )


@dataclass(frozen=True, slots=True)
class Drop:
    """A tensor of a folder that carries nothing: a table that is computed here. ``{layer}`` as in `Rule`."""

    theirs: str


@dataclass(frozen=True, slots=True)
class Own:
    """State of ours that folders have no place for: 0 when weights are read, and refused at export unless it is 0."""

    ours: str


@dataclass(frozen=True)
class Layout:
    """The rules, laid out for one model.

    Attributes:
        pieces: all of them; each element of each parameter, and of each tensor of the folder, is in exactly one.
        own: names of our tensors without a counterpart.
        aliases: names in a folder of a tied parameter's second use, each with the parameter's own name there; a folder
            may have the tensor under both.
        dropped: patterns of tensors to leave alone.
    """

    pieces: tuple[Piece, ...]
    own: frozenset[str]
    aliases: Mapping[str, str]
    dropped: tuple[re.Pattern[str], ...]

    @cached_property
    def by_ours(self) -> dict[str, list[Piece]]:
        """The pieces of each parameter."""
        return _grouped(self.pieces, "ours")

    @cached_property
    def by_theirs(self) -> dict[str, list[Piece]]:
        """The pieces of each tensor of the folder."""
        return _grouped(self.pieces, "theirs")

    def is_dropped(self, theirs: str) -> bool:
        """Whether a tensor of the folder carries nothing."""
        return any(pattern.fullmatch(theirs) for pattern in self.dropped)


def lay_out(
    rules: Sequence[Rule | Drop | Own],
    shapes: Mapping[str, Shape],
    shared: Mapping[str, str],
) -> Layout:
    """Apply ``rules`` to the parameters of one model.

    Args:
        rules: of the family.
        shapes: of each parameter and buffer of the whole model, by name.
        shared: second names of tied parameters, each with the first one (`Model.shared_parameters`).

    Raises:
        KeyError: if a parameter is named by no rule.
        ValueError: if several name it.
    """
    patterns = [
        (_pattern(pattern), pattern, rule)
        for rule in rules
        if isinstance(rule, Rule)
        for pattern in rule.patterns()
    ]
    own_patterns = [_pattern(rule.ours) for rule in rules if isinstance(rule, Own)]
    own = {name for name in shapes for pattern in own_patterns if pattern.fullmatch(name)}

    def pieces_of(name: str, known: Mapping[str, Shape]) -> list[Piece]:
        hits = [(m, p, rule) for regex, p, rule in patterns if (m := regex.fullmatch(name))]
        if not hits:
            raise KeyError(f"no rule names the parameter {name}")
        if len(hits) > 1:
            raise ValueError(f"{len(hits)} rules name the parameter {name}")
        match, pattern, rule = hits[0]
        return list(rule.pieces(pattern, match.groupdict().get("layer", ""), known))

    pieces = [piece for name in shapes if name not in own for piece in pieces_of(name, shapes)]
    first_names = {piece.ours: piece.theirs for piece in pieces}
    aliases = {
        pieces_of(second, {second: shapes[first]})[0].theirs: first_names[first]
        for second, first in shared.items()
    }
    dropped = tuple(_pattern(rule.theirs) for rule in rules if isinstance(rule, Drop))
    return Layout(tuple(pieces), frozenset(own), aliases, dropped)


def _grouped(pieces: Sequence[Piece], attribute: str) -> dict[str, list[Piece]]:
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        name = piece.ours if attribute == "ours" else piece.theirs
        groups.setdefault(name, []).append(piece)
    return groups


def _fill(pattern: str, layer: str) -> str:
    return pattern.replace("{layer}", layer)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\{layer\}", r"(?P<layer>\d+)"))
