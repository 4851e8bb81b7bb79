import pytest
import torch
import torch.distributed as dist

from tests.selection import keeping
from tools import bench_logprobs

TOKENS = 96
LOGITS_BYTES = TOKENS * bench_logprobs.VOCABULARY * 4


@pytest.mark.parametrize("gradients", keeping(bench_logprobs.GRADIENTS, "both"))
def test_ours_needs_a_small_part_of_the_plain_ways_memory(gradients: str) -> None:
    mine, theirs = (
        bench_logprobs.in_own_process(way, gradients, "cpu", TOKENS, 1) for way in ("chunks", "plain")
    )
    assert theirs["extra_bytes"] > 2.5 * LOGITS_BYTES
    assert 0 < mine["extra_bytes"] < 0.15 * theirs["extra_bytes"]
    assert mine["seconds"] == pytest.approx(mine["forward_seconds"] + mine["backward_seconds"])


def test_both_ways_compute_the_same() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        logits_TV, token_ids_T = bench_logprobs.make_inputs("cpu", 6, 500)
        mine, theirs = (
            bench_logprobs.WAYS[way](logits_TV, token_ids_T, "both") for way in ("chunks", "plain")
        )
    finally:
        dist.destroy_process_group()
    for found, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found[1:], wanted[:-1], atol=2e-6, rtol=2e-6)
