"""Data audit: what a user should see before a run, a rendered prompt and problems of the files.

Nothing here ends a run, except that no training prompt has a reference that could be answered.
References are compared as strings, without the parser: 100,000 take some two seconds.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from rlmath.algorithms.types import Prompt
from rlmath.answers.extraction import extract_answer
from rlmath.answers.string_match import gold_answer
from rlmath.answers.verifier import TASKS, Rules, usable_solutions, verify_by_string
from rlmath.config.schema import DataConfig, RewardConfig
from rlmath.config.terminal import excerpt
from rlmath.data.chat import ChatSettings, chat_end
from rlmath.data.loader import FilterReport
from rlmath.data.picture import prompt_picture, sequence_picture
from rlmath.data.rows import grouped
from rlmath.data.sft_sequences import SequenceReport, WrittenSequence
from rlmath.data.tokenizer import characters_without_token, unknown_token_ids, without_template
from rlmath.data.tool_fences import FenceFormat
from rlmath.rewards.several_rewards import is_verified

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EXAMPLES = 3
"""Prompts named with a finding."""
PROSE_WORDS = 12
"""A reference with so many words is a sentence, not an answer."""
SENTENCE = "is a sentence, not an answer"
"""The reason that refuses no run: the same words are right, and there are tasks that ask for
them."""

_NO_ANSWER = re.compile(
    r"(?:please )?(?:see|refer to) .*"
    r"|(?:the )?(?:proof|solution|answer)(?: is)? (?:omitted|above|below|attached|not (?:given|"
    r"available|provided))"
    r"|(?:the )?proof|answers? (?:may|will|can) vary|nan|null|todo|tbd|not (?:given|available|"
    r"applicable|provided)"
    r"|n/a|q\.e\.d",
    re.IGNORECASE | re.DOTALL,
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s?\{([^{}]*)\}")


T = TypeVar("T")
PromptsOfFile = tuple[str, Sequence[Prompt]]
"""A file, or the name of a validation file, and its prompts."""


@dataclass(frozen=True)
class Finding:
    """A problem of the data: its kind and extent, its effect on the run, and what to change."""

    text: str
    examples: tuple[str, ...]
    """First prompts, at most EXAMPLES, or kinds of references; each is cut and on one line."""


@dataclass(frozen=True)
class DataAudit:
    """The prompt shown, a summary of what was compared, and the findings."""

    shown: tuple[str, ...] = ()
    """A prompt as the model reads it, or a sequence as it is learned, in lines for the console."""
    summary: str = ""
    findings: tuple[Finding, ...] = ()

    def lines(self) -> tuple[str, ...]:
        return (*self.shown, self.summary) if self.summary else ()

    def warnings(self, examples: int = 1) -> tuple[str, ...]:
        """The findings, each with its first examples below it."""
        return tuple(
            "\n  ".join([finding.text, *finding.examples[:examples]]) for finding in self.findings
        )


# ---------------------------------------------------------------- one prompt, as the model reads it


def prompt_lines(
    prompt: Prompt, report: FilterReport, data: DataConfig, tokenizer: PreTrainedTokenizerFast
) -> tuple[str, ...]:
    """The first prompt of a file for the console."""
    assert report.first_row is not None
    template = report.template
    placement = "as it stands in the file" if template == "raw" else f'in the template "{template}"'
    return (
        f"A prompt as the model reads it: {excerpt(prompt.prompt_id, 40)!r} of {report.path},",
        f"  {placement} (data.template={data.template}),",
        f"  {_tokens(prompt.text, prompt.token_ids, tokenizer)}; │ ends a token:",
        *prompt_picture(
            prompt.text,
            report.first_row,
            template,
            tokenizer,
            system_prompt=data.system_prompt,
            token_ids=prompt.token_ids,
        ),
    )


def sequence_lines(
    report: SequenceReport,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    fences: FenceFormat | None = None,
) -> tuple[str, ...]:
    """The first sequence of a file for the console."""
    if report.example is None:
        return ()
    text, sequence = report.example
    return (
        f"A sequence as it is learned, of {report.path} (data.template={data.template}),",
        f"  {_tokens(text.prompt.text, sequence.prompt_ids + sequence.completion_ids, tokenizer)}; "
        "│ ends a token;",
        f"  the {sequence.n_learned} of lines with * are learned:",
        *sequence_picture(
            text.pieces,
            text.row,
            text.answer,
            template=text.template,
            tokenizer=tokenizer,
            system_prompt=data.system_prompt,
            prompt_ids=sequence.prompt_ids,
            last_token=sequence.completion_ids[-1],
            fences=fences,
        ),
    )


def _tokens(text: str, token_ids: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> str:
    unknown = unknown_token_ids(tokenizer)
    missing_characters = characters_without_token(text, tokenizer)
    left_out = f", no token for {_characters(missing_characters)}" if missing_characters else ""
    return (
        f"{len(token_ids)} tokens, {sum(token in unknown for token in token_ids)} of them "
        f"unknown{left_out}"
    )


def _characters(characters: Iterable[str]) -> str:
    return excerpt(
        " ".join("(space)" if character == " " else character for character in sorted(characters)),
        40,
    )


# ---------------------------------------------------------------- GRPO: prompts and validation


def audit_prompts(
    training: Sequence[PromptsOfFile],
    validation: Sequence[PromptsOfFile],
    reward: RewardConfig,
    tokenizer: PreTrainedTokenizerFast | None,
    shown: tuple[str, ...] = (),
    earlier_findings: Sequence[Finding] = (),
) -> DataAudit:
    """Audit the prompts of all files; `earlier_findings` come first.

    With a reward function of the user's, references are not judged. ValueError where no training
    prompt has a reference that an answer could equal."""
    started = time.monotonic()
    n_validated = sum(len(problems) for _, problems in validation)
    prompts = [prompt for _, prompts_of_file in training for prompt in prompts_of_file]
    findings = [*earlier_findings, *_unknown_in(prompts, tokenizer)]
    if tokenizer is not None:
        for name, prompts_of_file in (*training, *validation):
            findings += ends_and_beginnings(name, prompts_of_file, tokenizer)
    findings += _overlaps(training, validation)
    findings += _in_earlier_file(
        training, "problems", lambda prompt: prompt.problem_key, shown=_named
    )
    compared = f"{len(prompts)} prompts and {n_validated} of validation compared"
    if is_verified(reward):
        rules = Rules(reward.answer_from, protocol=not reward.strict)
        for _, problems in validation:
            findings += _reference_findings(
                _unanswerable(problems, rules), len(problems), "validation"
            )
        unanswerable = _unanswerable(prompts, rules)
        findings += _reference_findings(unanswerable, len(prompts), "training")
        _raise_if_none_is_usable(prompts, unanswerable)
        compared += ", the references of all judged as answers to themselves"
    return DataAudit(shown, _summary(compared, findings, started), tuple(findings))


def audit_benchmarks(
    files: Sequence[PromptsOfFile], tokenizer: PreTrainedTokenizerFast, verified: bool
) -> tuple[str, ...]:
    """Warnings about prompts that end before the answer begins, or begin twice.

    Where the prompts are `verified`, also about those without a reference that an answer could
    equal, with the default settings."""
    findings: list[Finding] = []
    for name, prompts in files:
        findings += ends_and_beginnings(name, prompts, tokenizer)
        if verified:
            findings += _reference_findings(_unanswerable(prompts, Rules()), len(prompts), name)
    return DataAudit(findings=tuple(findings)).warnings(EXAMPLES)


def _summary(compared: str, findings: Sequence[Finding], started: float) -> str:
    outcome = (
        f"{len(findings)} warning{'s' * (len(findings) != 1)}." if findings else "nothing odd."
    )
    return f"Data audit ({time.monotonic() - started:.1f} s): {compared}: {outcome}"


def _unknown_in(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerFast | None
) -> Iterator[Finding]:
    """A finding where the tokenizer does not know a part of the prompts' texts."""
    if tokenizer is None:
        return
    characters: set[str] = set()
    for prompt in prompts:
        characters.update(prompt.text)
    missing_characters = characters_without_token(characters, tokenizer)
    unknown = unknown_token_ids(tokenizer)
    unreadable = [
        prompt
        for prompt in prompts
        if not unknown.isdisjoint(prompt.token_ids)
        or (missing_characters and not missing_characters.isdisjoint(prompt.text))
    ]
    if unreadable:
        parts = (
            f"parts of {len(unreadable)} of {len(prompts)} prompts, which the model cannot read."
        )
        yield _unknown(parts, missing_characters, _named(unreadable))


