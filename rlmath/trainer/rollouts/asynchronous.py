"""Asynchronous rollouts: engines on ranks of their own sample; a step learns from complete groups.

    admit draws -> engines sample and score -> groups arrive -> enough, and none too old soon -> the
    step's groups

Which draws may begin, and which groups a step takes, follows the rules of
`algorithms/partial_rollouts.py`. At step v at most (max_staleness + v + 1) x prompts_per_step
groups have begun, those that selection dropped not counted (AReaL, arXiv:2505.24298, section 5.1).
Of the complete ones a step takes those that were drawn first; it waits where one that it leaves
behind could not be learned in time. When groups arrive depends on the clock, and with it which of
them a step takes. With max_staleness 0 nothing does.

Rank 0 has the connection to the engines; every rank computes the same from what it gives them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlmath.algorithms.partial_rollouts import (
    Leaving,
    UnfinishedGroups,
    draw,
    is_enough,
    leaving,
    left_behind,
    room,
    too_old,
)
from rlmath.algorithms.types import PartialCompletion, ScoredCompletion
from rlmath.checkpoint.unfinished_groups import UNFINISHED, write_unfinished
from rlmath.config.length_curriculum import LengthStage
from rlmath.distributed.bridge import Mailbox
from rlmath.distributed.collectives import broadcast_from_rank_zero
from rlmath.distributed.mesh import Mesh
from rlmath.rollout.called_completions import ENVIRONMENTS, SANDBOXES, check_lost
from rlmath.rollout.collector import CollectGroups, Rollout
from rlmath.rollout.engine_messages import (
    Admit,
    Continue,
    GroupDone,
    Scored,
    ScoreTokens,
    Snapshot,
    TakeSnapshot,
    WeightsTaken,
)
from rlmath.trainer.rollouts.synchronous import (
    RolloutsWithUnfinished,
    StepRollout,
    staleness_metrics,
)

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.2
"""How long rank 0 waits for messages at a time."""

SHARE_SECONDS = 60.0
"""Time after which rank 0 lets the other ranks know that it still waits.

Their collective ends at a timeout."""


@dataclass(frozen=True)
class EngineReport:
    """What an engine did until it took new weights."""

    taken: WeightsTaken
    latency_seconds: float
    """Time from the end of the step that made the weights to an engine's first token with them.

    It is measured by rank 0."""


Samples = tuple[PartialCompletion | ScoredCompletion, ...]


class EngineConnection:
    """The trainers' side of engines on other ranks.

    All ranks call it alike, but `snapshot`; rank 0 has the mailbox."""

    def __init__(
        self, mesh: Mesh, mailbox: Mailbox | None, on_progress: Callable[[], None]
    ) -> None:
        self._mesh = mesh
        self._mailbox = mailbox
        self._on_progress = on_progress
        self.leaders = range(mesh.world_size, mesh.world_size + mesh.engine_ranks, mesh.engine_size)
        """First ranks of the engines."""
        self._done: list[GroupDone] = []
        self._reports: list[EngineReport] = []

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self._mesh.rank == 0

    def send(self, message: object) -> None:
        """Send a message to all engines."""
        for leader in self.leaders:
            self.send_to(leader, message)

    def send_to(self, leader: int, message: object) -> None:
        if self._mailbox is not None and self._mesh.rank == 0:
            self._mailbox.send(leader, message)

    def groups(self) -> list[GroupDone]:
        """The groups that are done and were not returned yet; waits for at least one.

        A collective."""
        while True:
            until = time.monotonic() + SHARE_SECONDS
            while self._mesh.rank == 0 and not self._done and time.monotonic() < until:
                self._read(WAIT_SECONDS)
            groups = broadcast_from_rank_zero(self._done)
            self._done = []
            if groups:
                return groups

    def reports(self) -> list[EngineReport]:
        """The engines' reports that were not returned yet; on rank 0, elsewhere nothing."""
        self._read(0.0)
        reports = self._reports
        self._reports = []
        return reports

    def snapshot(self) -> dict[int, Samples]:
        """Samples in flight in the engines, by draw, and of groups that are done and not returned.

        Call it on rank 0 only."""
        self.send(TakeSnapshot())
        samples_by_draw: dict[int, Samples] = {}
        for snapshot in self._answers(Snapshot, len(self.leaders)):
            samples_by_draw |= snapshot.samples
        return samples_by_draw | {group.draw: group.samples for group in self._done}

    def collect(self, command: CollectGroups) -> Rollout:
        """Let the engines do `Collector.collect`, with the weights that were offered last.

        A collective."""
        self.send(command)
        return self._shared_answers(Rollout, 1)[0]

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[int, list[list[float]]]:
        """Each engine's log-probs of every token but the first of each sequence (nats).

        A collective."""
        self.send(ScoreTokens(sequences))
        return {
            scored.engine: scored.logprobs
            for scored in self._shared_answers(Scored, len(self.leaders))
        }

    def _shared_answers(self, kind: type, count: int) -> list:
        """`_answers` of rank 0, on all ranks.

        A collective."""
        answers: list = []
        while len(answers) < count:
            if self._mesh.rank == 0:
                answers += self._answers(kind, count - len(answers), SHARE_SECONDS)
            answers = broadcast_from_rank_zero(answers)
        return answers

    def _answers(self, kind: type, count: int, seconds: float = math.inf) -> list:
        """Messages of a kind, fewer where they do not come within `seconds`.

        Other messages that come meanwhile are kept."""
        answers: list = []
        until = time.monotonic() + seconds
        while len(answers) < count and time.monotonic() < until:
            answers += self._read(WAIT_SECONDS, kind)
        return answers

    def _read(self, seconds: float, kind: type | None = None) -> list:
        """Keep what has arrived; returns the messages of one kind."""
        messages: list = []
        if self._mailbox is None or self._mesh.rank != 0:
            return messages
        for _, message, arrived_at in self._mailbox.receive(seconds):
            self._on_progress()  # of engines: that this rank waits is no progress
            if kind is not None and isinstance(message, kind):
                messages.append(message)
            elif isinstance(message, GroupDone):
                self._done.append(message)
            elif isinstance(message, WeightsTaken):
                self._reports.append(EngineReport(message, arrived_at - message.learned_at))
            else:
                raise TypeError(f"no message for the trainers: {message!r:.200}")
        return messages


