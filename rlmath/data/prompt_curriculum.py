"""The prompts that a run draws next, where that depends on how often it solved them.

This is `data.curriculum`.

    base order: place 0, 1, 2, ... -> prompts inside the curriculum are drawn
                                   -> the others wait in a queue; a share of the draws (the floor) takes its oldest

The base order is that of a run without a curriculum, but no place is left out: prompts that are
passed over make a pass shorter. With "none" the draws are those of `PromptOrder`, and pass rates
are only counted.

1. The draws of a step follow from settings and from the state and the groups of earlier steps
   alone: all ranks, and a resumed run, draw the same.
2. A step is always full. No prompt comes twice in it while there is another one.
3. Nothing starves: with N prompts, each of them in every pass of K places, every prompt comes
   within 2 K / (1 - floor) + N / floor + 2 P draws.

The state and the pass rates are a file of every checkpoint, which `data.history_path` of another
run may name:

    {"version": 1, "draws": {...}}                               the state, with a curriculum
    {"query_id": "q-17", "groups": [[3, 8], [5, 8]]}             counts (right, sampled) of the last groups of a prompt
    {"query_id": "q-18", "correct": 8, "sampled": 16}            from elsewhere: one group
"""

# Shape legend: P prompts of one step, N prompts in all, K places of one pass.

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rlmath.algorithms.prompt_history import Counts, CurriculumRules, PromptHistory, Verdict
from rlmath.algorithms.types import ScoredGroup
from rlmath.config.files import open_regular, parse_json
from rlmath.config.schema import DataConfig
from rlmath.data.order import Draw, PromptOrder, Reseed

logger = logging.getLogger(__name__)

HISTORY = "prompt_history.jsonl"
"""The file in a checkpoint, and in the run's folder at its end."""
VERSION = 1
MAX_GROUPS = 1000
"""Most groups of a row that is read."""


def rules_of(data: DataConfig) -> CurriculumRules:
    return CurriculumRules(
        data.curriculum,
        data.solved_samples,
        data.band_low,
        high=data.band_high,
        floor=data.curriculum_floor,
    )


def is_floor_draw(draw: int, floor: float) -> bool:
    """Whether a draw, counted from 0 over the run, takes from the queue.

    `floor` of all draws do, evenly spread.

    >>> [draw for draw in range(12) if is_floor_draw(draw, 0.25)]
    [3, 7, 11]
    """
    return math.floor((draw + 1) * floor) > math.floor(draw * floor)


