"""What context-parallel ranks do in the tests.

Only Transformer Engine's attention works over them, and it needs GPUs; on CPU an attention over
gathered tokens stands in for it, so that all the rest can be tested."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from rlmath.algorithms.types import Sample
from tests.distributed import policy_cases
from tests.distributed.policy_cases import Case


@contextlib.contextmanager
def gathered_attention() -> Iterator[None]:
    """Every rank gathers the filled-up pack, attends over all of it and keeps its own tokens."""
    from megatron.core import parallel_state
    from torch.distributed.nn.functional import all_reduce

    from rlmath.models import attention
    from rlmath.models.context_parallel import split_pack

    attend = attention.attend

    def attend_gathered(*qkv: Tensor, packing: Any, window: Any) -> Tensor:
        """Queries and keys are rotated by the angles of this rank's tokens."""
        group = parallel_state.get_context_parallel_group()
        source_CN = split_pack(packing.cu_seqlens_q, group.size()).source_CN
        mine_N = source_CN[group.rank()]
        whole = [
            tensor.new_zeros(source_CN.numel(), *tensor.shape[1:]).index_copy(0, mine_N, tensor)
            for tensor in qkv
        ]
        gathered = [all_reduce(tensor, group=group) for tensor in whole]
        return attend(*gathered, packing=packing, window=window)[mine_N]

    with mock.patch.object(attention, "attend", attend_gathered):
        yield


def logprobs(folder: Path, case: Case, samples: list[Sample]) -> dict[int, list[float]]:
    with gathered_attention():
        return policy_cases.logprobs(folder, case, samples)


def gradients(folder: Path, case: Case, samples: list[Sample]) -> dict[str, Tensor] | None:
    with gathered_attention():
        return policy_cases.gradients(folder, case, samples)


def update(folder: Path, case: Case, samples: list[Sample]) -> tuple[dict[str, Tensor], Any] | None:
    with gathered_attention():
        return policy_cases.update(folder, case, samples)