class AsynchronousRollouts(RolloutsWithUnfinished):
    """Takes what the engines have sampled."""

    _engines: EngineConnection
    _begun = False
    _since = 0.0
    """Time at which the last step had its groups, by `time.perf_counter`; 0 before the first."""

    def step(self, number: int, stage: LengthStage) -> StepRollout:
        """Admit draws, and wait until enough groups are complete and none would be too old."""
        self.curriculum.begin(number)
        before = self._unfinished
        unfinished = self._after = replace(before, groups=list(before.groups))
        if not self._begun:
            self._begin(unfinished, stage)
        first = unfinished.next_draw
        started = time.perf_counter()
        leaving_groups = self._wait(unfinished, number, stage)
        waited = time.perf_counter() - started
        taken = self._take(number, leaving_groups, unfinished)
        self._check_lost()
        reports = self._engines.reports()
        ended = time.perf_counter()
        seconds = ended - (self._since or started)
        self._since = ended
        metrics = taken.metrics | {
            "rollout/groups_complete": float(sum(group.is_complete for group in unfinished.groups)),
            "rollout/groups_admitted": float(unfinished.next_draw - first),
            "rollout/staleness_waits": float(leaving_groups.waits),
            "rollout/trainer_busy_share": 1.0 - min(1.0, waited / seconds) if seconds else 1.0,
        }
        metrics |= staleness_metrics(taken.selection.learned, number, self._limits.max_staleness)
        metrics |= engine_report_metrics(reports, len(self._engines.leaders))
        if reports and self._config.tools.format is not None:
            metrics["tools/wait_share"] = _wait_share(reports)
        if reports and self._config.answers_turns:
            metrics["turns/wait_share"] = _wait_share(reports)
        return replace(taken, metrics=metrics)

    def files(self) -> dict[str, bytes]:
        """The state's files, with the groups that the engines are sampling.

        Call it on rank 0 only."""
        if not self._begun:
            return super().files()
        samples_by_draw = self._engines.snapshot()
        groups = [
            replace(group, samples=samples_by_draw.get(group.draw, group.samples))
            for group in self._unfinished.groups
        ]
        return super().files() | {
            UNFINISHED: write_unfinished(replace(self._unfinished, groups=groups))
        }

    # ------------------------------------------------------------ parts of a step

    def _begin(self, unfinished: UnfinishedGroups, stage: LengthStage) -> None:
        """Let the engines go on with what an earlier start left unfinished, each with its share."""
        to_sample = [group for group in unfinished.groups if not group.is_complete]
        leaders = self._engines.leaders
        for place, leader in enumerate(leaders):
            self._engines.send_to(leader, Continue(to_sample[place :: len(leaders)], stage.number))
        self._first = unfinished.next_draw
        self._begun = True

    def _wait(self, unfinished: UnfinishedGroups, number: int, stage: LengthStage) -> Leaving:
        """Admit draws until enough groups are complete, and take out those that leave."""
        rules = self._limits
        steps_left = stage.end - number
        leaving_groups = leaving(unfinished, rules, self._choose)
        waits = 0
        admitted = -1
        while True:
            draw(
                unfinished,
                room(unfinished, leaving_groups, rules, steps_left=steps_left),
                number,
                samples=stage.config.rollout.group_size,
            )
            if unfinished.next_draw != admitted:
                admitted = unfinished.next_draw
                self._engines.send(Admit(self._first, admitted, stage.number))
            enough = is_enough(leaving_groups, rules)
            if enough and not too_old(
                left_behind(unfinished, leaving_groups), rules, number, choose=self._choose
            ):
                break
            if not any(group.unfinished for group in unfinished.groups):
                break
            self._keep(unfinished, self._engines.groups())
            waits += enough
            leaving_groups = leaving(unfinished, rules, self._choose)
        unfinished.groups = left_behind(unfinished, leaving_groups)
        return replace(leaving_groups, waits=waits)

    def _check_lost(self) -> None:
        """Warn of completions of the step that were lost; RuntimeError where many were.

        All completions in an environment count as calling."""
        answers_turns = self._config.answers_turns
        calling = [
            completion
            for group in self._sampled
            for completion in group.completions
            if completion.calls or answers_turns
        ]
        check_lost(
            [completion.calls[-1].output for completion in calling if completion.is_lost],
            calling=len(calling),
            outcome="They leave their groups",
            tells=self._engines.is_first,
            texts=ENVIRONMENTS if answers_turns else SANDBOXES,
        )

    def _keep(self, unfinished: UnfinishedGroups, arrived: Sequence[GroupDone]) -> None:
        """Keep the groups that engines have completed.

        RuntimeError for one that none of them should have sampled."""
        done = {group.draw: group.samples for group in arrived}
        expected = {group.draw for group in unfinished.groups if not group.is_complete}
        if len(done) < len(arrived) or not done.keys() <= expected:
            raise RuntimeError(
                f"engines sampled draws {sorted(done.keys() - expected) or sorted(done)} twice"
            )
        unfinished.groups = [
            replace(group, samples=done.get(group.draw, group.samples))
            for group in unfinished.groups
        ]


