"""One step's rollout: every engine samples the work that it pops from a queue, and scores it.

    requests -> work queue -> engine -> completions -> reward workers -> gathered to all ranks ->
    groups

`collect` samples whole groups; `sample` also slices of completions, which further slices continue.
Completions are scored where they were sampled, by worker processes, while the engine still
generates.
"""

# Shape legend: P prompts, G samples per prompt.

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from rlmath.algorithms.types import (
    Completion,
    PartialCompletion,
    Prompt,
    RoutesAt,
    Score,
    ScoredCompletion,
    ScoredGroup,
    scored_group,
)
from rlmath.checkpoint.route_files import write_routes
from rlmath.checkpoint.unfinished_groups import route_file
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import RewardConfig, RolloutConfig
from rlmath.data.routes import places_of
from rlmath.distributed.collectives import all_gather_objects, shared_store
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.run_store import RunStore
from rlmath.rewards.reward_manager import UNSCORED, RewardManager, RewardWorkers, scorer_settings
from rlmath.rewards.several_rewards import takes_groups
from rlmath.rollout.called_completions import ENVIRONMENTS, SANDBOXES, check_lost
from rlmath.rollout.engine import Engine
from rlmath.rollout.engine_turns import EngineTurns
from rlmath.rollout.finished_turns import FinishedTurns
from rlmath.rollout.routes import RouteStore, load_on_all_ranks
from rlmath.rollout.sampling import Key, Request, RolloutSeed, SamplingSettings, group_requests
from rlmath.rollout.work_queue import EngineUsage, WorkQueue

logger = logging.getLogger(__name__)

COUNT_SECONDS = 1.0
"""Interval at which an engine reports how much it has sampled."""
PROGRESS_SECONDS = 20.0
"""Interval of the log lines on the progress, where there is no terminal for a bar."""
LEAST_DONE = 0.1
"""Share of the work after which the remaining time is shown."""


@dataclass(frozen=True)
class CollectGroups:
    """Prompts to sample and score now."""

    prompts: Sequence[Prompt]
    sampling: SamplingSettings
    seed: RolloutSeed
    title: str
    """Shown on the console."""
    validates: bool = False


@dataclass(frozen=True)
class Rollout:
    """The scored completions of some prompts."""

    groups: list[ScoredGroup]
    """Sorted as the prompts are, whoever sampled them."""
    engines: list[EngineUsage]
    """What each engine did."""


@dataclass(frozen=True)
class Work:
    """A completion to sample, or to continue."""

    prompt: Prompt
    request: Request


Sampled = PartialCompletion | ScoredCompletion
"""A completion that is finished has a score."""


