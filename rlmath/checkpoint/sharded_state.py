"""The state of a rank as parts of global tensors, which can be loaded in any other layout.

It is the parameters as Megatron shards them, the optimizer's state over the same tensors, and the
random states of the rank.

The distributed optimizer gives every data-parallel rank a range of each flattened parameter. A
range of a flattened matrix is at most three rectangles of it (the rest of a row, whole rows, the
start of a row), and rectangles are what distributed checkpoints are made of: nothing is gathered to
save, and any rank can load any other rectangle.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from torch import Tensor

from rlmath.checkpoint.hf.weight_map import Placed
from rlmath.checkpoint.hf.weights import local_parameter
from rlmath.distributed.device import Device

OPTIMIZER_PREFIX = "optimizer.state"
ALWAYS_FLOAT32 = "always_float32"
"""Attribute of a float32 parameter of a bfloat16 model: the optimizer keeps no copy of it."""
POLICY = ""
"""The name of the model whose keys begin with nothing."""
MASTER = "param"
"""Name of the float32 parameters that an optimizer keeps beside a bfloat16 model."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of a global tensor, most often all of a parameter.

    A gated MLP's first matrix has two pieces, gate and up."""

    parameter: Tensor
    start: int
    """Its first element in the flattened parameter."""
    sharded: ShardedTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sharded.local_shape)

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class SavedModel:
    """A model that checkpoints hold, beside others."""

    name: str
    """POLICY, or the word with which every key of its tensors begins.

    "critic" makes "critic.decoder.layers...."."""
    chunks: Sequence[Any]
    """This rank's model chunks, unwrapped."""
    optimizer: Any | None
    """The model's optimizer; None if it is not trained."""
    adapters: Sequence[Placed] = ()
    """The adapters of all layers that are trained in place of the model.

    With them checkpoints hold the adapters alone."""

    @property
    def prefix(self) -> str:
        return f"{self.name}." if self.name else ""


def model_pieces(model: SavedModel) -> tuple[list[Piece], list[ShardedObject]]:
    """This rank's pieces of the model, and its objects (Transformer Engine's extra states)."""
    if model.adapters:
        return list(_adapter_pieces(model)), []
    pieces = []
    objects = []
    for chunk in model.chunks:
        for sharded in chunk.sharded_state_dict().values():
            if isinstance(sharded, ShardedObject):
                objects.append(replace(sharded, key=model.prefix + sharded.key))
                continue
            parts = sharded.build() if isinstance(sharded, ShardedTensorFactory) else [sharded]
            parts = list(parts.values()) if isinstance(parts, dict) else parts
            pieces += [
                _piece(sharded.data, replace(part, key=model.prefix + part.key)) for part in parts
            ]
    return pieces, objects


def _adapter_pieces(model: SavedModel) -> Iterator[Piece]:
    """The pieces of adapters in their canonical form.

    Each has a key of its own, by the layer's number in the model."""
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    tensor_ranks = parallel_state.get_tensor_model_parallel_world_size()
    copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    for placed in model.adapters:
        parameter = local_parameter(model.chunks, placed)
        axis = placed.rule.split_axis
        if parameter is None:
            continue
        shards = () if axis is None else ((axis, tensor_rank, tensor_ranks),)
        key = model.prefix + placed.adapter_key
        replica = (0, tensor_rank if axis is None else 0, copy)
        yield _piece(
            parameter,
            ShardedTensor.from_rank_offsets(key, parameter.data, *shards, replica_id=replica),
        )


def _piece(parameter: Tensor, part: ShardedTensor) -> Piece:
    inside = part.data.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
    assert inside and part.data.is_contiguous(), (
        f"{part.key} is not a contiguous part of its parameter"
    )
    return Piece(parameter, part.data.storage_offset() - parameter.storage_offset(), part)


