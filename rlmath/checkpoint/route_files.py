"""The routes of a checkpoint's unfinished completions, or of those that a captured step learned from.

A safetensors file of each rank that has some:

routes   zlib's stream of all numbers, one slice behind the other
header   {"slices": [[number, tokens], ...], "token": [layers, experts of a token]}
"""

# Shape legend: N tokens of one slice, L layers of the model, K experts of a token in a layer.

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from rlmath.checkpoint.unfinished_groups import read_count
from rlmath.config.files import parse_json, read_regular, require_regular
from rlmath.config.model_shape import ModelShape
from rlmath.data.routes import expert_dtype

FAST = 1
"""zlib's level: numbers of experts have little to be found by looking longer."""


def write_routes(routes: Mapping[int, Tensor]) -> bytes:
    """The file's contents: the routes of slices, each [N, L, K], by their number."""
    stream = zlib.compressobj(FAST)
    content = [stream.compress(routes_NLK.numpy().tobytes()) for routes_NLK in routes.values()]
    content.append(stream.flush())
    header = {
        "slices": [[number, len(routes_NLK)] for number, routes_NLK in routes.items()],
        "token": list(next(iter(routes.values())).shape[1:]),
    }
    return save(
        {
            "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
            "routes": np.frombuffer(b"".join(content), np.uint8),
        }
    )


def read_routes(path: Path, shape: ModelShape) -> dict[int, Tensor]:
    """The routes of slices by their number, for a model of this shape.

    ValueError if the file is none of ours, OSError if it cannot be read."""
    file_content = read_regular(path, require_regular(path))
    try:
        tensors = load(file_content)
        header = parse_json(tensors["header"].tobytes().decode())
        token = [shape.num_layers, shape.experts_per_token]
        if header["token"] != token:
            raise ValueError(f"tokens have {header['token']} experts; needed: {token}")
        dtype = expert_dtype(shape.num_experts)
        slices = [(read_count(number), read_count(tokens)) for number, tokens in header["slices"]]
        size = sum(tokens for _, tokens in slices) * token[0] * token[1] * dtype.itemsize
        stream = zlib.decompressobj()
        content = bytearray(stream.decompress(tensors["routes"].tobytes(), size + 1))
        if len(content) != size or not stream.eof:
            raise ValueError(f"there are not {size:,} bytes of routes")
        routes_TLK = torch.frombuffer(content, dtype=dtype).view(-1, token[0], token[1])
        if not 0 <= int(routes_TLK.min()) <= int(routes_TLK.max()) < shape.num_experts:
            raise ValueError(f"experts are not below {shape.num_experts}")
        parts = routes_TLK.split([tokens for _, tokens in slices])
        numbered = zip(slices, parts, strict=True)
        return {number: routes_NLK.clone() for (number, _), routes_NLK in numbered}
    except (
        SafetensorError,
        LookupError,
        OverflowError,
        TypeError,
        ValueError,
        zlib.error,
    ) as error:
        raise ValueError(f"{path.name} is damaged ({type(error).__name__}: {error})") from error
