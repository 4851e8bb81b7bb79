"""The time that is left of an evaluation, played with an engine of so many places and a clock of its own."""

from __future__ import annotations

import logging
import math
import random
import re
from collections.abc import Callable
from statistics import fmean

import pytest
import torch.distributed as dist

from rlmath.distributed.mesh import Mesh
from rlmath.distributed.run_store import RunStore
from rlmath.evals.time_left import Lengths, TimeLeft
from rlmath.rollout import collector
from rlmath.rollout.collector import SamplingProgress

PLACES, LONGEST = 32, 2000


class Played:
    """What runs, as `RunningRequests` has it."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[int, int], int] = {}

    def lengths(self) -> dict[tuple[int, int], int]:
        return self.tokens


def play(
    lengths: dict[tuple[int, int], int], seconds: Callable[[int], float], every: float
) -> list[tuple[float, float]]:
    """(share of the time that has passed, estimate / what was left in truth) by the work queue's order: first samples,
    then the others of the problem whose first one was longest."""
    first = [key for key in lengths if key[1] == 0]
    rest = sorted((key for key in lengths if key[1] > 0), key=lambda key: (-lengths[key[0], 0], key))
    waiting, engine = [*first, *rest][::-1], Played()
    progress = TimeLeft(len(lengths), LONGEST, {*first})
    now, told = 0.0, []
    while waiting or engine.tokens:
        while waiting and len(engine.tokens) < PLACES:
            engine.tokens[waiting.pop()] = 0
        progress.on_step(engine)  # type: ignore[arg-type]
        now += seconds(len(engine.tokens))
        for key in list(engine.tokens):
            engine.tokens[key] += 1
            if engine.tokens[key] == lengths[key]:
                progress.add(key, engine.tokens.pop(key))
        if len(told) * every < now:
            told.append((now, progress.seconds([progress.told()], now)))
    return [(then / now, left / (now - then)) for then, left in told if left is not None and then < 0.9 * now]


def drawn(kind: str, problems: int, samples: int) -> dict[tuple[int, int], int]:
    rng, found = random.Random(7), {}
    for p in range(problems):
        mean = 100 * 2 ** rng.uniform(0, 4) if kind == "by problem" else 400
        for g in range(samples):
            if kind == "two kinds":
                length = rng.choice([20, 20, 20, LONGEST])
            elif kind == "all cut":
                length = LONGEST if rng.random() < 0.95 else 20
            else:
                length = 1 + int(mean * rng.lognormvariate(-0.08, 0.4))
            found[p, g] = min(LONGEST, length)
    return found


STEPS, TOKENS = (lambda n: 1.0), (lambda n: n / PLACES)
"""Seconds of a step in which n run: always as many, as where reading the weights bounds it; or by token, as on CPU."""


@pytest.mark.parametrize("seconds", [STEPS, TOKENS], ids=["steps", "tokens"])
@pytest.mark.parametrize("kind", ["alike", "two kinds", "all cut", "by problem"])
def test_the_estimate_is_right_from_the_start(kind: str, seconds: Callable[[int], float]) -> None:
    told = play(drawn(kind, problems=150, samples=3), seconds, every=200)
    assert min(share for share, _ in told) < 0.12
    early = [ratio for share, ratio in told if 0.1 < share < 0.6]
    assert len(early) > 8 and min(early) > 0.55 and max(early) < 1.9
    assert 0.75 < math.exp(fmean(map(math.log, early))) < 1.3


def test_short_answers_that_end_first_are_not_taken_for_all() -> None:
    """All begin together: 25 of 32 end after 20 tokens, the others after 2,000. By the number of completions that have
    ended, what is left would take a quarter of what has passed."""
    lengths = drawn("two kinds", problems=32, samples=1)
    told = play(lengths, STEPS, every=50)
    ended = sum(length == 20 for length in lengths.values())
    assert 20 <= ended <= 28
    of_count = [share * (32 - ended) / ended / (1 - share) for share, _ in told]
    early = [ratio for share, ratio in told if 0.1 < share < 0.5]
    assert min(early) > 0.5 and max(early) < 1.1
    assert max(ratio for ratio, (share, _) in zip(of_count, told, strict=True) if share < 0.5) < 0.4


def test_nothing_is_said_before_some_have_ended() -> None:
    progress = TimeLeft(100, 64, {(0, 0)})
    for number in range(10):
        assert progress.seconds([progress.told()], 5.0) is None
        progress.add((number, 0), 4)
    assert progress.seconds([progress.told()], 5.0) is not None


def test_lengths_by_hand() -> None:
    """One bucket of 16 tokens, into which 3 completions went and one that counts half: 2 of 3.5 end there, the third is
    cut off."""
    found, other = Lengths(16), Lengths(16)
    for length, ended in ((4, True), (12, True), (16, True)):
        other.add(length, ended)
    found.add(8, ended=False)
    found.join(other.ends, other.entered, other.sampled)
    assert (found.ends, found.entered, found.sampled) == ([2], [3.5], 40)
    hazards, rate = found.hazards(), math.log(3.5 / 1.5) / 16
    assert hazards.left(0) == pytest.approx((1 - 1.5 / 3.5) / rate)
    assert hazards.left(10) == pytest.approx((1 - math.exp(-6 * rate)) / rate)
    assert hazards.last_end([0]) == pytest.approx(math.log(2) / rate, abs=1)
    assert hazards.last_end([0] * 10) == pytest.approx(16, abs=1), "one of ten lives longer"


def test_the_log_has_the_estimate_of_all_engines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(collector, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(collector, "COUNT_SECONDS", 0.0)
    store = RunStore(dist.HashStore(), "evaluation")
    caplog.set_level(logging.INFO)
    engines = [TimeLeft(8, 64, {(0, 0)}) for _ in range(2)]
    first, second = (
        SamplingProgress(8, Mesh(rank, 2, 1, 1, 1), store, "evaluation", time_left=engine)
        for rank, engine in enumerate(engines)
    )
    for engine, key in zip(engines, ((0, 0), (1, 0)), strict=True):
        engine.on_step(Played())  # type: ignore[arg-type]
        engine.add(key, 9)
    second.tick()
    first.tick()
    assert re.fullmatch(
        r"evaluation: sampled 2 of 8 completions \(25%\) in \d\d:\d\d, about \d\d:\d\d left",
        caplog.messages[-1],
    )
