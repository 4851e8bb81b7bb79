"""The loop of an engine's rank in an asynchronous run: it samples and takes new weights.

`engine_messages` has what trainers and engines send each other.

An engine draws a group when it has a free place and the trainers admit the draw: all engines draw
from one counter, so that each prompt is drawn once. The completions of a group are sampled by one
engine and scored beside, by its worker processes. A message is handled between two steps of vLLM's,
in the order in which it was sent; `TakeSnapshot` and `End` do not wait behind weights that wait for
running completions.

New weights while completions are being sampled (`rollout.on_new_weights`):

- "recompute": what is sampled of them stays; their KV cache is computed again with the new weights
  (AReaL, arXiv:2505.24298). No block of the KV cache that older weights computed is used again.
- "keep": they go on with their KV cache as it is (PipelineRL, arXiv:2509.19128). Prompts that are
  begun later do not share its blocks.
- "finish": they end first, and nothing is begun until then.

So is a completion in flight that waits for a call of a tool. It has left vLLM: with "recompute" and
"keep" the new weights read all of it when it goes on.

All ranks of an engine run this loop in lockstep: the first one, its leader, has the mailbox, and
gives the others what it has read and drawn, at points that follow from the number of steps alone.
"""

# Shape legend: G samples per prompt.

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rlmath.algorithms.partial_rollouts import UnfinishedGroup
from rlmath.algorithms.types import (
    NOTHING_SAMPLED,
    Completion,
    PartialCompletion,
    Prompt,
    ScoredCompletion,
)
from rlmath.config.schema import RewardConfig, RolloutConfig
from rlmath.data.dataset import Inputs
from rlmath.distributed.bridge import Mailbox
from rlmath.distributed.collectives import shared_store
from rlmath.distributed.mesh import Mesh
from rlmath.rewards.reward_manager import RewardManager, RewardWorkers
from rlmath.rollout.collector import CollectGroups, Collector
from rlmath.rollout.engine import Engine
from rlmath.rollout.engine_messages import (
    RECEIVER,
    Admit,
    Continue,
    End,
    EngineMessage,
    NewWeights,
    Scored,
    ScoreTokens,
    Snapshot,
    TakeSnapshot,
    TrainerMessage,
    WeightsTaken,
)
from rlmath.rollout.engine_turns import EngineTurns
from rlmath.rollout.groups_in_flight import GroupsInFlight
from rlmath.rollout.running_completions import Usage, Weights
from rlmath.rollout.sampling import Key, Request, RolloutSeed, SamplingSettings, requests_of
from rlmath.rollout.weight_sync.offer import WeightReceiver
from rlmath.rollout.work_queue import ItemT, share_in_engine

logger = logging.getLogger(__name__)

STEPS_BETWEEN_MESSAGES = 4
"""Steps of vLLM's after which a busy engine reads its messages."""
IDLE_SECONDS = 0.01
"""How long an idle engine waits for a message before it looks for other work."""