@dataclass
class DrawState:
    """The state that is carried from draw to draw."""

    next_draw: int = 0
    cursor: int = 0
    """Places of the base order that were examined."""
    looked_at: int = 0
    """The examined places since the current step's first draw: at most 2 K, which have every
    prompt of a pass."""
    batch: list[int] = field(default_factory=list)
    """Prompts that are drawn already of the P of a step."""
    queue: dict[int, None] = field(default_factory=dict)
    """Prompts that were passed over and wait, the longest first."""
    in_flight: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Draws that have not left yet: (prompt, how often it comes before in its batch)."""
    passed_easy: int = 0
    passed_hard: int = 0
    """Places that were passed over so far, by verdict."""
    floor_draws: int = 0
    """Draws so far that took a prompt from the queue since it was its turn."""
    filled_draws: int = 0
    """Draws so far that took a prompt from the queue since a whole pass had no other prompt
    left."""
    reseeds: list[Reseed] = field(default_factory=list)
    """Places from which on the base order is another one."""

    def copy(self) -> DrawState:
        """Containers of its own; what they hold does not change."""
        return replace(
            self,
            batch=list(self.batch),
            queue=dict(self.queue),
            in_flight=dict(self.in_flight),
            reseeds=list(self.reseeds),
        )


class PromptCurriculum:
    """Draws prompts, and counts how often they are solved.

    All ranks call it alike.

    >>> order = PromptOrder(n_prompts=4, prompts_per_step=2, seed=1, shuffle=False)
    >>> history = PromptHistory(4, {0: ((8, 8),)})
    >>> rules = CurriculumRules("band", high=0.9, floor=0.25)
    >>> curriculum = PromptCurriculum(order, ["a", "b", "c", "d"], rules, history)
    >>> [curriculum.begin(step).batch(step) for step in (0, 1)]
    [[1, 2], [3, 0]]
    """

    def __init__(
        self,
        order: PromptOrder,
        prompt_ids: Sequence[str],
        rules: CurriculumRules,
        history: PromptHistory,
    ) -> None:
        """`history` is that of an earlier run; it is copied."""
        assert len(prompt_ids) == order.n_prompts
        self._order = order
        self._rules = rules
        self._ids = list(prompt_ids)
        self._indices = {prompt_id: index for index, prompt_id in enumerate(prompt_ids)}
        self._state = self._after = DrawState()
        """The state, and what the step that is being made has left of it so far."""
        self._set_history(history)

    def _set_history(self, history: PromptHistory) -> None:
        self._history = history.copy()
        self._verdicts: dict[int, Verdict] = {}
        for index in self._history.groups:
            self._update_verdict(index)

    def _update_verdict(self, index: int) -> None:
        verdict = self._rules.verdict(*self._history.totals(index))
        self._verdicts.pop(index, None)
        if verdict is not None:
            self._verdicts[index] = verdict

    @property
    def draws_by_rates(self) -> bool:
        """Whether pass rates decide what is drawn."""
        return self._rules.kind != "none"

    # ------------------------------------------------------------ drawing

    def begin(self, step: int) -> PromptCurriculum:
        """Step `step` begins.

        What it draws is forgotten if it fails before `commit`."""
        self._after = self._state.copy()
        last_rollback = max((reseed.rollback for reseed in self._after.reseeds), default=0)
        for rollback in self._order.rollbacks:
            if rollback.step <= step and rollback.number > last_rollback:
                self._after.reseeds.append(Reseed(self._after.cursor, rollback.number))
        return self

    def batch(self, step: int) -> list[int]:
        """P prompts of a step that samples all that it draws."""
        if not self.draws_by_rates:
            return self._order.batch(step)[1]
        per_step = self._order.prompts_per_step
        return [self.drawn(draw)[1] for draw in range(step * per_step, (step + 1) * per_step)]

    def extra(self, step: int) -> Iterator[int]:
        """All prompts but the step's own, as `PromptOrder.extra`, those passed over last.

        They keep their turn."""
        if not self.draws_by_rates:
            yield from self._order.extra(step)
            return
        step_prompts = set(self._after.batch)
        other_prompts = list(self._order.extra(step, step_prompts))
        yield from (index for index in other_prompts if index not in self._verdicts)
        yield from (index for index in other_prompts if index in self._verdicts)

    def drawn(self, draw: int) -> Draw:
        """A place of all steps' prompts, counted from 0 over the whole run.

        New draws are made one after the other."""
        if not self.draws_by_rates:
            return self._order.drawn(draw)
        state = self._after
        while state.next_draw <= draw:
            self._draw(state)
        return Draw(draw // self._order.prompts_per_step, *state.in_flight[draw])

    def _draw(self, state: DrawState) -> None:
        """Draw the next prompt into the state, as one of its step's batch."""
        if state.next_draw % self._order.prompts_per_step == 0:
            state.batch = []
            state.looked_at = 0
        batch_prompts = set(state.batch)
        index = self._next(state, batch_prompts)
        state.queue.pop(index, None)
        state.in_flight[state.next_draw] = index, state.batch.count(index)
        state.batch.append(index)
        state.next_draw += 1

    def _next(self, state: DrawState, taken: Collection[int]) -> int:
        """The prompt of the next draw that is not `taken`, if there is one.

        A floor draw takes the oldest of the queue. Others take the next prompt of the base order
        inside the curriculum, and queue those that they pass over. After two passes the queue's
        oldest is taken."""
        if is_floor_draw(state.next_draw, self._rules.floor):
            for index in state.queue:
                if index not in taken:
                    state.floor_draws += 1
                    return index
        all_passed_over = (
            len(self._verdicts) == self._order.n_prompts == len(state.queue) + len(taken)
        )
        while state.looked_at < 2 * self._order.n_places and not all_passed_over:
            index = self._place(state)
            state.looked_at += 1
            if index in taken:
                continue
            verdict = self._verdicts.get(index)
            if verdict is None:
                return index
            state.passed_easy += verdict == "easy"
            state.passed_hard += verdict == "hard"
            state.queue.setdefault(index)
        for index in state.queue:
            if index not in taken:
                state.filled_draws += 1
                return index
        return self._place(state)

    def _place(self, state: DrawState) -> int:
        """The prompt of the next place of the base order."""
        state.cursor += 1
        return self._order.place(state.cursor - 1, tuple(state.reseeds))

    # ------------------------------------------------------------ counting

    def commit(
        self, groups: Iterable[ScoredGroup], in_flight: Collection[int] = ()
    ) -> dict[str, float]:
        """Count the step's `groups` and keep the draws `in_flight`: the step is made.

        `groups` are all that it sampled and that leave, in their order; lost completions count for
        nothing. Returns metrics;
        `history/drift` is the mean change of a prompt's pass rate by its new group."""
        state_before = self._state
        state = self._after
        drift: list[float] = []
        for group in groups:
            index = self._indices[group.prompt.prompt_id]
            scores = group.judged.scores
            if not scores:
                continue
            correct = sum(score.correct for score in scores)
            sampled = len(scores)
            correct_before, sampled_before = self._history.totals(index)
            if sampled_before:
                drift.append(correct / sampled - correct_before / sampled_before)
            self._history.record(index, correct, sampled)
            self._update_verdict(index)
        state.in_flight = {
            draw: prompt_and_times
            for draw, prompt_and_times in state.in_flight.items()
            if draw in in_flight
        }
        self._state = state
        n_prompts = self._order.n_prompts
        metrics = {
            f"history/prompts/{name}": float(n)
            for name, n in self._history.buckets(n_prompts).items()
        }
        metrics["history/drift"] = sum(drift) / len(drift) if drift else 0.0
        if self.draws_by_rates:
            draws = max(1, state.next_draw - state_before.next_draw)
            from_queue = (
                state.floor_draws
                + state.filled_draws
                - state_before.floor_draws
                - state_before.filled_draws
            )
            metrics |= {
                "history/skipped_share": len(self._verdicts) / n_prompts,
                "history/floor_share": from_queue / draws,
                "history/passes": state.cursor / self._order.n_places,
            }
        return metrics

    def summary(self) -> dict[str, Any]:
        """Counts for the end of the run: prompts by pass rate, and what was passed over."""
        summary: dict[str, Any] = {"prompts": self._history.buckets(self._order.n_prompts)}
        if self.draws_by_rates:
            state = self._state
            verdicts = list(self._verdicts.values())
            summary |= {
                "curriculum": self._rules.kind,
                "skipped_at_the_end": {kind: verdicts.count(kind) for kind in ("easy", "hard")},
                "places_passed_over": {"easy": state.passed_easy, "hard": state.passed_hard},
                "draws": state.next_draw,
                "draws_from_skipped": state.floor_draws + state.filled_draws,
                "passes": round(state.cursor / self._order.n_places, 3),
            }
        return summary

    def lines(self) -> tuple[str, ...]:
        """The summary in lines for the console."""
        summary = self.summary()
        counts_text = ", ".join(
            f"{name.replace('_', ' ')}: {size}" for name, size in summary["prompts"].items()
        )
        lines = [
            f"Prompts by pass rate (%) of their last {self._history.keep} groups: {counts_text}"
        ]
        if self.draws_by_rates:
            rules = self._rules
            passed = summary["places_passed_over"]
            easy, hard = summary["skipped_at_the_end"].values()
            reason = f"above {rules.high:g}: {easy}, below {rules.low:g}: {hard}"
            if rules.kind == "skip_solved":
                reason = f"all of at least {rules.solved_samples} samples right: {easy}"
            lines.append(
                f'Curriculum "{rules.kind}": {easy + hard} of {self._order.n_prompts} prompts are '
                f"skipped now ({reason}). "
                f"In {summary['draws']} draws {sum(passed.values())} places of the order were "
                "passed over, "
                f"{passed['easy']} as too easy and {passed['hard']} as too hard; "
                f"{summary['draws_from_skipped']} draws "
                "took a skipped prompt"
            )
        return tuple(lines)

    # ------------------------------------------------------------ the file

    def file(self) -> bytes:
        """The content of the file that a checkpoint keeps."""
        header: dict[str, Any] = {"version": VERSION}
        if self.draws_by_rates:
            header["draws"] = asdict(self._state) | {
                "queue": list(self._state.queue),
                "in_flight": [
                    [draw, *prompt_and_times]
                    for draw, prompt_and_times in self._state.in_flight.items()
                ],
                "reseeds": [[reseed.place, reseed.rollback] for reseed in self._state.reseeds],
            }
        rows = (
            {"query_id": self._ids[index], "groups": groups}
            for index, groups in sorted(self._history.groups.items())
        )
        return "".join(json.dumps(row) + "\n" for row in (header, *rows)).encode()

    def forget(self) -> None:
        """Continue without any history."""
        self._state = self._after = DrawState()
        self._set_history(PromptHistory(self._history.keep))

    def require_draws(self, next_draw: int, in_flight: Sequence[int]) -> None:
        """ValueError where these are not the draws of the run that are in flight."""
        state = self._state
        if self.draws_by_rates and (state.next_draw, sorted(state.in_flight)) != (
            next_draw,
            sorted(in_flight),
        ):
            raise ValueError(f"{HISTORY} has other draws in flight")

    def resume(self, content: bytes) -> None:
        """Continue with a checkpoint's file.

        ValueError where it is damaged."""
        try:
            first, *lines = content.decode().splitlines()
            header = json.loads(first)
            if header["version"] != VERSION:
                raise ValueError(f"its form is version {header['version']!r}; needed: {VERSION}")
            if self.draws_by_rates != ("draws" in header):
                raise ValueError("it is that of a run with another data.curriculum")
            state = self._read_state(header["draws"]) if self.draws_by_rates else DrawState()
            groups: dict[int, tuple[Counts, ...]] = {}
            for line in lines:
                prompt_id, rows = read_row(json.loads(line))
                index = self._indices[prompt_id]
                if index in groups:
                    raise ValueError(f"{prompt_id!r} is there twice")
                groups[index] = rows
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{HISTORY} is damaged ({type(error).__name__}: {error})") from error
        self._state = self._after = state
        self._set_history(PromptHistory(self._history.keep, groups))

    def _read_state(self, row: Mapping[str, Any]) -> DrawState:
        prompts = [*row["queue"], *row["batch"], *(index for _, index, _ in row["in_flight"])]
        if any(not 0 <= index < self._order.n_prompts for index in prompts):
            raise ValueError("the state of the draws names other prompts")
        return DrawState(
            **{
                **row,
                "queue": dict.fromkeys(row["queue"]),
                "in_flight": {draw: (index, times) for draw, index, times in row["in_flight"]},
                "reseeds": [Reseed(place, number) for place, number in row["reseeds"]],
            }
        )


