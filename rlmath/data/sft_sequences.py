"""Prompts with their completions, for supervised training.

A row, of JSONL, parquet or a data set's folder, is one of

    {"prompt": "47+85=", "completion": "7+5=12 4+8+1=13 \\boxed{132}"}        the prompt as it stands
    {"question": "What is 47+85?", "solution": "... \\boxed{132}"}            the question in data.template
    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}
                                       the tokenizer's chat template of them; what the assistant's turns add is learned

Prompt and completion are tokenized apart, so that no token is half of either. In the chat template
the completion is what the template makes of the assistant's turn, with its own end; behind another
the end is that of the prompt's template, else the end of sequence, and what ends a completion
already is not doubled.

Outputs of tools are read, not learned: the template's turns of tools, and behind calls in fences
the block that an engine would put there (`tool_fences`).
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlmath.algorithms.types import Sample
from rlmath.data.chat import Piece, assistant, chat_end, conversation, without_end
from rlmath.data.columns import Message, checked_text, messages_of, tools_of, weight_of
from rlmath.data.files import CHARACTERS_PER_TOKEN, folder_line, raw_rows
from rlmath.data.formats import check_length
from rlmath.data.loader import FilterReport
from rlmath.data.order import permutation
from rlmath.data.rows import (
    START_CHARS,
    PromptRow,
    RawRow,
    RowError,
    UnusableRow,
    check_unusable,
    unusable_lines,
)
from rlmath.data.tokenizer import (
    PromptText,
    asked,
    check_row,
    prompt_tokens,
    rendered,
    template_of,
    token_ids_of,
)
from rlmath.data.tool_fences import FenceFormat, has_output
from rlmath.data.turns import check_rendered
from rlmath.workers.user_functions import UserFunction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMS = (
    "prompt and completion, question and solution, or messages whose last turn is the assistant's"
)
_CHUNK = 1000
"""Rows tokenized in one call."""


@dataclass(frozen=True)
class WrittenSequence:
    """A prompt and the completion that is to be learned."""

    prompt_ids: tuple[int, ...]
    """At least one token: the model predicts the first token of the completion from it."""
    completion_ids: tuple[int, ...]
    """Tokens of which all or some are learned; the last one ends a turn or a sequence."""
    learned: tuple[bool, ...] | None = None
    """Whether each token of the completion is learned; None: all are. Other turns between the
    assistant's, and outputs of tools, are not."""

    @property
    def length(self) -> int:
        """Tokens in all."""
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def n_learned(self) -> int:
        """Tokens that have weight in the loss."""
        return len(self.completion_ids) if self.learned is None else sum(self.learned)

    def sample(self) -> Sample:
        """The sequence as it is packed: what is learned takes the place of what a model samples.

        It has no advantage."""
        logprobs = (0.0,) * len(self.completion_ids)
        return Sample(
            self.prompt_ids, self.completion_ids, logprobs, advantage=0.0, sampled=self.learned
        )


@dataclass(frozen=True)
class SequenceReport(FilterReport):
    """The counts of a file's rows, and the texts that the data audit shows and examines."""

    example: tuple[_Texts, WrittenSequence] | None = None
    """The first sequence that is kept, as text and as tokens; None where nothing is kept."""
    characters: frozenset[str] = frozenset()
    """Characters of all texts that are kept."""
    learned_outputs: int = 0
    """Sequences whose answers have calls in fences with outputs that are learned like other
    text."""


