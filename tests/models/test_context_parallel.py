"""Which tokens a context-parallel rank gets, against Megatron's own arithmetic."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

from rlmath.models.context_parallel import split_pack


def bounds_of(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()


def test_two_ranks_get_the_outer_and_the_inner_chunks_of_every_segment():
    split = split_pack(bounds_of(8, 3), context=2)
    assert split.source_CN.tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    assert split.cu_seqlens_S1.tolist() == [0, 8, 12] and split.cu_seqlens_S1.dtype == torch.int32
    assert split.max_seqlen == 8


def test_one_rank_gets_the_pack_with_segments_of_even_length():
    assert split_pack(bounds_of(2, 3), context=1).source_CN.tolist() == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("context", [2, 3, 4])
@pytest.mark.parametrize("multiple", [1, 2])
def test_every_token_is_one_ranks_and_all_have_the_same_number(context: int, multiple: int):
    cu_seqlens = bounds_of(1, 30, 7, 16, 2 * context * multiple)
    split = split_pack(cu_seqlens, context, multiple)
    total = int(cu_seqlens[-1])
    real = split.source_CN[split.source_CN < total]
    assert sorted(real.tolist()) == list(range(total))
    assert split.source_CN.numel() == split.cu_seqlens_S1[-1]
    assert all(
        length % (2 * context * multiple) == 0 for length in split.cu_seqlens_S1.diff().tolist()
    )
    assert split.source_CN.shape[1] % multiple == 0


@pytest.mark.parametrize("context", [2, 4])
def test_positions_are_those_that_megatron_rotates_by(context: int):
    lengths = [4 * context, 2 * context, 6 * context]
    split = split_pack(bounds_of(*lengths), context)
    positions = torch.cat([torch.arange(length) for length in lengths])
    for rank in range(context):
        rotated_by = [
            _get_thd_freqs_on_this_cp_rank(
                rank, context, torch.empty(n // context), torch.arange(n)
            )
            for n in lengths
        ]
        assert split.share(positions, rank).tolist() == torch.cat(rotated_by).tolist()


def test_shares_join_to_the_pack_again():
    cu_seqlens = bounds_of(5, 1, 12)
    split = split_pack(cu_seqlens, context=3)
    values = torch.arange(1.0, 19.0)
    shares = torch.stack([split.share(values, rank) for rank in range(3)])
    assert shares.sum() == values.sum()
    assert torch.equal(split.join(shares, 18), values)
