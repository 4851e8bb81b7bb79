"""Several files of prompts as one: how often each file's prompts come, and names that stay unique."""

# Shape legend: N prompts kept in all, K places of one epoch.

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from rlmath.types import Prompt


@dataclass(frozen=True)
class Share:
    """One file of a mixture.

    >>> Share(n_prompts=10, weight=0.25).places
    3
    """

    n_prompts: int
    weight: float
    """How often its prompts come in one epoch: 1 once, 0.5 half of them, 2 twice."""

    @property
    def places(self) -> int:
        """Prompts that it gives to every epoch: weight x prompts, rounded up from a half on, at least 1."""
        return max(1, math.floor(self.weight * self.n_prompts + 0.5))


def shares_of(counts: Sequence[int], weights: Sequence[float]) -> tuple[Share, ...]:
    """One for each file; without weights all prompts come once."""
    return tuple(Share(*one) for one in zip(counts, weights or [1.0] * len(counts), strict=True))


def permutation(n: int, name: str) -> tuple[int, ...]:
    """0 .. n-1 in the order of the SHA-256 of "name:index": whatever the libraries' versions."""

    def key(index: int) -> bytes:
        return hashlib.sha256(f"{name}:{index}".encode()).digest()

    return tuple(sorted(range(n), key=key))


@lru_cache(maxsize=2)
def epoch_order(shares: tuple[Share, ...], seed: int, epoch: int, shuffle: bool) -> tuple[int, ...]:
    """K prompt indices of an epoch, counted over all files one behind the other.

    Each file has an endless sequence of its prompts, permutation after permutation, and gives the next of them to each
    epoch: with weight 0.5 an epoch has one half, and the next epoch the other. Then all are shuffled. Without `shuffle`
    the sequence is the file over and over, and the files stand one behind the other.
    """
    indices: list[int] = []
    first = 0
    for number, share in enumerate(shares):
        places = range(epoch * share.places, (epoch + 1) * share.places)
        indices += (
            first + index for index in _in_turn(share.n_prompts, places, f"{seed}:file{number}", shuffle)
        )
        first += share.n_prompts
    if not shuffle:
        return tuple(indices)
    return tuple(indices[place] for place in permutation(len(indices), f"{seed}:{epoch}"))


def _in_turn(n: int, places: range, name: str, shuffle: bool) -> Iterator[int]:
    """The prompts at some places of a file's endless sequence."""
    for turn in range(places.start // n, (places.stop - 1) // n + 1):
        order = permutation(n, f"{name}:{turn}") if shuffle else range(n)
        yield from order[max(0, places.start - turn * n) : places.stop - turn * n]


def weighted_permutation(shares: Sequence[Share], name: str) -> list[int]:
    """All prompts, those of heavier files likelier to come early (Efraimidis and Spirakis 2006)."""
    keyed: list[tuple[float, int]] = []
    for share in shares:
        for index in range(len(keyed), len(keyed) + share.n_prompts):
            digest = hashlib.sha256(f"{name}:{index}".encode()).digest()
            uniform = (int.from_bytes(digest[:7], "big") + 1) / 2**56
            keyed.append((-math.log(uniform) / share.weight, index))
    return [index for _, index in sorted(keyed)]


def check_weights(paths: Sequence[str], weights: Sequence[float]) -> None:
    """ValueError where there is not one weight for each file, or a file comes twice."""
    if weights and len(weights) != len(paths):
        raise ValueError(
            f"data.train_weights has {len(weights)} numbers for {len(paths)} files (data.train_path, then "
            "data.more_train_paths); give one for each, or none"
        )
    places = [os.path.realpath(path) for path in paths]
    twice = [path for number, path in enumerate(paths) if places[number] in places[:number]]
    if twice:
        raise ValueError(
            f"data.more_train_paths: {twice[0]!r} is there twice; to have its prompts more often, use "
            "data.train_weights"
        )


def with_unique_names(files: Sequence[tuple[str, Sequence[Prompt]]]) -> list[Prompt]:
    """The prompts of all (path, prompts); a name that an earlier file has, too, gets its file's name before it."""
    used: set[str] = set()
    found: list[Prompt] = []
    for number, (path, prompts) in enumerate(files, start=1):
        own = {prompt.prompt_id for prompt in prompts}
        for prompt in prompts:
            name = prompt.prompt_id
            if name in used:
                name = f"{Path(path).stem}/{name}"
                if name in used or name in own:
                    name = f"{number}:{name}"
                while name in used or name in own:
                    name += "'"
            used.add(name)
            found.append(prompt if name == prompt.prompt_id else replace(prompt, prompt_id=name))
    return found