def load_sequences(
    path: str,
    tokenizer: PreTrainedTokenizerFast,
    template: str | UserFunction,
    limit: int,
    max_unusable_share: float,
    fences: FenceFormat | None = None,
) -> tuple[list[WrittenSequence], SequenceReport]:
    """The sequences of a file that have at most `limit` tokens, in its order.

    With `fences` answers have calls in that format, whose outputs are not learned. ValueError for
    a file that cannot be read, where too many rows are unusable, and where nothing is left."""
    sequences: list[WrittenSequence] = []
    example: tuple[_Texts, WrittenSequence] | None = None
    characters: set[str] = set()
    unusable: list[UnusableRow] = []
    too_long = longest = learned_outputs = 0
    rows = raw_rows(path)
    while chunk := list(itertools.islice(rows, _CHUNK)):
        texts = _texts(
            chunk,
            template,
            tokenizer,
            unusable=unusable,
            most_characters=CHARACTERS_PER_TOKEN * limit,
            fences=fences,
        )
        for row, sequence in zip(texts, _tokenized(texts, tokenizer), strict=True):
            if not sequence.prompt_ids:
                unusable.append(
                    UnusableRow(row.where, "its prompt has no token", row.prompt.text[:60])
                )
            elif sequence.length > limit:
                too_long = too_long + 1
                longest = max(longest, sequence.length)
            else:
                sequences.append(sequence)
                example = example or (row, sequence)
                characters.update(*(piece.text for piece in row.pieces))
                learned_outputs += any(
                    piece.learned and has_output(piece.text) for piece in row.pieces
                )
    report = SequenceReport(
        read=len(sequences) + too_long,
        kept=len(sequences),
        dropped_too_long=too_long,
        longest_dropped_tokens=longest,
        most_tokens=limit,
        path=path,
        files=folder_line(path),
        unusable=tuple(unusable),
        setting="sft.max_sequence_tokens",
        template=example[0].template if example else "",
        example=example,
        characters=frozenset(characters),
        learned_outputs=learned_outputs,
    )
    _check(report, max_unusable_share)
    return sequences, report


def split_held_out(
    sequences: Sequence[WrittenSequence], share: float, seed: int
) -> tuple[list[WrittenSequence], list[WrittenSequence]]:
    """(sequences to train on, sequences to evaluate on), each in the file's order.

    A share above 0 holds at least one out."""
    count = min(max(1, round(share * len(sequences))), len(sequences) - 1) if share > 0 else 0
    # Held out by the order of epoch -1, which is never trained on.
    held_out = set(permutation(len(sequences), seed, -1)[:count])
    train = [sequence for index, sequence in enumerate(sequences) if index not in held_out]
    return train, [sequences[index] for index in sorted(held_out)]


def sequences_fingerprint(*groups: Sequence[WrittenSequence]) -> str:
    """A short name for sequences in their groups and order."""
    digest = hashlib.sha256()
    for group in groups:
        for sequence in group:
            learned = () if sequence.learned is None else (sequence.learned,)
            digest.update(
                json.dumps((sequence.prompt_ids, sequence.completion_ids, *learned)).encode()
            )
        digest.update(b"end")
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------- from rows to tokens


@dataclass(frozen=True)
class _Texts:
    """A row's texts in its template."""

    row: PromptRow
    answer: Message
    """The message that is learned: the assistant's last turn."""
    template: str
    """The template around it (`tokenizer.template_of`)."""
    pieces: Sequence[Piece]
    """The pieces in their order; the first is the prompt, the last is learned."""
    is_chat: bool
    """Whether the tokenizer's chat template wrote the prompt."""

    @property
    def where(self) -> str:
        return self.row.query_id

    @property
    def prompt(self) -> PromptText:
        return PromptText(self.pieces[0].text, self.is_chat)

    @property
    def length(self) -> int:
        """Characters in all."""
        return sum(len(piece.text) for piece in self.pieces)


