"""Prompts of the files of a run: which rows are kept, how files are mixed, and which prompts a step uses.

`load_prompts` renders, tokenizes and filters the rows of one file, and reports what became of them. Several files are
mixed by weights (`Share`). `PromptOrder` gives the prompts of a step, as a pure function of the step and of the run's
rollbacks. Where pass rates decide what is drawn, `curriculum` passes over some of its places.
"""

# Shape legend: P prompts of one step, N prompts kept in all, K places of one epoch.

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from rlmath.algorithms.types import Prompt
from rlmath.config.load import without_secrets
from rlmath.config.run_files import DATA_REPORT_FILE, UNUSABLE_ROWS_FILE
from rlmath.data.files import CHARACTERS_PER_TOKEN, PromptRow, UnusableRow, unusable_lines
from rlmath.data.formats import read_prompts
from rlmath.data.tokenizer import (
    drop_special_token_rows,
    prompt_tokens,
    rendered,
    template_of,
    without_template,
)
from rlmath.workers.user_functions import UserFunction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlmath.data.sft_sequences import SequenceReport

EXAMPLES = 3
"""Dropped prompts that are shown."""
_START_CHARS = 60
_CHUNK = 1000
"""Prompts tokenized in one call."""


# ---------------------------------------------------------------- what became of the rows


@dataclass(frozen=True)
class DroppedPrompt:
    """An example of what a filter drops."""

    prompt_id: str
    tokens: int
    reason: str
    """Either "too long" or "empty"."""
    start: str
    """The first characters of its text."""


@dataclass(frozen=True)
class FilterReport:
    """What became of the rows of one file. Lengths are tokens, never characters."""

    read: int
    """Rows that could be used, each once."""
    kept: int
    dropped_too_long: int
    longest_dropped_tokens: int
    """0 when nothing was dropped."""
    max_prompt_tokens: int | None
    """None where rows were only counted, for want of a tokenizer."""
    dropped_empty: int = 0
    """Prompts of which the tokenizer makes no token at all."""
    path: str = ""
    form: str = ""
    """A word of data.format, or a function of the user's."""
    repeated: int = 0
    """Rows that an earlier one equals."""
    unusable: tuple[UnusableRow, ...] = ()
    examples: tuple[DroppedPrompt, ...] = ()
    template: str = ""
    """What is around the first prompt that is kept (`tokenizer.template_of`)."""

    @property
    def dropped(self) -> int:
        return self.dropped_too_long + self.dropped_empty

    def line(self) -> str:
        """One line for the console: what the filter did."""
        name = f"Prompts of {self.path}" if self.path else "Prompts"
        if self.max_prompt_tokens is None:
            return f"{name}: {self.read} rows, lengths not counted."
        if not self.dropped:
            return (
                f"{name}: {self.read} read, all kept; none is longer than"
                f" data.max_prompt_tokens={self.max_prompt_tokens} (lengths counted in tokens)."
            )
        share = 100 * self.dropped_too_long / self.read
        empty = f" {self.dropped_empty} dropped because without any token." if self.dropped_empty else ""
        return (
            f"{name}: {self.read} read, {self.kept} kept, {self.dropped_too_long} dropped ({share:.1f}%)"
            f" because longer than data.max_prompt_tokens={self.max_prompt_tokens} (lengths counted in"
            f" tokens, not characters; the longest has {self.longest_dropped_tokens} tokens).{empty}"
        )

    def lines(self) -> tuple[str, ...]:
        """All lines for the console."""
        form = (f'{self.path} has the form "{self.form}".',) if self.form else ()
        shown = tuple(
            f"  dropped, {one.reason} ({one.tokens} tokens): {one.prompt_id!r}, which begins {one.start!r}"
            for one in self.examples
        )
        lines = [*form, self.line(), *shown]
        if self.repeated:
            lines.append(f"  {self.repeated} further rows repeat earlier ones and are left out.")
        if self.unusable:
            lines.append(
                f"  {len(self.unusable)} rows cannot be used and are left out; a run lists all in {UNUSABLE_ROWS_FILE}:"
            )
            lines += [f"    {line}" for line in unusable_lines(self.path, self.unusable)]
        return tuple(lines)

    def record(self) -> dict:
        """The file's part of data_report.json."""
        rows = self.read + self.repeated + len(self.unusable)
        counts = {
            "kept": self.kept,
            "too_long": self.dropped_too_long,
            "empty": self.dropped_empty,
            "repeated": self.repeated,
            "unusable": len(self.unusable),
        }
        return {
            "path": self.path,
            "format": self.form,
            "rows": rows,
            **counts,
            "shares": {name: count / rows for name, count in counts.items()},
            "max_prompt_tokens": self.max_prompt_tokens,
            "longest_dropped_tokens": self.longest_dropped_tokens,
            "examples_dropped": [asdict(one) for one in self.examples],
        }