class Collector:
    """Samples and scores; the ranks of one engine generate alike, and the first of them scores."""

    def __init__(
        self,
        engine: Engine,
        mesh: Mesh,
        tokenizer: PreTrainedTokenizerFast,
        rollout: RolloutConfig,
        reward: RewardConfig,
        pool: RewardWorkers | None,
        scorer: RewardWorkers | None = None,
        has_scorer: bool = False,
        routes: RouteStore | None = None,
        turns: EngineTurns | None = None,
    ) -> None:
        """Every rank makes one, one at a time: a rollout's number names its keys in the store.

        `scorer` decides what is right in validation where the `pool` does not: ranks with a pool
        have one if the run `has_scorer`. `routes` keep the experts of what this rank's engine
        samples in training, where it records them. `turns` answer finished turns."""
        assert (pool is not None) == mesh.is_engine_leader, (
            "the leading rank of an engine has the reward workers"
        )
        self._engine = engine
        self._mesh = mesh
        self.tokenizer = tokenizer
        self._rollout = rollout
        self._reward = reward
        self._pool = pool
        self._scorer = scorer
        self._has_scorer = has_scorer
        self._routes = routes
        self._turns = turns
        self._rollouts = 0

    def collect(self, command: CollectGroups) -> Rollout:
        """G scored completions of each of the P prompts, the same on every rank."""
        prompts = command.prompts
        sampling = command.sampling
        rows = [
            [Work(prompt, request) for request in requests]
            for prompt, requests in zip(
                prompts, group_requests(prompts, sampling, command.seed), strict=True
            )
        ]
        sampled, engines = self.sample(
            rows,
            sampling.max_new_tokens,
            command.seed.step,
            title=command.title,
            validates=command.validates,
        )
        groups = [
            scored_group(prompt, [sampled[p, g] for g in range(sampling.samples)])
            for p, prompt in enumerate(prompts)
        ]
        return Rollout(
            self.score_groups(groups, sampling.max_new_tokens, command.validates), engines
        )

    def score_groups(
        self, groups: list[ScoredGroup], max_new_tokens: int, validates: bool = False
    ) -> list[ScoredGroup]:
        """Score the groups where a reward function takes whole ones; the same on every rank.

        The engines share them. Without such a function they have their scores already. Lost
        completions are not given to it and keep their scores."""
        if not groups or not self._takes_groups(validates):
            return groups
        scores: dict[int, list[Score]] = {}
        if self._pool is not None:
            rewards = self._reward_manager(max_new_tokens, validates)
            group_indices = range(self._mesh.engine_index, len(groups), self._mesh.num_engines)
            for index in group_indices:
                judged = groups[index].judged
                if judged.completions:
                    rewards.submit_group(judged.prompt, judged.completions, key=index)
            rewards.wait(self._engine.on_step)
            scores = dict(rewards.take_finished())
        for engine_scores in all_gather_objects(scores):
            scores |= engine_scores
        return [group.with_scores(scores.get(index, ())) for index, group in enumerate(groups)]

    def _takes_groups(self, validates: bool) -> bool:
        by_scorer = validates and self._has_scorer
        return takes_groups(self._reward) and not by_scorer

    def keep_routes(self, parts: Iterable[PartialCompletion | Completion]) -> None:
        """Forget the routes that this rank holds of other completions than these."""
        if self._routes is not None:
            self._routes.keep_only(places_of(parts))

    def route_files(self) -> dict[str, bytes]:
        """What a checkpoint keeps of the routes that this rank holds, by file name."""
        if self._routes is None or not self._routes.bytes:
            return {}
        return {route_file(self._mesh.rank): write_routes(self._routes.held)}

    def load_routes(
        self, folder: Path, places: Sequence[RoutesAt], shape: ModelShape
    ) -> dict[RoutesAt, RoutesAt]:
        """Hold this rank's part of the routes of a checkpoint; returns where each has come to be.

        A collective. ValueError on all ranks where one cannot read its part."""
        assert self._routes is not None
        return load_on_all_ranks(
            self._routes, folder, places, world_size=self._mesh.world_size, shape=shape
        )

    def reset_prefix_cache(self) -> None:
        """Let the engine compute all prompts anew: cached blocks may differ in the last bits."""
        self._engine.reset_prefix_cache()

    def sample(
        self,
        rows: Sequence[Sequence[Work]],
        max_new_tokens: int,
        step: int,
        title: str,
        validates: bool = False,
    ) -> tuple[dict[Key, Sampled], list[EngineUsage]]:
        """Sample every request to its end; returns, the same on every rank, two things.

        The first is each request's completion by its key, scored where it is finished: with a stop
        token or `max_new_tokens` tokens. The second is what each engine did. A request's key starts
        with the index of its row. `step` is the step, counted from 0, that samples."""
        store = shared_store(f"rollout/{self._rollouts}")
        self._rollouts += 1
        requests = [[work.request for work in row] for row in rows]
        work_queue = WorkQueue(store, requests, self._mesh, max_num_seqs=self._rollout.max_num_seqs)
        by_key = {work.request.key: work for row in rows for work in row}
        progress = SamplingProgress(
            len(by_key), self._mesh, store, title=title, shown=self._rollout.progress_bar
        )
        rewards = None if self._pool is None else self._reward_manager(max_new_tokens, validates)
        by_group = self._takes_groups(validates)
        turns = None
        if self._turns is not None:
            judge = None if self._pool is None else self._reward_manager(max_new_tokens, validates)
            turns = self._turns.of_rollout(lambda key: by_key[key].prompt, judge, validates)
        gathered = all_gather_objects(
            self._sample(
                by_key,
                work_queue,
                progress,
                step=step,
                rewards=rewards,
                by_group=by_group,
                routes=None if validates else self._routes,
                turns=turns,
            )
        )
        progress.close()
        work_queue.close()
        sampled: dict[Key, Sampled] = {}
        for completions, scores, _ in gathered:
            for key, new_tokens in completions.items():
                completion = _with_first(new_tokens, by_key[key].request.so_far)
                if isinstance(completion, Completion):
                    sampled[key] = ScoredCompletion(completion, scores[key])
                else:
                    sampled[key] = completion
        if self._engine.tools is not None or self._turns is not None:
            self._check_lost(by_key, sampled)
        return sampled, [usage for _, _, usage in gathered if usage is not None]

    def _check_lost(self, by_key: Mapping[Key, Work], sampled: Mapping[Key, Sampled]) -> None:
        """Warn of completions that a tool's machine or the user's environment has lost.

        RuntimeError where many are. All of a rollout in an environment count as calling."""
        completions = {
            key: sample.completion if isinstance(sample, ScoredCompletion) else sample
            for key, sample in sampled.items()
        }
        lost = [
            completion.calls[-1].output
            for completion in completions.values()
            if isinstance(completion, Completion) and completion.is_lost
        ]
        calling = [
            key
            for key, completion in completions.items()
            if self._turns is not None
            or len(completion.calls) > len(by_key[key].request.so_far.calls)
        ]
        check_lost(
            lost,
            calling=len(calling),
            outcome="They leave their groups; a validation counts them as wrong",
            tells=self._mesh.rank == 0,
            texts=SANDBOXES if self._turns is None else ENVIRONMENTS,
        )

    def _reward_manager(self, max_new_tokens: int, validates: bool) -> RewardManager:
        if validates and self._scorer is not None:
            return RewardManager(self._scorer, scorer_settings(self._reward), max_new_tokens)
        assert self._pool is not None
        return RewardManager(
            self._pool,
            self._reward,
            max_new_tokens,
            validates=validates,
            discount=1.0 if self._turns is None else self._turns.discount,
        )

    def _sample(
        self,
        by_key: Mapping[Key, Work],
        work_queue: WorkQueue,
        progress: SamplingProgress,
        *,
        step: int,
        rewards: RewardManager | None,
        by_group: bool,
        routes: RouteStore | None,
        turns: FinishedTurns | None,
    ) -> tuple[dict[Key, PartialCompletion | Completion], dict[Key, Score], EngineUsage | None]:
        """What this rank's engine samples, the scores of finished completions, and its usage.

        The completions come without the tokens that they had before. Ranks that do not lead an
        engine return nothing. What is scored `by_group` has no score yet: an engine may have
        sampled only a part of a group."""
        scores: dict[Key, Score] = {}

        def submit(request: Request, completion: Completion) -> None:
            assert rewards is not None
            score = None if turns is None else turns.scores.pop(request.key, None)
            if score is not None:
                scores[request.key] = score
            elif by_group:
                scores[request.key] = UNSCORED
            else:
                rewards.submit(by_key[request.key].prompt, completion, request.key)

        started = time.perf_counter()
        completions: dict[Key, PartialCompletion | Completion] = {}
        tokenizer = None if rewards is None else self.tokenizer
        with_routes = rewards is not None and routes is not None
        running = self._engine.running_completions(
            step, tokenizer, submit, with_routes=with_routes, turns=turns
        )
        for ended in running.sample(work_queue):
            progress.add_one()
            progress.tick()
            before = by_key[ended.request.key].request.so_far
            completion = _without_first(ended.completion, len(before.token_ids))
            if routes is not None and ended.routes is not None:
                places = (*before.routes_at, routes.keep(ended.routes))
                completion = replace(completion, routes_at=places)
            completions[ended.request.key] = completion
        seconds = time.perf_counter() - started
        usage = work_queue.usage(seconds, running.usage.waiting_seconds)
        if rewards is None:
            return {}, {}, None
        rewards.wait(self._engine.on_step)
        scores |= {key: score for key, (score,) in rewards.take_finished()}
        return completions, scores, usage