# ---------------------------------------------------------------- pass rates from a file


def read_row(row: Any) -> tuple[str, tuple[Counts, ...]]:
    """(name, counts of its groups) of a row of a history.

    ValueError where it is none."""
    if not isinstance(row, dict):
        raise ValueError("not an object")
    names = [row[key] for key in ("query_id", "prompt_id", "id") if key in row]
    if not names or not isinstance(names[0], str):
        raise ValueError('it has no "query_id" that is a text')
    if "groups" in row:
        groups = row["groups"]
        if not isinstance(groups, list) or not 1 <= len(groups) <= MAX_GROUPS:
            raise ValueError(f'"groups" must be a list of 1 to {MAX_GROUPS} pairs [right, sampled]')
    else:
        groups = [[row.get("correct"), row.get("sampled")]]
    return names[0], tuple(map(_read_counts, groups))


def _read_counts(group: Any) -> Counts:
    if not isinstance(group, list) or len(group) != 2 or any(type(n) is not int for n in group):
        raise ValueError(f'"correct" and "sampled" must be whole numbers, got {group!r:.60}')
    correct, sampled = group
    if not 0 <= correct <= sampled or sampled == 0:
        raise ValueError(f"{correct} right of {sampled} sampled completions cannot be")
    return correct, sampled