def _texts(
    rows: Iterable[RawRow],
    template: str | UserFunction,
    tokenizer: PreTrainedTokenizerFast,
    unusable: list[UnusableRow],
    most_characters: int,
    fences: FenceFormat | None,
) -> list[_Texts]:
    """The texts of the rows that can be used; the others are added to `unusable`.

    Unusable are also rows of more than `most_characters`."""
    end_ids = [
        token for token in (chat_end(tokenizer), tokenizer.eos_token_id) if isinstance(token, int)
    ]
    ends = tuple(map(str, tokenizer.convert_ids_to_tokens(end_ids)))
    parsed = [
        _parsed(raw, template, tokenizer, ends=ends, most_characters=most_characters)
        for raw in rows
    ]
    rows_outside_chat = [
        row
        for _, row in parsed
        if not isinstance(row, RowError) and not _in_chat(row.prompt, template, tokenizer)
    ]
    prompts = rendered([row.prompt for row in rows_outside_chat], template, tokenizer)
    usable: list[_Texts] = []
    for raw, row in parsed:
        try:
            if isinstance(row, RowError):
                raise row
            is_chat = _in_chat(row.prompt, template, tokenizer)
            texts = _written(
                row, template, tokenizer, prompt=None if is_chat else next(prompts), ends=ends
            )
            if texts.length > most_characters:
                raise RowError(
                    f"in its template it has {texts.length} characters, more than "
                    f"{most_characters}; it is not "
                    "tokenized"
                )
            usable.append(texts if fences is None else _with_outputs(texts, fences))
        except RowError as error:
            unusable.append(_unusable(raw, error))
    return usable


@dataclass(frozen=True)
class _Row:
    """The prompt and the answer of a row."""

    prompt: PromptRow
    answer: Message


def _parsed(
    raw: RawRow,
    template: str | UserFunction,
    tokenizer: PreTrainedTokenizerFast,
    ends: tuple[str, ...],
    most_characters: int,
) -> tuple[RawRow, _Row | RowError]:
    """A row, and its prompt and answer, or why they cannot be used."""
    try:
        if raw.columns is None:
            raise RowError(raw.reason)
        row = _parse(raw.columns, raw.where)
        check_length(_whole(row.prompt, row.answer), most_characters)
        _check_messages(row.prompt, template, tokenizer)
        check_row(row.prompt, template, tokenizer, answer=without_end(row.answer, ends))
        return raw, row
    except RowError as error:
        return raw, error


def _written(
    row: _Row,
    template: str | UserFunction,
    tokenizer: PreTrainedTokenizerFast,
    prompt: PromptText | RowError | None,
    ends: tuple[str, ...],
) -> _Texts:
    """The texts of a row; RowError where the template cannot take it.

    `prompt` is what another template than the tokenizer's chat template made of it."""
    if isinstance(prompt, RowError):
        raise prompt
    word = template_of(row.prompt, template, tokenizer)
    if prompt is not None:
        pieces = [Piece(prompt.text, False), Piece(_completion(row.answer, ends), True)]
        return _Texts(row.prompt, row.answer, word, pieces=pieces, is_chat=prompt.is_chat)
    name = f"the sequence {row.prompt.query_id[:60]!r}"
    messages = (*asked(row.prompt), without_end(row.answer, ends))
    tools = row.prompt.tools
    text, pieces = conversation(messages, tokenizer, name, tools)
    check_rendered(text, messages, tools, tokenizer=tokenizer, is_prompt=False)
    return _Texts(row.prompt, row.answer, word, pieces=pieces, is_chat=True)


def _with_outputs(texts: _Texts, fences: FenceFormat) -> _Texts:
    """The texts with the outputs in what is learned as pieces of their own."""
    pieces = [
        part
        for piece in texts.pieces
        for part in (fences.pieces(piece.text) if piece.learned else [piece])
    ]
    return replace(texts, pieces=pieces)


def _unusable(raw: RawRow, error: RowError) -> UnusableRow:
    columns = "" if raw.columns is None else str(list(raw.columns))[:START_CHARS]
    return UnusableRow(raw.where, str(error), raw.start or columns)


def _in_chat(
    row: PromptRow, template: str | UserFunction, tokenizer: PreTrainedTokenizerFast
) -> bool:
    """Whether the tokenizer's chat template writes prompt and answer."""
    return template_of(row, template, tokenizer) == "chat" and bool(tokenizer.chat_template)