def rectangles(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Rectangles (offset, size) that make up elements `start` to `stop` of a flattened tensor.

    >>> list(rectangles((4, 10), 7, 32))
    [((0, 7), (1, 3)), ((1, 0), (2, 10)), ((3, 0), (1, 2))]
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row_size = math.prod(shape[1:])
    first_row = start // row_size
    last_row = stop // row_size
    if start == first_row * row_size and stop == last_row * row_size:
        yield (first_row, *(0 for _ in shape[1:])), (last_row - first_row, *shape[1:])
    elif first_row == last_row or stop <= (first_row + 1) * row_size:
        for offset, size in rectangles(
            shape[1:], start - first_row * row_size, stop - first_row * row_size
        ):
            yield (first_row, *offset), (1, *size)
    else:
        next_row = -(-start // row_size) * row_size
        for part_start, part_stop in (
            (start, next_row),
            (next_row, last_row * row_size),
            (last_row * row_size, stop),
        ):
            yield from rectangles(shape, part_start, part_stop)


@dataclass(frozen=True)
class Held:
    """This rank's optimizer state for elements `start` to `stop` of a flattened parameter."""

    parameter: Tensor
    start: int
    stop: int
    stepped: Tensor
    """The tensor that the optimizer steps: the elements themselves, or float32 copies of them."""
    state: dict[str, Any]
    """The optimizer's own state: Adam's moments and count of steps."""
    is_share: bool
    """Whether other data-parallel ranks hold other elements; else all hold the same."""

    def tensors(self) -> dict[str, Tensor]:
        """The state's flat tensors by name, with one number for each element."""
        tensors = {
            name: tensor.view(-1)
            for name, tensor in self.state.items()
            if isinstance(tensor, Tensor)
            and tensor.numel() == self.stepped.numel()
            and name != "step"
        }
        if self.stepped.untyped_storage().data_ptr() != self.parameter.untyped_storage().data_ptr():
            tensors[MASTER] = self.stepped.detach().view(-1)
        return tensors


def held_by(optimizer: Any) -> Iterator[Held]:
    """The parts of a Megatron optimizer's state that this rank holds."""
    for part in _stepping(optimizer):
        groups = part.optimizer.param_groups
        state = part.optimizer.state
        if hasattr(part, "model_param_group_index_map"):
            # Not in the order of that map: a group steps float32 parameters before the copies of
            # the others.
            for group, fp32_parameters, float16_parameters in zip(
                groups, part.model_fp32_groups, part.model_float16_groups, strict=True
            ):
                for parameter, stepped in zip(
                    [*fp32_parameters, *float16_parameters], group["params"], strict=True
                ):
                    parameter_range = part._get_model_param_range_map(parameter)["param"]
                    yield Held(
                        parameter,
                        parameter_range.start,
                        parameter_range.end,
                        stepped=stepped,
                        state=state[stepped],
                        is_share=True,
                    )
            continue
        models = [parameter for group in getattr(part, "float16_groups", []) for parameter in group]
        mains = [
            parameter
            for group in getattr(part, "fp32_from_float16_groups", [])
            for parameter in group
        ]
        copied = {id(main): model for model, main in zip(models, mains, strict=True)}
        for stepped in (parameter for group in groups for parameter in group["params"]):
            parameter = copied.get(id(stepped), stepped)
            yield Held(
                parameter, 0, stepped.numel(), stepped=stepped, state=state[stepped], is_share=False
            )


def _stepping(optimizer: Any) -> list[Any]:
    """The optimizers of a chained one, but for those without parameters on this rank."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if part.optimizer is not None]


def optimizer_pieces(
    optimizer: Any, pieces: Sequence[Piece], names: Sequence[str]
) -> list[ShardedTensor]:
    """The named tensors of the optimizer's state as rectangles of global tensors.

    These are called "optimizer.state.NAME.KEY", where KEY is that of the parameter. Their data are
    views: loading into them loads the state."""
    pieces_of_parameter: dict[int, list[Piece]] = {}
    for piece in pieces:
        pieces_of_parameter.setdefault(id(piece.parameter), []).append(piece)
    sharded_tensors = []
    for parameter_state in held_by(optimizer):
        tensors = parameter_state.tensors()
        for piece in pieces_of_parameter[id(parameter_state.parameter)]:
            start = max(piece.start, parameter_state.start)
            stop = min(piece.stop, parameter_state.stop)
            for offset, size in rectangles(piece.shape, start - piece.start, stop - piece.start):
                position = piece.start + _flat(offset, piece.shape) - parameter_state.start
                for name in (name for name in names if name in tensors):
                    elements = tensors[name][position : position + math.prod(size)]
                    sharded_tensors.append(
                        _placed(
                            piece,
                            offset,
                            size,
                            name=name,
                            data=elements,
                            is_share=parameter_state.is_share,
                        )
                    )
    return sharded_tensors


def _flat(offset: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Number of the element at `offset` in a flattened tensor of this shape.

    >>> _flat((1, 2, 3), (2, 3, 4))
    23
    """
    return sum(index * math.prod(shape[axis + 1 :]) for axis, index in enumerate(offset))


def _placed(
    piece: Piece,
    offset: tuple[int, ...],
    size: tuple[int, ...],
    name: str,
    data: Tensor,
    is_share: bool,
) -> ShardedTensor:
    """A rectangle of a piece's optimizer state as a part of the state's global tensor."""
    sharded = piece.sharded
    stacked = len(sharded.global_shape) - len(size)
    size = (1,) * stacked + size
    corner = tuple(
        corner_of_piece + corner_in_piece
        for corner_of_piece, corner_in_piece in zip(
            sharded.global_offset, (0,) * stacked + offset, strict=True
        )
    )
    replica = sharded.replica_id
    assert isinstance(replica, tuple)
    return ShardedTensor(
        key=f"{OPTIMIZER_PREFIX}.{name}.{sharded.key}",
        data=data.view(size),
        dtype=data.dtype,
        local_shape=size,
        global_shape=sharded.global_shape,
        global_offset=corner,
        axis_fragmentations=None,
        # The last number counts data-parallel ranks, which hold elements of their own here.
        replica_id=(*replica[:-1], 0) if is_share else replica,
        allow_shape_mismatch=sharded.allow_shape_mismatch,
    )


@torch.no_grad()
def make_room(optimizer: Any, names: Sequence[str], steps: int) -> None:
    """Create the state that the optimizer would have after so many steps, as zeros to load into.

    Further state, of steps that a rollback discards, becomes zero, which has the same effect in a
    first step."""
    for parameter_state in held_by(optimizer):
        for name, tensor in parameter_state.state.items():
            if name not in names and isinstance(tensor, Tensor):
                tensor.zero_()
        for name in names:
            if name != MASTER and name not in parameter_state.state:
                parameter_state.state[name] = torch.zeros_like(parameter_state.stepped)
    counts = any(name != MASTER for name in names)  # plain SGD does not
    for part in _stepping(optimizer):
        for group in part.optimizer.param_groups:
            if "step" in group:
                group["step"] = steps
    for part in _stepping(optimizer) if counts else []:
        if type(part.optimizer).__module__.startswith("torch.optim"):
            for stepped in (
                parameter for group in part.optimizer.param_groups for parameter in group["params"]
            ):
                part.optimizer.state[stepped]["step"] = torch.tensor(
                    float(steps), device=stepped.device
                )
        else:  # fused optimizers count once for a group
            for group in part.optimizer.param_groups:
                group["step"] = steps


# ---------------------------------------------------------------- random states

_MEGATRON = "megatron."


def random_states(device: Device) -> dict[str, Tensor]:
    """The random states by generator, as tensors of one dimension on the CPU."""
    version, words, gauss = random.getstate()
    assert version == 3, f"Python's generator has a state of version {version}"
    name, keys, position, has_gauss, cached = numpy.random.get_state()
    assert name == "MT19937", name
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor(
            [float("nan") if gauss is None else gauss], dtype=torch.float64
        ),
        "numpy": torch.from_numpy(keys.astype("int64")),
        "numpy_position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if device.kind == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device.torch_device)
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return states | {_MEGATRON + key: state for key, state in tracked.items()}


def random_rows(states: Mapping[str, Tensor]) -> list[ShardedTensor]:
    """Each rank's random states, a row of one table for each generator."""
    place = (0, dist.get_rank(), dist.get_world_size())
    return [
        ShardedTensor.from_rank_offsets(f"random.{name}", state.unsqueeze(0), place)
        for name, state in states.items()
    ]


def restore_random_states(states: Mapping[str, Tensor], device: Device) -> None:
    """The inverse of `random_states`."""
    torch.set_rng_state(states["torch"])
    gauss = states["python_gauss"]
    words = tuple(int(word) for word in states["python"])
    random.setstate((3, words, None if gauss.isnan().item() else float(gauss)))
    position, has_gauss = states["numpy_position"].tolist()
    keys = states["numpy"].numpy().astype("uint32")
    numpy.random.set_state(("MT19937", keys, position, has_gauss, float(states["numpy_gauss"])))
    if device.kind == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device.torch_device)
    tracked = {
        key.removeprefix(_MEGATRON): state
        for key, state in states.items()
        if key.startswith(_MEGATRON)
    }
    tensor_parallel.get_cuda_rng_tracker().set_states(tracked)