def read_history(path: str, prompt_ids: Sequence[str], keep: int) -> tuple[PromptHistory, str]:
    """The pass rates of these prompts that a file has, and a line for the console.

    Rows of other prompts are left out. ValueError that names the line where the file cannot be
    used, and where it has none of the prompts."""
    indices = {prompt_id: index for index, prompt_id in enumerate(prompt_ids)}
    groups: dict[int, tuple[Counts, ...]] = {}
    other_rows = 0
    try:
        with open_regular(path) as file:
            lines = file.read().splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"data.history_path: {path} cannot be read ({error})") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line.decode())
            if number == 1 and isinstance(row, dict) and "version" in row:
                continue  # the state of the run that wrote it
            prompt_id, counts = read_row(row)
            index = indices.get(prompt_id)
            if index in groups:
                raise ValueError(f"{prompt_id!r:.80} is there twice")
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"data.history_path: {path}, line {number} is no row of a prompt history "
                f"({error}). Needed: "
                '{"query_id": "...", "correct": 3, "sampled": 8}, or a file that a run wrote'
            ) from error
        if index is None:
            other_rows += 1
        else:
            groups[index] = counts
    if not groups:
        raise ValueError(
            f"data.history_path: {path} has none of the {len(prompt_ids)} prompts "
            f"({other_rows} rows of others); rows are found by query_id. Give the history of this "
            "data, or leave data.history_path null"
        )
    left_out = f"; {other_rows} rows of other prompts are left out" if other_rows else ""
    return PromptHistory(keep, groups), (
        f"History: pass rates of {len(groups)} of {len(prompt_ids)} prompts from {path}{left_out}."
    )
