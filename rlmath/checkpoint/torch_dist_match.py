"""Which tensors of a torch_dist folder a model is made of, and where in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmath.checkpoint.hf_tables import from_canonical
from rlmath.checkpoint.torch_dist_files import StateReader
from rlmath.checkpoint.torch_dist_names import Stored, stored_tensors
from rlmath.model_shape import ModelShape

_NOT_THE_MODEL = ("optimizer.", "chained_", "random.", "rng_state", "opt_param_scheduler", "rerun_state")
"""How the names begin of what a training run keeps beside the model."""
_COMPUTED = "rotary_pos_emb.inv_freq"
"""Follows from config.json; older checkpoints have it."""
_TOLD = 8
MOST_PADDING = 2**14
"""More rows than that beyond the vocabulary are no padding: it is filled up to a multiple of 128 times the tensor
parallel size."""

Region = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Key, offset and size of a rectangle in a checkpoint."""


@dataclass(frozen=True)
class Found:
    """Where a checkpoint has a tensor: rectangles that together are its rows."""

    stored: Stored
    regions: tuple[Region, ...]

    def tensors(self, reader: StateReader, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
        """The Hugging Face tensors."""
        placed = self.stored.placed
        size = self.stored.shape
        read = [reader.read(*region).reshape(-1, *size[1:]) for region in self.regions]
        rows = read[0] if len(read) == 1 else torch.cat(read)
        canonical = rows if placed.rule.form == "vocab" else rows.reshape(self.stored.canonical)
        del read, rows
        yield from zip(placed.hf_names, from_canonical(placed.rule, canonical, shape), strict=True)


def find_all(reader: StateReader, shape: ModelShape) -> list[Found]:
    """Every tensor's place; ValueError that lists what is missing, of another shape, or unknown."""
    found, missing, wrong, known = [], [], [], set()
    for stored in stored_tensors(shape):
        known |= _all_keys(stored)
        place = _find(reader, stored)
        if isinstance(place, Found):
            found.append(place)
        elif place is None:
            missing.append(f"{stored.keys[-1]} {list(stored.lead)}".removesuffix(" []"))
        else:
            wrong.append(place)
    unknown = [key for key in reader.tensors if key not in known and not key.startswith(_NOT_THE_MODEL)]
    problems = [
        *listed("tensors are missing", missing),
        *listed(
            f"tensors are unknown to {shape.architecture}", [x for x in unknown if not x.endswith(_COMPUTED)]
        ),
        *listed("tensors have another shape", list(dict.fromkeys(wrong))),
    ]
    raise_listed(f"{reader.folder} is not a checkpoint of the model that config.json describes", problems)
    return found


def _halves(key: str) -> tuple[str, str]:
    """Newer Megatron can keep gate and up apart (`singleton_local_shards`)."""
    return f"{key}_w", f"{key}_v"


def _all_keys(stored: Stored) -> set[str]:
    keys = {*stored.keys, *stored.numbered}
    return keys | {half for key in keys for half in _halves(key)}


def _find(reader: StateReader, stored: Stored) -> Found | str | None:
    """Where a tensor is; what is wrong with it; or None."""
    for keys, lead, lead_shape in (
        (stored.keys, stored.lead, stored.lead_shape),
        (stored.numbered, stored.lead[1:], stored.lead_shape[1:]),
    ):
        for key in reversed(keys):
            for names in ((key,), _halves(key)):
                if all(name in reader.tensors for name in names):
                    return _placed_in(reader, stored, names, lead, lead_shape)
    return None


def _placed_in(
    reader: StateReader,
    stored: Stored,
    names: tuple[str, ...],
    lead: tuple[int, ...],
    lead_shape: tuple[int, ...],
) -> Found | str:
    wanted = (*lead_shape, stored.shape[0] // len(names), *stored.shape[1:])
    for name in names:
        size = tuple(reader.tensors[name].size)
        is_vocab = stored.placed.rule.form == "vocab"
        filled_up = is_vocab and 0 <= size[0] - wanted[0] <= MOST_PADDING and size[1:] == wanted[1:]
        if size != wanted and not filled_up:
            return f"{name} has shape {size}, config.json makes it {wanted}"
    offset = (*lead, *(0 for _ in stored.shape))
    region = ((1,) * len(lead)) + wanted[len(lead) :]
    return Found(stored, tuple((name, offset, region) for name in names))


def listed(what: str, names: list[str]) -> list[str]:
    """["2 tensors are missing: a; b"], [] where there are none."""
    if not names:
        return []
    more = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
    return [f"{len(names)} {what}: {'; '.join(names[:_TOLD])}{more}"]


def raise_listed(heading: str, problems: list[str]) -> None:
    """A ValueError of all problems, if there are any."""
    if problems:
        raise ValueError("\n".join([f"{heading}:", *(f"  - {problem}" for problem in problems)]))
