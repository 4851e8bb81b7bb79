"""Functions of the user's that a step calls: choice of groups, their advantages, and metrics.

Rank 0 has their workers and calls them; what a step computes with is broadcast, so that all ranks
have the same, whatever the function does. Metrics are only logged, and only rank 0 has them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from rlmath.algorithms.types import ScoredGroup
from rlmath.config.schema import Config
from rlmath.distributed.collectives import broadcast_from_rank_zero
from rlmath.workers.hooks import Hook
from rlmath.workers.user_functions import (
    METRIC_SECONDS,
    UserFunction,
    UserFunctionError,
    advantage_hook,
    group_for_hooks,
    metric_hooks,
    selection_hook,
)

logger = logging.getLogger(__name__)


class StepHooks:
    """All training ranks call `advantages` and `keep` alike."""

    def __init__(self, config: Config, rank: int) -> None:
        """Start the workers on rank 0, without waiting for them."""
        self._rank = rank
        self._stack = ExitStack()
        self._advantage = self._open(advantage_hook(config))
        self._selection = self._open(selection_hook(config))
        self._metrics: dict[str, UserFunction] = {}
        if rank == 0:
            for name, hook in metric_hooks(config).items():
                self._metrics[name] = self._stack.enter_context(UserFunction(hook, METRIC_SECONDS))
        self._warned: set[str] = set()

    def _open(self, hook: Hook | None) -> UserFunction | Hook | None:
        """The function on rank 0, elsewhere its name."""
        return hook if hook is None or self._rank else self._stack.enter_context(UserFunction(hook))

    @property
    def keep(self) -> Callable[[Sequence[ScoredGroup]], list[bool]] | None:
        """The function that says which groups are learned from; None without one.

        A collective, and so is the result of each call. UserFunctionError where the function fails.
        """
        return None if self._selection is None else self._keep

    def _keep(self, groups: Sequence[ScoredGroup]) -> list[bool]:
        return self._shared(
            self._selection,
            [(group_for_hooks(group),) for group in groups] if not self._rank else [],
        )

    def advantages(
        self, rewards: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]]
    ) -> list[list[float]] | None:
        """Advantages of every completion by group and sample; None where no function gives them.

        They are as those of `algorithms.advantages.advantages`. A collective. UserFunctionError
        where the function fails."""
        if self._advantage is None or not rewards:
            return None
        return self._shared(self._advantage, [(rewards, tokens)])[0]

    def _shared(
        self, function: UserFunction | Hook | None, calls: Sequence[Sequence[Any]]
    ) -> list[Any]:
        """The results of the calls of rank 0, on all ranks."""
        values = []
        problem = None
        if isinstance(function, UserFunction):
            try:
                values = function.values(calls)
            except (UserFunctionError, ValueError) as error:
                problem = str(error)
        values, problem = broadcast_from_rank_zero((values, problem))
        if problem is not None:
            raise UserFunctionError(problem)
        return values

    def metrics(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """The user's metrics on rank 0, {} elsewhere.

        A failing function is warned of once, a slow one is not called again."""
        metrics: dict[str, float] = {}
        if not self._metrics:
            return metrics
        hook_groups = [group_for_hooks(group) for group in groups]
        for name, function in list(self._metrics.items()):
            try:
                value = function.call(hook_groups)
            except (UserFunctionError, ValueError) as error:
                self._warn(name, str(error))
                if function.was_late:
                    del self._metrics[name]
                continue
            values = value if isinstance(value, dict) else {"": value}
            metrics |= {f"own/{name}/{key}".rstrip("/"): number for key, number in values.items()}
        return metrics

    def _warn(self, name: str, reason: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            logger.warning("The metric %r is missing in this step (logged once): %s", name, reason)

    def close(self) -> None:
        self._stack.close()
