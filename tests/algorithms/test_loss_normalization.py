import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from rlmath.algorithms.loss_normalization import TOKEN_MEAN, Normalisation


@pytest.mark.parametrize(
    ("normalisation", "wanted"),
    [
        (Normalisation("token"), 0.5),  # (4 x 1 + 1 x -1.5) / 5
        (Normalisation("sequence"), -0.25),  # (1 - 1.5) / 2
        (Normalisation("constant", 10), 0.125),  # (4 / 10 - 1.5 / 10) / 2
    ],
)
def test_a_minibatch_of_two_by_hand(normalisation: Normalisation, wanted: float):
    # four tokens of loss 1, one token of loss -1.5
    total = normalisation.weight(4) * 4 * 1.0 + normalisation.weight(1) * -1.5
    assert total / (normalisation.count(4) + normalisation.count(1)) == pytest.approx(wanted)


@pytest.mark.parametrize(("kind", "count"), [("token", 0), ("sequence", 1), ("constant", 1)])
def test_a_completion_without_tokens(kind, count: int):
    normalisation = Normalisation(kind, 10)
    assert math.isfinite(normalisation.weight(0)) and normalisation.count(0) == count


def test_the_default_is_the_mean_over_tokens():
    assert Normalisation() == TOKEN_MEAN
    assert (TOKEN_MEAN.weight(7), TOKEN_MEAN.count(7)) == (1.0, 7)


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from(["token", "sequence", "constant"]), st.lists(st.integers(1, 50), min_size=1, max_size=9)
)
def test_a_loss_of_one_everywhere_is_one_unless_a_constant_divides(kind, lengths: list[int]):
    normalisation = Normalisation(kind, 50)
    weights = math.fsum(n * normalisation.weight(n) for n in lengths)
    loss = weights / sum(normalisation.count(n) for n in lengths)
    assert loss == pytest.approx(sum(lengths) / (50 * len(lengths)) if kind == "constant" else 1.0)


def test_words_are_checked():
    with pytest.raises(TypeCheckError):
        Normalisation("group")  # pyright: ignore