def dropped_share(reports: Sequence[FilterReport | SequenceReport]) -> float:
    """Share of the prompts that could be used and that a filter dropped (0 to 1)."""
    return sum(report.dropped for report in reports) / max(1, sum(report.read for report in reports))


def write_report(folder: str | Path, reports: Sequence[FilterReport | SequenceReport]) -> None:
    """data_report.json and unusable_rows.jsonl (empty where all rows are used) in a folder that is there."""
    whole = {
        "prompts": sum(report.kept for report in reports),
        "dropped_share": dropped_share(reports),
        "files": [report.record() for report in reports],
    }
    _write(Path(folder) / DATA_REPORT_FILE, [json.dumps(whole, indent=2)])
    rows = (json.dumps(asdict(row)) for report in reports for row in report.unusable)
    _write(Path(folder) / UNUSABLE_ROWS_FILE, rows)


def _write(file: Path, lines: Iterable[str]) -> None:
    scratch = file.with_name(f".{file.name}.tmp")
    with scratch.open("w", encoding="utf-8") as stream:
        stream.writelines(f"{without_secrets(line)}\n" for line in lines)
    os.replace(scratch, file)


# ---------------------------------------------------------------- prompts of a file


def load_prompts(
    path: str,
    tokenizer: PreTrainedTokenizerFast | None,
    max_prompt_tokens: int,
    form: str | UserFunction = "auto",
    template: str | UserFunction = "auto",
    max_unusable_share: float = 0.01,
) -> tuple[list[Prompt], FilterReport]:
    """Prompts of the file or folder that have at most `max_prompt_tokens` tokens, in its order.

    Tokenized with the special tokens that the tokenizer adds by itself (often a beginning of sequence, of which a
    template's own is not doubled). Without a tokenizer, as for a dry run, rows are kept whatever their length, and
    have no tokens. Errors: ValueError for a file that cannot be read, for more rows that cannot be used than the
    share, and when no prompt is left.
    """
    if max_prompt_tokens < 1:
        raise ValueError(f"data.max_prompt_tokens is {max_prompt_tokens}; it must be at least 1")
    file = read_prompts(path, form, CHARACTERS_PER_TOKEN * max_prompt_tokens)
    if tokenizer is not None:
        file = drop_special_token_rows(file, template, tokenizer)
    if file.unusable_share > max_unusable_share:
        reasons = "".join(f"\n    {line}" for line in unusable_lines(path, file.unusable))
        raise ValueError(
            f"{path}: {len(file.unusable)} rows, {100 * file.unusable_share:.3g}% of all, cannot be used, more than "
            f"data.max_unusable_share={max_unusable_share:g} allows. Mend the file, or raise data.max_unusable_share. "
            f"How many, and why:{reasons}"
        )
    prompts: list[Prompt] = []
    dropped: list[DroppedPrompt] = []
    first_template = ""
    for row, text, ids in _tokenized(file.rows, template, tokenizer):
        if tokenizer is None or 0 < len(ids) <= max_prompt_tokens:
            prompts.append(as_prompt(row, text, ids))
            if len(prompts) == 1 and tokenizer is not None:
                first_template = template_of(row, template, tokenizer)
        else:
            reason = "too long" if ids else "empty"
            dropped.append(DroppedPrompt(row.query_id, len(ids), reason, row.prompt[:_START_CHARS]))
    empty = sum(one.reason == "empty" for one in dropped)
    report = FilterReport(
        read=len(file.rows),
        kept=len(prompts),
        dropped_too_long=len(dropped) - empty,
        longest_dropped_tokens=max((one.tokens for one in dropped), default=0),
        max_prompt_tokens=None if tokenizer is None else max_prompt_tokens,
        dropped_empty=empty,
        path=path,
        form=file.form,
        repeated=file.repeated,
        unusable=tuple(file.unusable),
        examples=tuple(dropped[:EXAMPLES]),
        template=first_template,
    )
    if not prompts:
        raise ValueError(
            f"{path}: all {report.read} prompts are longer than"
            f" data.max_prompt_tokens={max_prompt_tokens} tokens (the longest has {report.longest_dropped_tokens})"
            " or have no token at all; raise data.max_prompt_tokens, or give prompts that this tokenizer knows"
        )
    return prompts, report


