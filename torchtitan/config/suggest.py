"""Answers to a wrong name: what the user may have meant, or what there is."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, options: Iterable[str], *, kind: str) -> str:
    """A remedy for the unknown ``name``: the nearest of ``options``, or the list of them.

    Args:
        name: what the user wrote.
        options: the names that exist.
        kind: plural noun for the options ("recipes").
    """
    known = sorted(set(options))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(near)}?"
    if not known:
        return f"there are no {kind}"
    shown = ", ".join(known[:20]) + (f", ... ({len(known)} in all)" if len(known) > 20 else "")
    return f"the {kind} are: {shown}"


def nearest_paths(path: str, options: Iterable[str], count: int = 3) -> list[str]:
    """The dotted paths nearest to ``path``: the same or a similar last part in any section, or similar as a whole."""
    known = list(options)
    last = path.rpartition(".")[2]
    lasts = difflib.get_close_matches(last, {k.rpartition(".")[2] for k in known}, cutoff=0.7)
    near = [k for k in known if last in lasts and k.rpartition(".")[2] == last]
    near = near or [k for k in known if k.rpartition(".")[2] in lasts]
    near = near or difflib.get_close_matches(path, known, cutoff=0.7)
    return sorted(near, key=lambda k: -difflib.SequenceMatcher(None, path, k).ratio())[:count]