def _unknown(sentence_end: str, lost: Collection[str], examples: tuple[str, ...]) -> Finding:
    left_out = f" It has no token for {_characters(lost)}." if lost else ""
    return Finding(
        f"The tokenizer does not know {sentence_end}{left_out} Use the tokenizer that belongs to "
        "the model, or other characters.",
        examples,
    )


def ends_and_beginnings(
    name: str, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerFast
) -> Iterator[Finding]:
    """Prompts of a file that end before the answer, or begin twice, as their tokens show."""
    return _ends_and_beginnings(
        name, prompts, lambda prompt: prompt.token_ids, shown=_named, tokenizer=tokenizer
    )


def _ends_and_beginnings(
    name: str,
    prompts: Sequence[T],
    token_ids: Callable[[T], Sequence[int]],
    shown: Callable[[Sequence[T]], tuple[str, ...]],
    tokenizer: PreTrainedTokenizerFast,
) -> Iterator[Finding]:
    """Findings about prompts that end with the mark of an end, or begin a sequence twice."""
    ends = {
        token for token in (chat_end(tokenizer), tokenizer.eos_token_id) if isinstance(token, int)
    }
    beginning = tokenizer.bos_token_id
    with_end = [prompt for prompt in prompts if _last_token(token_ids(prompt), tokenizer) in ends]
    if with_end:
        yield Finding(
            f"{len(with_end)} of the {len(prompts)} prompts of {name} end with the mark of an end, "
            "before the answer "
            "begins: the model would answer behind its own end. Use a template that begins the "
            "answer "
            "(add_generation_prompt), or take the mark out of the rows.",
            shown(with_end),
        )
    begun_twice = [
        prompt for prompt in prompts if list(token_ids(prompt)[:2]) == [beginning, beginning]
    ]
    if begun_twice:
        yield Finding(
            f"{len(begun_twice)} of the {len(prompts)} prompts of {name} begin with the "
            "beginning of sequence twice. Take it out of the chat template, or of the rows.",
            shown(begun_twice),
        )