def as_prompt(row: PromptRow, text: str, token_ids: Sequence[int]) -> Prompt:
    """A row that is kept, rendered and tokenized."""
    ids = tuple(token_ids)
    return Prompt(row.query_id, text, ids, row.solutions, row.task, row.more_json, problem_key(row.prompt))


def problem_key(problem: str) -> int:
    """The same number for texts that differ in white space, case, dollars, a last mark or one of our templates only;
    above 0.

    >>> problem_key("What is $47 + 85$?") == problem_key("what is 47+85") != problem_key("What is 47-85?")
    True
    """
    plain = "".join(without_template(problem).casefold().replace("$", "").split()).rstrip(".?:=")
    return 1 + int.from_bytes(hashlib.blake2b(plain.encode(), digest_size=7).digest(), "big")


def _tokenized(
    rows: list[PromptRow], template: str | UserFunction, tokenizer: PreTrainedTokenizerFast | None
) -> Iterator[tuple[PromptRow, str, list[int]]]:
    """(row, text, tokens) of every row; without a tokenizer as it stands, and no tokens."""
    if tokenizer is None:
        yield from ((row, row.prompt, []) for row in rows)
        return
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        texts = rendered(chunk, template, tokenizer)
        yield from zip(chunk, texts, prompt_tokens(texts, tokenizer), strict=True)


# ---------------------------------------------------------------- several files


@dataclass(frozen=True)
class Share:
    """One file of a mixture.

    >>> Share(n_prompts=10, weight=0.25).places
    3
    """

    n_prompts: int
    weight: float
    """How often its prompts come in one epoch: 1 once, 0.5 half of them, 2 twice."""

    @property
    def places(self) -> int:
        """Prompts that it gives to every epoch: weight x prompts, rounded up from a half on, at least 1."""
        return max(1, math.floor(self.weight * self.n_prompts + 0.5))


def shares_of(counts: Sequence[int], weights: Sequence[float]) -> tuple[Share, ...]:
    """One for each file; without weights all prompts come once."""
    return tuple(Share(*one) for one in zip(counts, weights or [1.0] * len(counts), strict=True))


def shuffled_range(n: int, name: str) -> tuple[int, ...]:
    """0 .. n-1 in the order of the SHA-256 of "name:index": whatever the libraries' versions."""
    return tuple(sorted(range(n), key=lambda index: hashlib.sha256(f"{name}:{index}".encode()).digest()))


