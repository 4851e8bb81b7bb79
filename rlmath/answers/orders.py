"""Points and lists with "and its permutations", "in any order" or "in increasing order"."""

from __future__ import annotations

import re
from itertools import permutations

_MARK = re.compile(
    r",? ?\(?(?:(?:and|or|up to|in|with|including|together with|plus) )*"
    r"(?:(?:all|any|either|its|their|the|of|other|every) )*"
    r"(?P<cyclic>cyclic )?(?:permutations?|orders?|orderings?|reorderings?|rearrangements?)"
    r"(?: (?:of (?:it|them|these|those|this|the (?:coordinates|variables|numbers|entries))|thereof))?\)?\.?$"
)
_BEFORE = re.compile(r"^(?:all |any |the )*(?P<cyclic>cyclic )?(?:permutations?|orderings?) of ?")
_NAMES = re.compile(r"^\([a-z](?:_\{?[0-9]\}?)?(?:, ?[a-z](?:_\{?[0-9]\}?)?)*\) ?(?:=|\\in) ?")
_POINT = re.compile(r"\(([^()]{1,80})\)")
_MOST_POINTS = 6
_MOST_COORDINATES = 4


_STATED = re.compile(
    r",? ?\(?(?:(?:listed|written|sorted|arranged|given) )?in (?:strictly )?"
    r"(?:increasing|decreasing|ascending|descending) order\)?\.?$"
)
_ANY = re.compile(r"\b(?:any|either|every|other|all|permutations?)\b")


def says_order(key: str) -> bool:
    return "permut" in key or "order" in key or "arrangement" in key


def in_stated_order(key: str) -> str | None:
    """The list of a text such as `1, 2, 3 in increasing order` as a point, whose order counts; None for others."""
    if len(key) > 300 or (mark := _STATED.search(key)) is None:
        return None
    items = key[: mark.start()].strip(" ()[]{}\\")
    return f"({items})"


def in_every_order(key: str) -> str | None:
    """The points that a text with "and its permutations" stands for, `(1, 2), (2, 1)`, or the set of its numbers;
    None for other texts."""
    if len(key) > 300:
        return None
    mark, before = _MARK.search(key), _BEFORE.match(key)
    found = before or mark
    if found is None:
        return None
    points = key[before.end() :] if before else key[: found.start()]
    points = _NAMES.sub("", points)
    tuples = [[item.strip() for item in match[1].split(",")] for match in _POINT.finditer(points)]
    rest = _POINT.sub("", points).replace("and", "")
    if not tuples:
        # What has no order is no point.
        return f"\\{{{points}\\}}" if mark is not None and points and _ANY.search(mark[0]) else None
    if rest.strip(" ,;{}\\") or len(tuples) > _MOST_POINTS or any(len(t) > _MOST_COORDINATES for t in tuples):
        return None
    every: dict[tuple[str, ...], None] = {}
    for items in tuples:
        turned = [(*items[at:], *items[:at]) for at in range(len(items))]
        every |= dict.fromkeys(turned if found["cyclic"] else permutations(items))
    return ", ".join(f"({','.join(items)})" for items in every)