def _without_first(
    completion: PartialCompletion | Completion, tokens: int
) -> PartialCompletion | Completion:
    """The completion without its first tokens, which all ranks have and need not be gathered."""
    if not tokens:
        return completion
    token_ids = completion.token_ids[tokens:]
    return replace(completion, token_ids=token_ids, logprobs=completion.logprobs[tokens:])


def _with_first(
    completion: PartialCompletion | Completion, so_far: PartialCompletion
) -> PartialCompletion | Completion:
    """The completion with the tokens of `so_far` put back in front, as it was gathered without."""
    if not so_far.token_ids:
        return completion
    token_ids = array("i", so_far.token_ids) + array("i", completion.token_ids)
    logprobs = array("f", so_far.logprobs) + array("f", completion.logprobs)
    return replace(completion, token_ids=token_ids, logprobs=logprobs)


class SamplingProgress:
    """Shows how many completions all engines have sampled.

    It is a bar on rank 0's terminal, or else lines every PROGRESS_SECONDS."""

    def __init__(
        self,
        total: int,
        mesh: Mesh,
        store: RunStore,
        title: str,
        shown: bool = True,
        longest: float = math.inf,
    ) -> None:
        """All engines sample `total` completions of at most `longest` tokens.

        `title` is shown on the console. Several at a time need a store each."""
        self._total = total
        self._mesh = mesh
        self._store = store
        self._title = title
        self._shown = shown and mesh.rank == 0
        self._done = 0
        self.tokens = 0
        """Tokens that this engine has sampled, unfinished completions included; 0: not counted."""
        self._longest = longest
        self._by_engine: dict[str, Any] = {}
        self._started = self._told = self._logged = time.monotonic()
        # None: shown on a terminal, not in a log file.
        hide_bar = None if self._shown else True
        form = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} completions{postfix}"
        self._bar = tqdm(total=total, desc=title, disable=hide_bar, leave=False, bar_format=form)

    def add_one(self) -> None:
        """This engine has sampled one more."""
        self._done += 1

    def tick(self) -> None:
        """Call it regularly.

        Stores this engine's count at most once in COUNT_SECONDS; rank 0 shows the sum."""
        clock = time.monotonic()
        if not self._mesh.is_engine_leader or clock - self._told < COUNT_SECONDS:
            return
        self._told = clock
        self._store.set(f"sampled/{self._mesh.engine_index}", [self._done, self.tokens])
        if not self._shown:
            return
        engines = range(self._mesh.num_engines)
        self._by_engine |= self._store.get_all([f"sampled/{engine}" for engine in engines])
        counts = [count for count in self._by_engine.values() if isinstance(count, list)]
        done = sum(count[0] for count in counts)
        tokens = sum(count[1] for count in counts)
        left = left_text(
            done, self._total, clock - self._started, tokens=tokens, longest=self._longest
        )
        if not self._bar.disable:
            self._bar.set_postfix_str(left.removeprefix(", "), refresh=False)
            self._bar.update(done - self._bar.n)
        elif clock - self._logged >= PROGRESS_SECONDS:
            self._logged = clock
            logger.info(
                "%s",
                progress_line(
                    self._title, done, self._total, seconds=clock - self._started, left=left
                ),
            )

    def close(self) -> None:
        """Call it when all engines are done.

        Deletes this engine's count from the store."""
        self._bar.close()
        if self._mesh.is_engine_leader:
            self._store.delete(f"sampled/{self._mesh.engine_index}")