def _last_token(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The last token that is more than white space; None where there is none."""
    return next(
        (token for token in reversed(token_ids) if str(tokenizer.decode([token])).strip()), None
    )


def _overlaps(
    training: Sequence[PromptsOfFile], validation: Sequence[PromptsOfFile]
) -> Iterator[Finding]:
    """Findings about validation problems that are trained on, too."""
    for name, problems in validation:
        keys = {prompt.problem_key for prompt in problems}
        for path, prompts in training:
            trained_keys = {prompt.problem_key for prompt in prompts} & keys
            shared = [prompt for prompt in problems if prompt.problem_key in trained_keys]
            if shared:
                yield Finding(
                    f'{len(shared)} of the {len(problems)} problems of validation "{name}" are '
                    "trained on, too, in "
                    f"{path}: their accuracy says nothing of new problems. Take them out of one "
                    "of the two files.",
                    _named(shared),
                )


def _in_earlier_file(
    files: Sequence[tuple[str, Sequence[T]]],
    noun: str,
    key: Callable[[T], Hashable],
    shown: Callable[[Sequence[T]], tuple[str, ...]],
) -> Iterator[Finding]:
    """Prompts that an earlier file has, too, by their keys."""
    earlier_keys: set[Hashable] = set()
    for path, prompts in files:
        repeated = [prompt for prompt in prompts if key(prompt) in earlier_keys]
        earlier_keys.update(map(key, prompts))
        if repeated:
            yield Finding(
                f"{len(repeated)} of the {len(prompts)} {noun} of {path} are in an earlier "
                "file, too, and come more often "
                "than data.train_weights says. Take them out of one of the files.",
                shown(repeated),
            )


def _named(prompts: Sequence[Prompt]) -> tuple[str, ...]:
    return tuple(
        f"{excerpt(prompt.prompt_id, 40)!r}: {excerpt(without_template(prompt.text), 60)}"
        for prompt in prompts[:EXAMPLES]
    )


def without_conversation(reports: Sequence[FilterReport], settings: ChatSettings) -> list[Finding]:
    """Settings of conversations, and files of whole prompts, which do not have them."""
    paths = [report.path for report in reports if report.template == "raw"]
    if not settings.given or not paths:
        return []
    text = (
        f"{', '.join(settings.given)} {'do' if settings.given[1:] else 'does'} nothing for the "
        "whole prompts of "
        f"{', '.join(paths)}, which are taken as they stand. Give problems or messages there."
    )
    return [Finding(text, ())]


# ---------------------------------------------------------------- references


def _reference_findings(
    wrong: Sequence[tuple[Prompt, str]], count: int, kind: str
) -> Iterator[Finding]:
    if wrong:
        yield Finding(
            f"{len(wrong)} of {count} {kind} prompts have no usable reference: hardly any answer "
            "of a model could "
            "be right. Mend these rows or take them out.",
            _by_reason(wrong),
        )


def _raise_if_none_is_usable(
    prompts: Sequence[Prompt], wrong: Sequence[tuple[Prompt, str]]
) -> None:
    if len(wrong) < len(prompts) or any(reason == SENTENCE for _, reason in wrong):
        return
    examples = "".join(f"\n    {line}" for line in _by_reason(wrong))
    raise ValueError(
        f"none of the {len(prompts)} training prompts has a reference that an answer could equal: "
        "nothing could be "
        "learned. Give references such as 132 or \\frac{1}{2}, or set reward.function. How many, "
        "and why:"
        f"{examples}"
    )


def _by_reason(wrong: Sequence[tuple[Prompt, str]]) -> tuple[str, ...]:
    examples = (
        f"{excerpt(prompt.prompt_id, 40)!r}: {excerpt(prompt.solutions[0], 40)!r}"
        for prompt, _ in wrong
    )
    return tuple(
        grouped(
            (f"the reference {reason}", name)
            for (_, reason), name in zip(wrong, examples, strict=True)
        )
    )


def _unanswerable(prompts: Iterable[Prompt], rules: Rules) -> list[tuple[Prompt, str]]:
    """Prompts that no answer could equal, each with the reason of its first reference."""
    unanswerable: list[tuple[Prompt, str]] = []
    for prompt in prompts:
        reasons = [_reason(solution, rules) for solution in prompt.solutions]
        if all(reasons):
            unanswerable.append((prompt, reasons[0]))
    return unanswerable


def all_are_checkable(prompts: Iterable[Prompt], rules: Rules) -> bool:
    """Whether the verifier can tell for every prompt whether an answer is right.

    For that each prompt needs a reference that an answer could equal."""
    return all(
        prompt.task in TASKS and not all(_reason(solution, rules) for solution in prompt.solutions)
        for prompt in prompts
    )


def _reason(solution: str, rules: Rules) -> str:
    """Why no answer equals a reference; "" where one does, and where only the parser could tell."""
    if not usable_solutions([solution]):
        return f"has {len(solution):,} characters, too many to be compared"
    gold = gold_answer(solution)
    content = _WRAPPED.sub(r"\1", gold).strip(" $.\n\t")
    if _NO_ANSWER.fullmatch(content):
        return "says that the answer is elsewhere"
    if len(_WORD.findall(content)) >= PROSE_WORDS:
        return SENTENCE
    # Without a tag the answer is taken from the reference's own box.
    is_boxed = gold != solution and "<" not in solution
    completion = f"\\boxed{{{solution}}}" if gold == solution else solution
    answer = gold if is_boxed else extract_answer(completion, rules.answer_from)
    verdict = verify_by_string(answer, [gold], rules)
    if verdict is None or verdict.correct:
        return ""
    return f"is not accepted as its own answer ({verdict.verdict})"


# ---------------------------------------------------------------- supervised training: sequences


def audit_sequences(
    training: Sequence[tuple[str, Sequence[WrittenSequence]]],
    held_out: Sequence[WrittenSequence],
    reports: Sequence[SequenceReport],
    tokenizer: PreTrainedTokenizerFast,
    shown: tuple[str, ...] = (),
    earlier_findings: Sequence[Finding] = (),
) -> DataAudit:
    """Audit the sequences of all files.

    Two sequences with the same tokens of the prompt have the same problem."""
    started = time.monotonic()
    total = sum(len(sequences) for _, sequences in training)
    findings = [*earlier_findings]
    missing_characters = characters_without_token(
        frozenset().union(*(report.characters for report in reports)), tokenizer
    )
    unknown = unknown_token_ids(tokenizer)
    unreadable = [
        sequence
        for _, sequences in training
        for sequence in sequences
        if not (
            unknown.isdisjoint(sequence.prompt_ids) and unknown.isdisjoint(sequence.completion_ids)
        )
    ]
    if unreadable or missing_characters:
        parts = f"all of the texts: {len(unreadable)} of {total} sequences have unknown tokens."
        findings.append(_unknown(parts, missing_characters, _decoded(unreadable, tokenizer)))
    findings += [
        Finding(
            f"{report.learned_outputs} of the {report.kept} sequences of {report.path} have calls "
            "in fences with their outputs, which are learned like other text: the model learns to "
            "invent outputs. Set tools.format=fence, with which they are read and not learned.",
            (),
        )
        for report in reports
        if report.learned_outputs
    ]
    decoded = functools.partial(_decoded, tokenizer=tokenizer)
    for path, sequences in (*training, ("what is held out", held_out)):
        findings += _ends_and_beginnings(
            path, sequences, _prompt_ids, shown=decoded, tokenizer=tokenizer
        )
    findings += _in_earlier_file(
        training, "prompts", lambda sequence: sequence.prompt_ids, shown=decoded
    )
    trained_prompts = {sequence.prompt_ids for _, sequences in training for sequence in sequences}
    shared = [sequence for sequence in held_out if sequence.prompt_ids in trained_prompts]
    if shared:
        findings.append(
            Finding(
                f"{len(shared)} of the {len(held_out)} held-out sequences have a prompt that is "
                "trained on, too: their "
                "loss says nothing of new problems. Give each prompt once, or an "
                "sft.held_out_path with others.",
                _decoded(shared, tokenizer),
            )
        )
    compared = f"{total} sequences and {len(held_out)} held out compared"
    return DataAudit(shown, _summary(compared, findings, started), tuple(findings))


def _prompt_ids(sequence: WrittenSequence) -> tuple[int, ...]:
    return sequence.prompt_ids


def _decoded(
    sequences: Sequence[WrittenSequence], tokenizer: PreTrainedTokenizerFast
) -> tuple[str, ...]:
    return tuple(
        excerpt(str(tokenizer.decode(list(sequence.prompt_ids))), 60)
        for sequence in sequences[:EXAMPLES]
    )
