from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from rlmath.algorithms.losses import Normalisation
from rlmath.algorithms.types import Sample
from rlmath.data.packing import MicroBatch, pack

TENSORS = [field.name for field in fields(MicroBatch) if field.name.endswith(("_T", "_S1", "_TLK"))]

ONE = Sample((7, 8), (9, 10, 11), (-0.5, -0.25, -1.0), advantage=1.5)
TWO = Sample((20,), (21, 22), (-2.0, -3.0), advantage=-0.5)


def test_two_samples_end_to_end():
    batch = pack([ONE, TWO], [1, 0], pad_to_multiple=1)
    assert batch.token_ids_T.tolist() == [20, 21, 22, 7, 8, 9, 10, 11]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert batch.cu_seqlens_S1.tolist() == [0, 3, 8]
    assert batch.loss_weights_T.tolist() == [0, 1, 1, 0, 0, 1, 1, 1]
    assert batch.loss_count == 5
    assert batch.advantages_T.tolist() == [0, -0.5, -0.5, 0, 0, 1.5, 1.5, 1.5]
    assert batch.behaviour_logprobs_T.tolist() == [0, -2.0, -3.0, 0, 0, -0.5, -0.25, -1.0]
    assert batch.completion_index_T.tolist() == [-1, 0, 1, -1, -1, 0, 1, 2]
    assert batch.segments_T.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert batch.n_segments == 2
    assert batch.max_seqlen == 5
    assert batch.sample_indices == (1, 0)


@pytest.mark.parametrize(
    ("normalisation", "weights", "count"),
    [
        (Normalisation("token"), [0, 0, 1, 1, 1, 0, 1, 1], 5),
        (Normalisation("sequence"), [0, 0, 1 / 3, 1 / 3, 1 / 3, 0, 0.5, 0.5], 2),
        (Normalisation("constant", 8), [0, 0, 0.125, 0.125, 0.125, 0, 0.125, 0.125], 2),
    ],
)
def test_weights_and_count_follow_the_normalisation(
    normalisation: Normalisation, weights: list[float], count: int
):
    batch = pack([ONE, TWO], [0, 1], 1, normalisation)
    assert batch.loss_weights_T.tolist() == pytest.approx(weights)
    assert batch.loss_count == count
    # padding and a micro-batch of nothing but padding add nothing
    assert pack([ONE, TWO], [0, 1], 5, normalisation).loss_count == count
    assert pack([ONE, TWO], [], 5, normalisation).loss_count == 0
    # the denominator is the same however the samples are split
    assert sum(pack([ONE, TWO], [i], 4, normalisation).loss_count for i in (0, 1)) == count


def test_number_formats():
    batch = pack([ONE], [0], 1)
    assert batch.token_ids_T.dtype == batch.position_ids_T.dtype == torch.int64
    assert batch.cu_seqlens_S1.dtype == torch.int32
    floats = (batch.loss_weights_T, batch.advantages_T, batch.behaviour_logprobs_T)
    assert {column.dtype for column in floats} == {torch.float32}
    assert batch.completion_index_T.dtype == torch.int32
    assert batch.segments_T.dtype == torch.int64