def _check_messages(
    row: PromptRow, template: str | UserFunction, tokenizer: PreTrainedTokenizerFast
) -> None:
    """RowError for messages that neither a chat template nor a function of the user's takes."""
    if (
        row.messages
        and not isinstance(template, UserFunction)
        and not _in_chat(row, template, tokenizer)
    ):
        raise RowError(
            f'"messages" need the tokenizer\'s chat template; data.template is "{template}", and '
            "the tokenizer has "
            f"{'one' if tokenizer.chat_template else 'none'}. Use data.template=auto and a "
            "tokenizer with a chat "
            "template, or give rows with prompt and completion"
        )


def _whole(row: PromptRow, answer: Message) -> PromptRow:
    """The row with the answer, for its length."""
    if row.messages:
        return replace(row, messages=(*row.messages, answer))
    return replace(row, prompt=row.prompt + answer["content"])


def _completion(answer: Message, ends: tuple[str, ...]) -> str:
    """An answer outside the chat template, with nothing behind an end that it has.

    RowError where it is more than a text, or is not learned."""
    if not weight_of(answer):
        raise RowError(
            "the last of its messages has weight 0, and nothing else of it would be learned"
        )
    if answer.get("reasoning_content") or answer.get("tool_calls"):
        raise RowError(
            "its answer has reasoning_content or tool_calls, which the tokenizer's chat template "
            "alone can write"
        )
    text = checked_text(answer.get("content"), "content")
    return text.rstrip() if text.rstrip().endswith(ends) else text


def _parse(columns: dict, place: str) -> _Row:
    """The prompt, and the answer.

    RowError for a row of none of the forms."""
    for first, second, whole in (("prompt", "completion", True), ("question", "solution", False)):
        if first in columns and second in columns:
            prompt = checked_text(columns[first], first)
            completion = checked_text(columns[second], second)
            row = PromptRow(prompt, "math", place, solutions=(completion,), whole=whole)
            return _Row(row, assistant(completion))
    if "messages" in columns:
        *turns, answer = messages_of(columns["messages"], "messages", are_learned=True)
        if answer["role"] != "assistant" or not turns:
            raise RowError(
                "the last of its messages must be the assistant's, with others before it"
            )
        row = PromptRow(
            str(turns[-1].get("content") or ""),
            "math",
            query_id=place,
            solutions=(str(answer.get("content") or ""),),
            whole=False,
            messages=tuple(turns),
            tools=tools_of(columns.get("tools")),
        )
        return _Row(row, answer)
    names = ", ".join(map(repr, list(columns)[:8])) or "no columns"
    raise RowError(f"has {names}; needed: {FORMS}")


def _tokenized(
    texts: Sequence[_Texts], tokenizer: PreTrainedTokenizerFast
) -> Iterator[WrittenSequence]:
    """The sequences of texts: the prompt as GRPO has it, then the pieces.

    Pieces have no special tokens of the tokenizer's. Each is tokenized alone, but where it has its
    tokens already; where a tokenizer begins every text with a mark of its own, they have the tokens
    of the whole text."""
    if not texts:
        return
    prompts = prompt_tokens([row_texts.prompt for row_texts in texts], tokenizer)
    parts = [
        piece for row_texts in texts for piece in row_texts.pieces[1:] if piece.token_ids is None
    ]
    tokens = iter(token_ids_of([piece.text for piece in parts], tokenizer))
    of_turn = chat_end(tokenizer)
    of_sequence = tokenizer.eos_token_id
    marks_beginnings = _marks_beginnings(tokenizer)
    for row_texts, prompt in zip(texts, prompts, strict=True):
        completion = []
        learned = []
        tokens_of_pieces = [
            next(tokens) if piece.token_ids is None else list(piece.token_ids)
            for piece in row_texts.pieces[1:]
        ]
        if marks_beginnings:
            tokens_of_pieces = _in_runs(row_texts.pieces, tokens_of_pieces, tokenizer)
        for piece, ids in zip(row_texts.pieces[1:], tokens_of_pieces, strict=True):
            completion += ids
            learned += [piece.learned] * len(ids)
        if not completion or completion[-1] not in (of_turn, of_sequence):
            completion.append(of_turn if of_turn in prompt else of_sequence)
            learned.append(True)
        yield WrittenSequence(
            tuple(prompt), tuple(completion), None if all(learned) else tuple(learned)
        )