def progress_line(title: str, done: int, total: int, seconds: float, left: str) -> str:
    """A line for the console on how far sampling is.

    >>> progress_line("step 7/20", 500, 2000, 60.0, ", about 03:00 left")
    'step 7/20: sampled 500 of 2,000 completions (25%) in 01:00, about 03:00 left'
    """
    passed = tqdm.format_interval(seconds)
    return (
        f"{title}: sampled {done:,} of {total:,} completions ({done / total:.0%}) in {passed}{left}"
    )


def left_text(
    done: int, total: int, seconds: float, tokens: int = 0, longest: float = math.inf
) -> str:
    """The remaining time, once LEAST_DONE of the work shows how long it takes.

    >>> left_text(50, 512, 60.0), left_text(128, 512, 60.0)
    ('', ', about 03:00 left')

    Where `tokens` are counted, of unfinished completions, too, the work is tokens. A completion has
    as many as were sampled for each that is finished, and at most `longest`: 128 of 512 completions
    are half of the work where the others have come as far, and no estimate waits for the first to
    finish.

    >>> left_text(128, 512, 60.0, tokens=512 * 500, longest=1000)
    ', about 01:00 left'
    >>> left_text(0, 512, 60.0, tokens=25_600, longest=100)
    ', about 01:00 left'
    """
    share = done / total
    if tokens:
        expected = min(longest, tokens / done) if done else longest
        share = max(share, tokens / (expected * total))
    if share < LEAST_DONE:
        return ""
    return f", about {tqdm.format_interval(seconds / share * (1 - share))} left"
