"""Which samples share a row: of all of them, so that there are few rows; of a few that wait, those that fill it best."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import islice

_IN_VIEW, _LOOKED_AT = 32, 256
"""Samples that `longest_first` chooses from, and among how many it looks for those that still fit."""


def pack_all(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Packs of samples, by their numbers, of at most ``seq_len`` tokens each; as few as the better of two ways needs.

    `best_fit` is the better one where many samples are about as long as a row, `longest_first` where they are short.
    Packs come in the order of their first sample, and so do the samples in a pack.

    Args:
        lengths: tokens of each sample, 1 to ``seq_len``.
        seq_len: tokens of a row.
    """
    packs = best_fit(lengths, seq_len)
    if len(packs) * seq_len - sum(lengths) >= seq_len:  # else there can be no fewer
        packs = min(packs, longest_first(lengths, seq_len), key=len)
    return sorted(map(sorted, packs))


def best_fit(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Best-fit decreasing (Johnson 1973; for language models Ding et al., arXiv:2404.10830).

    The longest sample first, each into the pack in which it leaves the least room. At most 11/9 of the smallest number
    of packs, in ``n log n``. Arguments and result are those of `pack_all`, in another order.
    """
    packs: list[list[int]] = []
    open_by_room: list[list[int]] = [[] for _ in range(seq_len + 1)]
    rooms: list[int] = []  # that some open pack has, rising
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(rooms, lengths[sample])
        if place < len(rooms):
            room = rooms[place]
            number = open_by_room[room].pop()
            if not open_by_room[room]:
                rooms.pop(place)
        else:
            room, number = seq_len, len(packs)
            packs.append([])
        packs[number].append(sample)
        left = room - lengths[sample]
        if left:
            if not open_by_room[left]:
                insort(rooms, left)
            open_by_room[left].append(number)
    return packs


def longest_first(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Each pack begins with the longest sample left, and others fill it: the best subset of a few.

    Arguments and result are those of `pack_all`, in another order.
    """
    by_length = sorted(range(len(lengths)), key=lambda i: (lengths[i], -i))
    # Mixed, whatever the data's order.
    others = iter(sorted(by_length, key=lambda i: i * 0x9E3779B1 & 0xFFFFFFFF))
    view: list[int] = []
    packs: list[list[int]] = []
    used = bytearray(len(lengths))
    while by_length:
        if used[number := by_length.pop()]:
            continue
        pack, room = [number], seq_len - lengths[number]
        used[number] = True
        while room:
            view = [i for i in view if not used[i]]
            view += islice((i for i in others if not used[i]), _LOOKED_AT - len(view))
            fitting = list(islice((i for i in view if lengths[i] <= room), _IN_VIEW))
            tokens = [lengths[i] for i in fitting]
            plenty = len(fitting) == _IN_VIEW and sum(tokens) <= 2 * room
            chosen = [fitting[i] for i in ([0] if plenty else best_subset(tokens, room))]
            pack += chosen
            for i in chosen:
                used[i] = True
            room = room - lengths[chosen[0]] if plenty else 0
        packs.append(pack)
    return packs


def best_subset(lengths: Sequence[int], space: int) -> list[int]:
    """Numbers of the samples, rising, that fill ``space`` tokens best when put together.

    Exact: the sums that can be reached are the bits of one integer for each sample that is looked at, so ``n`` samples
    cost ``n`` shifts of a number of ``space`` bits. Of several best subsets it is the one that takes the earlier samples.

    Args:
        lengths: tokens of each sample, at least 1.
        space: tokens that they may have together.
    """
    within = (1 << (space + 1)) - 1
    reached = [1]  # by the samples before each: bit s is set if some of them have s tokens together
    for length in lengths:
        reached.append((reached[-1] | reached[-1] << length) & within)
    rest = reached[-1].bit_length() - 1
    chosen: list[int] = []
    for number in reversed(range(len(lengths))):
        if not reached[number] >> rest & 1:
            chosen.append(number)
            rest -= lengths[number]
    return chosen[::-1]