@lru_cache(maxsize=2)
def epoch_order(shares: tuple[Share, ...], seed: int, epoch: int, shuffle: bool) -> tuple[int, ...]:
    """K prompt indices of an epoch, counted over all files one behind the other.

    Each file has an endless sequence of its prompts, one permutation after the other, and gives the next of them to
    each epoch: with weight 0.5 an epoch has one half, and the next epoch the other. Then all are shuffled. Without
    `shuffle` the sequence is the file over and over, and the files stand one behind the other.
    """
    indices: list[int] = []
    first = 0
    for number, share in enumerate(shares):
        n = share.n_prompts
        start, stop = epoch * share.places, (epoch + 1) * share.places
        for turn in range(start // n, (stop - 1) // n + 1):
            order = shuffled_range(n, f"{seed}:file{number}:{turn}") if shuffle else range(n)
            indices += (first + index for index in order[max(0, start - turn * n) : stop - turn * n])
        first += n
    if not shuffle:
        return tuple(indices)
    return tuple(indices[place] for place in shuffled_range(len(indices), f"{seed}:{epoch}"))


def weighted_permutation(shares: Sequence[Share], name: str) -> list[int]:
    """All prompts, those of heavier files likelier to come early (Efraimidis and Spirakis 2006)."""
    keyed: list[tuple[float, int]] = []
    for share in shares:
        for index in range(len(keyed), len(keyed) + share.n_prompts):
            digest = hashlib.sha256(f"{name}:{index}".encode()).digest()
            uniform = (int.from_bytes(digest[:7], "big") + 1) / 2**56
            keyed.append((-math.log(uniform) / share.weight, index))
    return [index for _, index in sorted(keyed)]


def check_weights(paths: Sequence[str], weights: Sequence[float]) -> None:
    """ValueError where there is not one weight for each file, or a file comes twice."""
    if weights and len(weights) != len(paths):
        raise ValueError(
            f"data.train_weights has {len(weights)} numbers for {len(paths)} files (data.train_path, then "
            "data.more_train_paths); give one for each, or none"
        )
    places = [os.path.realpath(path) for path in paths]
    twice = [path for number, path in enumerate(paths) if places[number] in places[:number]]
    if twice:
        raise ValueError(
            f"data.more_train_paths: {twice[0]!r} is there twice; to have its prompts more often, use "
            "data.train_weights"
        )


def with_unique_names(files: Sequence[tuple[str, Sequence[Prompt]]]) -> list[Prompt]:
    """The prompts of all (path, prompts); a name that an earlier file has, too, gets its file's name before it."""
    used: set[str] = set()
    found: list[Prompt] = []
    for number, (path, prompts) in enumerate(files, start=1):
        own = {prompt.prompt_id for prompt in prompts}
        for prompt in prompts:
            name = prompt.prompt_id
            if name in used:
                name = f"{Path(path).stem}/{name}"
                if name in used or name in own:
                    name = f"{number}:{name}"
                while name in used or name in own:
                    name += "'"
            used.add(name)
            found.append(prompt if name == prompt.prompt_id else replace(prompt, prompt_id=name))
    return found


# ---------------------------------------------------------------- order


@dataclass(frozen=True)
class Rollback:
    """A return of the run to an earlier checkpoint (`algorithm.rollback`)."""

    number: int
    """Counted from 1 over the run."""
    step: int
    """Steps done in that checkpoint."""
    draw_step: int
    """The first step whose prompts and samples have another seed; later than `step` where groups were in flight."""


def seed_after(run_seed: int, rollbacks: int) -> int:
    """The seed that takes the place of `run.seed` after so many rollbacks: 31 bits of the SHA-256 of both.

    >>> seed_after(1, 0), seed_after(1, 1) != seed_after(1, 2)
    (1, True)
    """
    if rollbacks == 0:
        return run_seed
    digest = hashlib.sha256(f"{run_seed}:rollback:{rollbacks}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class PromptOrder:
    """Which prompts a step uses: a pure function of the step, so that resuming needs no cursor but the step.

    Each epoch has its own order, a permutation drawn from (seed, epoch), of K = N places; with weights K is another
    number, and a prompt may come more than once (see `epoch_order`). Only whole steps are used: the last
    K modulo P places of every epoch's order are left out; with `shuffle` they are others each epoch, without it they
    are always the last ones.

    >>> PromptOrder(n_prompts=5, prompts_per_step=2, seed=1, shuffle=False).batch(3)
    (1, [2, 3])
    """

    def __init__(
        self, n_prompts: int, prompts_per_step: int, seed: int, shuffle: bool, shares: tuple[Share, ...] = ()
    ) -> None:
        """`shares` are the files that the prompts come from, one behind the other; without them, or with weight 1
        for all, every prompt comes once an epoch. Raises ValueError when a step asks for more prompts than an epoch
        has."""
        assert not shares or sum(share.n_prompts for share in shares) == n_prompts, (shares, n_prompts)
        self.shares = shares if any(share.weight != 1 for share in shares) else ()
        self.n_places = sum(share.places for share in self.shares) or n_prompts
        if prompts_per_step < 1:
            raise ValueError(f"data.prompts_per_step is {prompts_per_step}; it must be at least 1")
        if prompts_per_step > self.n_places:
            weighted = f", which data.train_weights makes {self.n_places} an epoch" if self.shares else ""
            left = "1 prompt is" if n_prompts == 1 else f"{n_prompts} prompts are"
            raise ValueError(
                f"data.prompts_per_step is {prompts_per_step}, but only {left} left after"
                f" filtering{weighted}; lower data.prompts_per_step or give more prompts"
            )
        self.n_prompts = n_prompts
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.shuffle = shuffle
        self.rollbacks: tuple[Rollback, ...] = ()
        """Those of the run that still count (`roll_back`)."""

    @property
    def steps_per_epoch(self) -> int:
        return self.n_places // self.prompts_per_step

    @property
    def left_out_per_epoch(self) -> int:
        """Places of an epoch that fill no whole step."""
        return self.n_places % self.prompts_per_step

    def roll_back(self, rollbacks: Iterable[Rollback]) -> None:
        """The run's rollbacks, in their order. From `draw_step` of each on, what is left of its epoch comes in another
        order, and so do all later epochs: no prompt of the discarded steps is lost, each is drawn again in what is left
        of the epoch. Samples have another seed (`seed_at`). Without `shuffle` the order stays."""
        self.rollbacks = ()
        for one in rollbacks:
            before = tuple(other for other in self.rollbacks if other.draw_step < one.draw_step)
            self.rollbacks = (*before, one)

    def seed_at(self, step: int) -> int:
        """The seed of what a step samples: `run.seed`, until the run goes back to a checkpoint."""
        number = max((one.number for one in self.rollbacks if one.draw_step <= step), default=0)
        return seed_after(self.seed, number)

    def batch(self, step: int) -> tuple[int, list[int]]:
        """(epoch, P prompt indices) of a step; both step and epoch count from 0 over the whole run."""
        assert step >= 0, step
        per_step = self.prompts_per_step
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        first = step_in_epoch * per_step
        changes = []
        for one in self.rollbacks:
            changed, within = divmod(one.draw_step, self.steps_per_epoch)
            changes.append((changed, within * per_step, one.number))
        order_K = self._epoch(epoch, changes, self.steps_per_epoch * per_step)
        return epoch, [order_K[position] for position in range(first, first + per_step)]

    def place(self, number: int, reseeds: Sequence[tuple[int, int]] = ()) -> int:
        """The prompt of a place of the endless order, which leaves no place out, counted from 0 over all epochs.
        `reseeds` are (place, number of the rollback) from which on the order is another one, by rising place."""
        epoch, within = divmod(number, self.n_places)
        changes = [(*divmod(place, self.n_places), rollback) for place, rollback in reseeds]
        return self._epoch(epoch, changes, self.n_places)[within]

    def _epoch(self, epoch: int, changes: Sequence[tuple[int, int, int]], used: int) -> Sequence[int]:
        """K prompt indices of an epoch, of which `used` are used. `changes` are (epoch, place in it, rollback)."""
        if not self.shuffle:
            return self._as_drawn(epoch)
        earlier = [(0, rollback) for changed, _, rollback in changes if changed < epoch][-1:]
        now = [(place, rollback) for changed, place, rollback in changes if changed == epoch]
        if not (earlier or now):
            return self._as_drawn(epoch)
        shares = self.shares or (Share(self.n_prompts, 1.0),)
        return _reordered(shares, bool(self.shares), self.seed, epoch, (*earlier, *now), used)

    def _as_drawn(self, epoch: int) -> Sequence[int]:
        if self.shares:
            return epoch_order(self.shares, self.seed, epoch, self.shuffle)
        return permutation(self.n_prompts, self.seed, epoch) if self.shuffle else range(self.n_prompts)

    def drawn(self, draw: int) -> tuple[int, int, int]:
        """(step, prompt index, how often the same prompt comes before it in that step) of a place of all steps'
        prompts, counted from 0 over the whole run.

        >>> PromptOrder(n_prompts=5, prompts_per_step=2, seed=1, shuffle=False).drawn(7)
        (3, 3, 0)
        """
        step, place = divmod(draw, self.prompts_per_step)
        indices = self.batch(step)[1]
        return step, indices[place], indices[:place].count(indices[place])

    def extra(self, step: int, own: Collection[int] | None = None) -> Iterator[int]:
        """All prompts that are not the step's `own` (None: those of `batch`), in an order drawn from (seed, step): what
        dynamic sampling takes when groups are dropped. They keep their turn in the epochs' orders. Prompts of heavier
        files come earlier."""
        taken = set(self.batch(step)[1] if own is None else own)
        name, shares = f"{self.seed_at(step)}:extra:{step}", self.shares
        order_N = weighted_permutation(shares, name) if shares else shuffled_range(self.n_prompts, name)
        yield from (index for index in order_N if index not in taken)

    def line(self) -> str:
        """One line for the console."""
        count = self.left_out_per_epoch
        left_out = f"; the {count} that fill no whole step are left out of each epoch" if count else ""
        places = f" ({self.n_places} places an epoch by data.train_weights)" if self.shares else ""
        return (
            f"Order: {self.steps_per_epoch} steps per epoch,"
            f" {self.prompts_per_step} of {self.n_prompts} prompts{places} a step,"
            f" {'shuffled in every epoch' if self.shuffle else 'in the order of the file'}{left_out}."
        )


@lru_cache(maxsize=2)
def permutation(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    """0 .. n-1 in the order of an epoch."""
    return shuffled_range(n, f"{seed}:{epoch}")


@lru_cache(maxsize=4)
def _reordered(
    shares: tuple[Share, ...],
    weighted: bool,
    seed: int,
    epoch: int,
    changes: tuple[tuple[int, int], ...],
    used: int,
) -> tuple[int, ...]:
    """An epoch's order in which each of `changes`, (place, rollback), has shuffled anew what lies between the place and
    `used`."""
    order = (
        epoch_order(shares, seed, epoch, True) if weighted else permutation(shares[0].n_prompts, seed, epoch)
    )
    for place, rollback in changes:
        rest = order[place:used]
        shuffled = shuffled_range(len(rest), f"{seed_after(seed, rollback)}:{epoch}:from {place}")
        order = (*order[:place], *(rest[index] for index in shuffled), *order[used:])
    return order