def _marks_beginnings(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether a text has other tokens at the beginning than after a line's end.

    Llama 2's begin with "▁"."""
    newline_ids, both_ids, digit_ids = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("\n", "\n2", "2")
    )
    return both_ids != newline_ids + digit_ids


_BEFORE_RUNS = tuple(Piece(text, False) for text in ("\n", "a", "(", "1"))
"""Texts behind which a text is tokenized that follows an output, the first with which it does not
merge. An output ends with a line's end."""


def _in_runs(
    pieces: Sequence[Piece],
    tokens_of_pieces: Sequence[list[int]],
    tokenizer: PreTrainedTokenizerFast,
) -> list[list[int]]:
    """Tokens of every piece after the prompt; texts between outputs have those of their whole text.

    `tokens_of_pieces` has each one's tokens by itself, which stay where the whole text has
    others at its borders."""
    token_ids: list[list[int]] = []
    heads: Sequence[Piece] = (pieces[0],)
    pairs = zip(pieces[1:], tokens_of_pieces, strict=True)
    for is_output, run in itertools.groupby(pairs, lambda pair: pair[0].token_ids is not None):
        run_pieces, run_tokens = zip(*run, strict=True)
        in_whole = None
        if not is_output:
            readings = (_in_whole_text([head, *run_pieces], tokenizer) for head in heads)
            in_whole = next((reading for reading in readings if reading is not None), None)
        token_ids += run_tokens if in_whole is None else in_whole
        heads = _BEFORE_RUNS
    return token_ids


def _in_whole_text(
    pieces: Sequence[Piece], tokenizer: PreTrainedTokenizerFast
) -> list[list[int]] | None:
    """Tokens of every piece after the prompt, as the whole text has them.

    None where the prompt alone has others, or one goes over the border of two pieces."""
    texts = [piece.text for piece in pieces]
    whole = tokenizer(
        "".join(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    prompt = tokenizer(texts[0], add_special_tokens=False, verbose=False)["input_ids"]
    ids = whole["input_ids"]
    stops = [stop for _, stop in whole["offset_mapping"]]
    borders = list(itertools.accumulate(map(len, texts)))
    cuts = [bisect.bisect_right(stops, border) for border in borders]
    whole_pieces = all(
        cut and stops[cut - 1] == border for cut, border in zip(cuts, borders, strict=True)
    )
    if not whole_pieces or ids[: cuts[0]] != prompt:
        return None
    return [ids[start:stop] for start, stop in itertools.pairwise(cuts)]


def _check(report: SequenceReport, max_unusable_share: float) -> None:
    """ValueError where too many rows are unusable, and where no sequence is left."""
    check_unusable(
        report.path,
        report.unusable,
        report.rows,
        most=max_unusable_share,
        needed=f" Needed: {FORMS}.",
    )
    if not report.kept and report.dropped:
        raise ValueError(
            f"{report.path}: all {report.dropped} sequences that can be used are longer than "
            f"{report.setting}={report.most_tokens} (the longest has "
            f"{report.longest_dropped_tokens} tokens); raise "
            "it, or give shorter ones"
        )
    if not report.kept:
        reasons = "".join(f"\n    {line}" for line in unusable_lines(report.path, report.unusable))
        raise ValueError(
            f"{report.path}: no row can be used; needed: rows with {FORMS}. Why:{reasons}"
        )