def _wait_share(reports: Sequence[EngineReport]) -> float:
    """The share of the engines' time in which they only waited for calls (0 to 1)."""
    seconds = sum(report.taken.seconds for report in reports)
    return sum(report.taken.waiting_seconds for report in reports) / seconds if seconds else 0.0


def engine_report_metrics(reports: Sequence[EngineReport], engines: int) -> dict[str, float]:
    """What the engines did between two versions of the weights.

    They are tokens per second of all engines together, sums of counts, and means of the other
    figures. There need not be one report of each engine."""
    if not reports:
        return {}
    n = len(reports)
    messages = [report.taken for report in reports]
    latencies = [report.latency_seconds for report in reports]
    seconds = sum(message.seconds for message in messages)
    per_second = engines / seconds if seconds else 0.0
    return {
        "rollout/engine_busy_share": sum(message.busy_seconds for message in messages) / seconds
        if seconds
        else 0.0,
        "tokens_per_second/rollout": sum(message.new_tokens for message in messages) * per_second,
        "rollout/sequences_running": sum(message.running for message in messages) / n,
        "rollout/interrupted_sequences": float(sum(message.interrupted for message in messages)),
        "rollout/prefilled_again_tokens": float(
            sum(message.prefilled_again_tokens for message in messages)
        ),
        "rollout/scores_waiting": sum(message.queued_scores for message in messages) / n,
        "sync/latency_s": sum(latencies) / n,
        "sync/latency_s_max": max(latencies),
        "sync/transfer_s": sum(message.transfer_seconds for message in messages) / n,
    }