class _Draws:
    """The draws that the leader of an engine takes from the counter of all engines."""

    def __init__(self, engines: int) -> None:
        self.admitted = Admit(0, 0, 0)
        self._engines = engines
        self._store = shared_store("generation")
        self._next_draw: int | None = None
        """A draw that was taken from the counter, and that is not admitted yet."""

    def take(self, places: int, places_of_a_group: int, samples: int) -> list[int]:
        """Take as many draws as groups of `samples` begin in the free `places`.

        None where no more are admitted. An engine leaves the others their share of those."""
        draws: list[int] = []
        own_share = 0
        while places >= places_of_a_group:
            if self._next_draw is None:
                self._next_draw = self.admitted.first + self._store.fetch_add("draws")
            draws_left = self.admitted.draws - self._next_draw
            own_share = own_share or -(-draws_left // self._engines)
            if draws_left <= 0 or len(draws) == own_share:
                break
            draws.append(self._next_draw)
            self._next_draw = None
            places -= samples
        return draws


@dataclass(frozen=True)
class SamplingPlan:
    """What the engines of a run sample, and how it is scored."""

    inputs: Inputs
    rollout: RolloutConfig
    reward: RewardConfig
    sampling_of_stage: Sequence[SamplingSettings]
    """One for each length stage."""
    run_seed: int


@dataclass(frozen=True)
class Leader:
    """What only the first rank of an engine has."""

    mailbox: Mailbox
    workers: RewardWorkers


class EngineLoop:
    """The loop of one rank of an engine on ranks of its own."""

    def __init__(
        self,
        engine: Engine,
        mesh: Mesh,
        *,
        receiver: WeightReceiver,
        collector: Collector,
        plan: SamplingPlan,
        leader: Leader | None,
        turns: EngineTurns | None = None,
    ) -> None:
        """`mesh` is that of the engines' world; only an engine's first rank has a `leader`.

        `turns` answer finished turns."""
        self._engine = engine
        self._mesh = mesh
        self._receiver = receiver
        self._collector = collector
        self._plan = plan
        self._leader = leader
        rollout = plan.rollout
        self._on_new_weights: Literal["recompute", "keep", "finish"] = rollout.on_new_weights
        self._capacity = rollout.max_concurrent_sequences or rollout.max_num_seqs
        # Without a limit of the user's, the last group may be begun in part: vLLM queues the
        # others.
        self._free_for_a_group = rollout.group_size if rollout.max_concurrent_sequences else 1
        self._sampling = plan.sampling_of_stage[0]
        self._groups: GroupsInFlight | None = None
        """Groups not yet sampled and scored; None on ranks that lead no engine."""
        if leader is not None:
            discount = 1.0 if turns is None else turns.discount
            self._groups = GroupsInFlight(
                leader.workers, plan.reward, on_done=self._send, discount=discount
            )
        self._turns = None
        if turns is not None:
            judge = None
            if leader is not None:
                judge = RewardManager(leader.workers, plan.reward, self._sampling.max_new_tokens)
            self._turns = turns.of_rollout(self._prompt_of, judge, validates=False)
        self._running = engine.running_completions(
            tokenizer=None if leader is None else collector.tokenizer,
            score=self._score,
            keeps_cache=rollout.on_new_weights == "keep",
            turns=self._turns,
        )
        self._unfinished: list[UnfinishedGroup] = []
        """Groups of an earlier start, begun before any other."""
        self._draws = _Draws(mesh.num_engines)
        self._all_drawn = True
        """Nothing more is admitted; the same on all ranks of the engine."""
        self._pending: NewWeights | None = None
        """Weights that are taken once all running completions are finished."""
        self._queue: list[TrainerMessage] = []
        """Messages that wait behind them."""
        self._report: WeightsTaken | None = None
        """The report that is sent with the first token under the version that was taken last."""
        self._steps = 0
        self._status: int | None = None

    def run(self, on_weights: Callable[[int], None]) -> int:
        """Sample until the trainers end the run; its exit status.

        `on_weights` gets the step (from 0) of a version."""
        self._on_weights = on_weights
        while True:
            if self._steps % STEPS_BETWEEN_MESSAGES == 0 or not self._running.busy:
                self._queue += self._share(self._read_messages())
                self._handle_messages()
                if self._status is not None:
                    return self._status
                self._begin_groups()
            if len(self._running):
                self._step()
            elif self._pending is not None:
                self._take_weights(self._pending)
            self._finish_scored()

    def _share(self, items: list[ItemT]) -> list[ItemT]:
        """The leader's list, on all ranks of the engine."""
        return share_in_engine(items) if self._mesh.engine_size > 1 else items

    def _read_messages(self) -> list[TrainerMessage]:
        if self._leader is None:
            return []
        idle = not len(self._running) and not self._queue and self._pending is None
        return [
            envelope.message
            for envelope in self._leader.mailbox.receive(IDLE_SECONDS if idle else 0.0)
        ]

    def _send(self, message: EngineMessage) -> None:
        if self._leader is not None:
            self._leader.mailbox.send(RECEIVER, message)

    # ------------------------------------------------------------ messages

    def _handle_messages(self) -> None:
        """Handle the queued messages in their order.

        While weights wait for running completions, only messages that change nothing about these
        are handled."""
        waiting: list[TrainerMessage] = []
        while self._queue and self._status is None:
            message = self._queue.pop(0)
            if self._pending is not None and not isinstance(message, TakeSnapshot | End):
                waiting.append(message)
            elif (
                isinstance(message, NewWeights)
                and self._on_new_weights == "finish"
                and len(self._running)
            ):
                self._pending = message
            elif isinstance(message, NewWeights):
                self._take_weights(message)
            elif isinstance(message, Admit):
                self._admit(message)
            elif isinstance(message, Continue):
                self._enter_length_stage(message.length_stage)
                self._unfinished += message.groups
            elif isinstance(message, TakeSnapshot):
                self._send_snapshot()
            elif isinstance(message, CollectGroups):
                self._collect(message)
            elif isinstance(message, ScoreTokens):
                self._score_tokens(message)
            elif isinstance(message, End):
                self._status = message.status
            else:
                raise TypeError(f"no message for an engine: {message!r:.200}")
        self._queue = waiting

    def _admit(self, message: Admit) -> None:
        self._draws.admitted = message
        self._all_drawn = False
        self._enter_length_stage(message.length_stage)

    def _enter_length_stage(self, number: int) -> None:
        self._sampling = self._plan.sampling_of_stage[number]
        if self._groups is not None:
            self._groups.expect_lengths(self._sampling.max_new_tokens)

    def _take_weights(self, message: NewWeights) -> None:
        self._pending = None
        if self._on_new_weights == "keep" and self._running.busy:
            requests = self._running.keep_tokens()
            self._receive(message, len(requests), self._running.called, keeps_cache=True)
        else:
            with self._running.interrupted() as requests:
                self._receive(message, len(requests), requests, keeps_cache=False)

    def _receive(
        self,
        message: NewWeights,
        interrupted: int,
        prefilled_again: Sequence[Request],
        *,
        keeps_cache: bool,
    ) -> None:
        """Get new weights for so many completions in flight, some of which are prefilled again.

        With requests in vLLM its prefix cache cannot be emptied: those of a version share no blocks
        with others."""
        transfer_seconds = self._receiver.take()
        self._engine.set_weight_version(message.version, reset_prefixes=not keeps_cache)
        self._running.weights = Weights(message.version, message.step)
        self._on_weights(message.step)
        self._report = self._new_report(
            message,
            transfer_seconds,
            interrupted,
            prefilled_again=sum(len(request.so_far.token_ids) for request in prefilled_again),
        )

    def _new_report(
        self, message: NewWeights, transfer_seconds: float, interrupted: int, prefilled_again: int
    ) -> WeightsTaken:
        """The report that goes to the trainers with the first token.

        Where the last one was not sent, nothing was sampled since, and its figures count on."""
        usage, self._running.usage = self._running.usage, Usage()
        seconds = time.perf_counter() - usage.since
        if (unsent := self._report) is not None:
            seconds += unsent.seconds
            return replace(
                unsent,
                version=message.version,
                learned_at=message.learned_at,
                transfer_seconds=transfer_seconds,
                seconds=seconds,
                waiting_seconds=unsent.waiting_seconds + usage.waiting_seconds,
            )
        return WeightsTaken(
            version=message.version,
            learned_at=message.learned_at,
            transfer_seconds=transfer_seconds,
            seconds=seconds,
            busy_seconds=usage.busy_seconds,
            waiting_seconds=usage.waiting_seconds,
            new_tokens=usage.new_tokens,
            interrupted=interrupted,
            prefilled_again_tokens=prefilled_again,
            running=usage.running / max(1, usage.steps),
            queued_scores=0 if self._groups is None else self._groups.queued_scores,
        )

    def _send_snapshot(self) -> None:
        """Send what is in flight, once finished completions have their score."""
        requests = self._running.keep_tokens()
        if self._groups is not None:
            self._send(Snapshot(self._groups.snapshot(requests)))

    def _collect(self, message: CollectGroups) -> None:
        """Let all engines collect groups while what is in flight waits, without cached prefixes."""
        with self._running.interrupted():
            self._engine.reset_prefix_cache()
            rollout = self._collector.collect(message)  # over all engines; what is in flight waits
            if self._mesh.engine_index == 0:
                self._send(rollout)
            self._engine.reset_prefix_cache()

    def _score_tokens(self, message: ScoreTokens) -> None:
        with self._running.interrupted():
            self._send(Scored(self._mesh.engine_index, self._engine.score(message.sequences)))

    # ------------------------------------------------------------ groups

    def _begin_groups(self) -> None:
        """Begin as many groups as there are places for, first those of an earlier start."""
        if self._pending is not None:
            return
        while self._unfinished and self._free() >= self._free_for_a_group:
            group = self._unfinished.pop(0)
            self._begin(group.draw, group.samples)
        if self._all_drawn or self._free() < self._free_for_a_group:
            return
        draws: list[int] = []
        if self._leader is not None:
            draws = self._draws.take(self._free(), self._free_for_a_group, self._sampling.samples)
        draws = self._share(draws)
        self._all_drawn = not draws
        for draw in draws:
            self._begin(draw, (NOTHING_SAMPLED,) * self._sampling.samples)

    def _free(self) -> int:
        """Free places for sequences."""
        return self._capacity - len(self._running)

    def _begin(self, draw: int, samples: Sequence[PartialCompletion | ScoredCompletion]) -> None:
        """Begin those samples of a draw that are not finished."""
        step, index, times = self._plan.inputs.order.drawn(draw)
        prompt = self._plan.inputs.prompts[index]
        requests = requests_of(
            prompt, draw, self._sampling, seed=RolloutSeed(self._plan.run_seed, step), times=times
        )
        if self._groups is not None:
            self._groups.add(draw, prompt, samples)
        for request, sample in zip(requests, samples, strict=True):
            if isinstance(sample, PartialCompletion):
                self._running.begin(replace(request, so_far=sample))

    # ------------------------------------------------------------ steps of vLLM's

    def _step(self) -> None:
        self._steps += 1
        self._running.resume_called()
        samples = self._running.busy
        self._running.step()
        if samples and self._report is not None:
            self._send(self._report)
            self._report = None

    def _score(self, request: Request, completion: Completion) -> None:
        assert self._groups is not None, "only the leader of an engine decodes completions"
        if self._turns is not None:
            # Judged for feedback, perhaps by the lengths of an earlier stage: it is scored anew.
            self._turns.scores.pop(request.key, None)
        self._groups.score(request, completion)

    def _prompt_of(self, key: Key) -> Prompt:
        assert self._groups is not None, "only the leader of an engine has workers"
        return self._groups.prompt_of(key)

    def _finish_scored(self) -> None:
        if self._groups is not None:
            self._groups.finish_scored()
