"""Which samples share a row: of all of them best fit, longest first; of a few that wait, those that fill it best."""

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Packs of samples, by their numbers, of at most ``seq_len`` tokens each.

    Best-fit decreasing (Johnson 1973; for language models Ding et al., arXiv:2404.10830): the longest sample
    first, each into the pack in which it leaves the least room. At most 11/9 of the smallest number of
    packs, in ``n log n``. Packs come in the order of their first sample, and so do the samples in a pack.

    Args:
        lengths: tokens of each sample, at most ``seq_len``.
        seq_len: tokens of a row.
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
    return sorted(map(sorted, packs))


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