class Moves(TorchFunctionMode):
    """Inside, every move of a tensor is noted."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, bool]] = []

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = options or {}
        if getattr(function, "__name__", "") == "to":
            self.noted.append(("to", options.get("non_blocking", False)))
        return function(*arguments, **options)


def test_a_device_takes_every_tensor_from_pinned_memory_while_the_host_goes_on(monkeypatch):
    """Nothing is pinned, which takes a GPU."""
    both = torch.zeros(5)
    batch = replace(
        pack([ONE, TWO], [0, 1], 1),
        lag_T=both,
        penalty_T=both,
        experts_TLK=both,
        is_routed_T=both,
    )
    moves = Moves()

    def pin_memory(tensor):
        moves.noted.append(("pin_memory", False))
        return tensor

    monkeypatch.setattr(
        torch.Tensor, "pin_memory", pin_memory
    )  # on CPU vLLM has a function of its own there
    with moves:
        assert batch.to(torch.device("cpu")) is batch
        assert moves.noted == []
        moved = batch.to(torch.device("meta"))
    assert moves.noted == [("pin_memory", False), ("to", True)] * len(TENSORS)
    assert len(TENSORS) == 13 and {getattr(moved, name).device.type for name in TENSORS} == {"meta"}
    assert (moved.sample_indices, moved.loss_count, moved.max_seqlen) == ((0, 1), 5, 5)


@pytest.mark.parametrize(("kind", "count"), [("token", 0), ("sequence", 1), ("constant", 1)])
def test_an_answer_that_is_empty_has_no_weight(kind, count: int):
    batch = pack([Sample((4, 5), (), (), 1.0)], [0], 1, Normalisation(kind, 9))
    assert batch.loss_weights_T.tolist() == [0.0, 0.0]
    assert batch.completion_index_T.tolist() == [-1, -1]
    assert batch.loss_count == count


@pytest.mark.parametrize(
    ("normalisation", "weight", "count"),
    [
        (Normalisation("token"), 1.0, 5),
        (Normalisation("sequence"), 1 / 3, 2),
        (Normalisation("constant", 8), 0.125, 2),
    ],
)
def test_two_masks_say_what_is_sampled_and_what_is_learned(
    normalisation: Normalisation, weight: float, count: int
):
    """Two of five tokens were written by others, and two of the three sampled ones are learned.

    The second and the last are the others', whose numbers are not used. Weights and count are those
    of the sampled tokens."""
    nan = float("nan")
    sample = Sample(
        (4, 5),
        (6, 7, 8, 9, 10),
        (-1.0, nan, -2.0, -3.0, nan),
        advantage=0.5,
        sampled=(True, False, True, True, False),
        learned=(True, True, False, True, False),
    )
    batch = pack([sample, TWO], [0, 1], 4, normalisation)
    assert "".join(".x"[mark] for mark in batch.sampled_T.tolist()) == "..x.xx..xx.."
    assert "".join(".x"[mark] for mark in batch.learned_T.tolist()) == "..x..x..xx.."
    assert batch.sampled_T.dtype == batch.learned_T.dtype == torch.bool
    other = normalisation.weight(2)
    weights = [0, 0, weight, 0, weight, weight, 0, 0, other, other, 0, 0]
    assert batch.loss_weights_T.tolist() == pytest.approx(weights)
    assert batch.loss_count == count
    assert batch.advantages_T.tolist() == [0, 0, 0.5, 0, 0.5, 0.5, 0, 0, -0.5, -0.5, 0, 0]
    assert batch.behaviour_logprobs_T.tolist() == [0, 0, -1, 0, -2, -3, 0, 0, -2, -3, 0, 0]
    assert batch.completion_index_T.tolist() == [-1, -1, 0, 1, 2, 3, 4, -1, 0, 1, -1, -1]


@pytest.mark.parametrize(
    ("mask", "counts"), [("sampled", "2 of sampled and 2"), ("learned", "3 of sampled and 2")]
)
def test_a_mask_has_a_value_for_every_token(mask: str, counts: str):
    with pytest.raises(
        AssertionError,
        match=f"sample 0: masks need one value per token, 3; got {counts} of learned",
    ):
        pack([replace(ONE, **{mask: (True, False)})], [0], 1)


def test_every_token_needs_a_log_prob():
    with pytest.raises(AssertionError, match="sample 1: one log-prob per token is needed"):
        pack([ONE, Sample((4,), (5, 6), (-1.0,), 1.0)], [0, 1], 1)


ids = st.lists(st.integers(0, 99), min_size=1, max_size=9).map(tuple)
samples = st.builds(
    lambda prompt, completion, advantage: Sample(
        prompt, completion, tuple(-float(token) for token in completion), advantage
    ),
    ids,
    ids,
    st.integers(-5, 5).map(float),
)


@settings(deadline=None, max_examples=50)
@given(st.lists(samples, max_size=6), st.integers(1, 8))
def test_every_sample_is_found_again_between_its_bounds(packed: list[Sample], multiple: int):
    batch = pack(packed, range(len(packed)), multiple)
    bounds = batch.cu_seqlens_S1.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    assert bounds[-1] == len(batch.token_ids_T) and bounds[-1] % multiple == 0
    assert bounds[-1] > 0 and min(lengths) > 0 and max(lengths) == batch.max_seqlen
    assert batch.position_ids_T.tolist() == [p for length in lengths for p in range(length)]
    n_tokens = sum(len(sample.completion_ids) for sample in packed)
    assert float(batch.loss_weights_T.sum()) == batch.loss_count == n_tokens
    assert (batch.completion_index_T >= 0).equal(batch.loss_weights_T > 0)
    assert batch.sampled_T.equal(batch.loss_weights_T > 0) and batch.learned_T.equal(
        batch.sampled_T
    )
    assert batch.n_segments == len(lengths)
    assert batch.segments_T.tolist() == [
        s for s, length in enumerate(lengths) for _ in range(length)
    ]
    for sample, start, end in zip(packed, bounds, bounds[1:], strict=False):
        assert (
            tuple(batch.token_ids_T[start:end].tolist())
            == sample.prompt_ids + sample.completion_ids
        )
        answer = slice(start + len(sample.prompt_ids), end)
        assert tuple(batch.behaviour_logprobs_T[answer].tolist()) == sample.behaviour_logprobs
        assert batch.completion_index_T[answer].tolist() == list(range(len(sample.completion_ids)))
        assert set(batch.advantages_T[answer].tolist()) == {sample.advantage}


def test_how_far_behind_the_weights_of_each_token_are() -> None:
    old = replace(SAMPLE_OF_LAG, lag=(3, 1))
    batch = pack([old, SAMPLE_OF_LAG], [0, 1], 4)
    assert batch.lag_T is not None and batch.lag_T.tolist() == [0, 3, 1, 0, 0, 0, 0, 0]
    assert pack([SAMPLE_OF_LAG], [0], 1).lag_T is None


SAMPLE_OF_LAG = Sample((5,), (7, 8), (-1.0, -2.0), 0.5)
