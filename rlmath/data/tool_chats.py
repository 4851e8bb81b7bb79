"""Calls of Python in the form of a model's chat template, whose tool schema its prompts have.

    sampled   I compute it.
              <tool_call>
              {"name": "python", "arguments": {"code": "print(6 * 7)"}}
              </tool_call><|im_end|>      complete here: the end of the turn, which is sampled
    given     \\n<|im_start|>user\\n<tool_response>\\n42\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n
    sampled   The answer is \\\\boxed{42}.<|im_end|>

What a template writes around outputs is learned from a made-up conversation, once. It must be a
pure extension of what stands before, as what is sampled is never written again.
Pure.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlmath.config.length_curriculum import CHAT_BOUNDARY_TOKENS
from rlmath.config.schema import Config, ToolsConfig
from rlmath.data.chat import CHANGE, ChatSettings, chat_end, chat_settings, render, user
from rlmath.data.columns import Message
from rlmath.data.tokenizer import completion_text
from rlmath.data.tool_outputs import OutputTokens, SampledCall, ShownOutputs, greatest_that_fits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NAME = "python"
DESCRIPTION = "Executes Python code. Returns what it prints, and the value of its last expression."
PYTHON: Message = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": DESCRIPTION,
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to execute."}},
            "required": ["code"],
        },
    },
}
"""The schema of the one tool."""


@dataclass(frozen=True)
class SettingNames:
    """How errors name settings: as keys of a run, or as options."""

    chat_format: str
    fence_format: str
    chat_template: str
    message_template: str
    """That prompts are messages in the chat template."""


KEYS = SettingNames(
    chat_format="tools.format=chat",
    fence_format="tools.format=fence",
    chat_template="data.chat_template",
    message_template="data.template=chat",
)
OPTIONS = SettingNames(
    chat_format="--tools chat",
    fence_format="--tools fence",
    chat_template="--chat-template",
    message_template="--template chat",
)
"""Options of `rlmath eval`."""


# ---------------------------------------------------------------- calls in the text of a turn


_THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]"}
"""What opens thinking, in which a call is text, and what closes it."""
_DECODER = json.JSONDecoder()
_DEEPEST = 8
"""Deepest nesting of JSON that is read; a call has 3 levels. Python's own bound depends on what
calls the reader, which differs between an engine's ranks."""
_NESTING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)
"""A string of JSON, which is stepped over, or what opens or closes a value."""


def hermes_calls(turn: str, opened: str) -> list[SampledCall]:
    """Calls as Qwen2.5, Qwen3 and SmolLM3 write them, in text.

    ValueError where one cannot be read, or thinking does not end. `opened` is what opens thinking
    in front of the turn, "" where nothing does."""
    calls = []
    start = _mark_end_outside_thinking(turn, r"<tool_call>", opened=opened)
    while start is not None:
        value, end = _json_at(turn, start)
        closing = re.compile(r"\s*</tool_call>").match(turn, end)
        if closing is None:
            raise ValueError("a call has no end")
        calls.append(_call_of(value, "arguments"))
        start = _mark_end_outside_thinking(turn, r"<tool_call>", start=closing.end())
    return calls


def llama_calls(turn: str, opened: str) -> list[SampledCall]:
    """The call that a turn of Llama 3's is, or that follows `<|python_tag|>`."""
    start = _mark_end_outside_thinking(turn, r"(?=\S)", opened=opened)
    if start is None or turn[start] != "{":
        start = _mark_end_outside_thinking(turn, r"<\|python_tag\|>", opened=opened)
    if start is None:
        return []
    value, end = _json_at(turn, start)
    _require_end(turn, end)
    return [_call_of(value, "parameters")]


def mistral_calls(turn: str, opened: str) -> list[SampledCall]:
    """Calls behind `[TOOL_CALLS]`: a list in JSON, or names with arguments."""
    start = _mark_end_outside_thinking(turn, r"\[TOOL_CALLS\]", opened=opened)
    if start is None:
        return []
    if turn[start:].lstrip().startswith("["):
        values, end = _json_at(turn, start)
        _require_end(turn, end)
        if not isinstance(values, list):
            raise ValueError("the calls are no list")
        return [_call_of(value, "arguments") for value in values]
    calls = []
    pattern = re.compile(
        r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*(?P<call_id>\w+)\s*)?\[ARGS\]", re.ASCII
    )
    separator = re.compile(r"\s*\[TOOL_CALLS\]")
    while True:
        opening = pattern.match(turn, start)
        if opening is None:
            raise ValueError("a call has no name")
        arguments, end = _json_at(turn, opening.end())
        value = {"name": opening["name"], "arguments": arguments, "id": opening["call_id"]}
        calls.append(_call_of(value, "arguments"))
        following = separator.match(turn, end)
        if following is None:
            _require_end(turn, end)
            return calls
        start = following.end()


FORMS: Mapping[str, Callable[[str, str], list[SampledCall]]] = {
    "Hermes": hermes_calls,
    "Llama 3": llama_calls,
    "Mistral": mistral_calls,
}
"""Forms of calls, by the names that messages have for them."""


def calls_in_turn(turn: str, form: str, opened: str = "") -> list[SampledCall]:
    """The calls in the text of a turn, in order; none where one of them cannot be read.

    >>> calls_in_turn('<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>', "Hermes")
    [SampledCall(code='1', call_id='')]
    >>> calls_in_turn('<tool_call>{"name": "python", "arguments": {"code": 1}}</tool_call>', "Hermes")
    []
    """
    try:
        return FORMS[form](turn, opened)
    except ValueError:
        return []


def has_chat_call(turn: str, opened: str) -> bool:
    """Whether a turn has a call, in any form."""
    return any(calls_in_turn(turn, form, opened) for form in FORMS)


def opened_thinking(prompt: str) -> str:
    """What opens the thinking in which a prompt ends; "" where it ends in none.

    >>> opened_thinking("1+1?<think>\\n"), opened_thinking("1+1?<think>\\n\\n</think>\\n\\n")
    ('<think>', '')
    """
    tail = prompt.rstrip()
    for opening in _THOUGHTS:
        if tail.endswith(opening):
            return opening
    return ""


def _mark_end_outside_thinking(
    turn: str, pattern: str, start: int = 0, opened: str = ""
) -> int | None:
    """The end of the first match from `start` on that stands in no thinking; None without one.

    ValueError where thinking does not end."""
    mark = re.compile("|".join([*map(re.escape, _THOUGHTS), f"(?P<mark>{pattern})"]))
    opening = opened
    while True:
        if opening:
            end = turn.find(_THOUGHTS[opening], start)
            if end < 0:
                raise ValueError("thinking does not end")
            start = end + len(_THOUGHTS[opening])
        match = mark.search(turn, start)
        if match is None:
            return None
        if match["mark"] is not None:
            return match.end()
        opening = match[0]
        start = match.end()


def _json_at(text: str, start: int) -> tuple[object, int]:
    """(value, its end) of the JSON that begins here, behind white space.

    ValueError for none, and for one of more than _DEEPEST levels."""
    while start < len(text) and text[start].isspace():
        start += 1
    depth = 0
    for match in _NESTING.finditer(text, start):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if depth > _DEEPEST:
            raise ValueError("the JSON is too deep")
        if depth <= 0:
            break
    return _DECODER.raw_decode(text, start)


def _require_end(text: str, end: int) -> None:
    """ValueError where more than white space follows."""
    if text[end:].strip():
        raise ValueError("text follows the call")


def _call_of(value: object, key: str) -> SampledCall:
    """A call of the tool, whose arguments are named `key`; ValueError for other values."""
    if not isinstance(value, dict) or value.get("name") != NAME:
        raise ValueError("no call of the tool")
    arguments = value.get(key)
    if not isinstance(arguments, dict) or set(arguments) != {"code"}:
        raise ValueError("the tool has one argument, code")
    code = arguments["code"]
    if not isinstance(code, str):
        raise ValueError("code is no text")
    code.encode("utf-8")  # half a surrogate pair is no code
    call_id = value.get("id")
    return SampledCall(code, call_id if isinstance(call_id, str) else "")


# ---------------------------------------------------------------- what a template writes


_CODES = ("print(6 * 7)", "print(5)", "print(8)")
_IDS = ("cALL00001", "cALL00002", "cALL00003")
"""Mistral's template takes nine letters and digits."""
_LONG_IDS = ("qZ7xW9kJ3", "Xq8jZ5vK2", "zK4wQ6yX0")
"""Names of which tokenizers have no part."""
_OTHER_ID = "cALL00000"
"""The name of a call to which the model gave none that a template takes."""
_ID = re.compile(r"[0-9A-Za-z]{9}")
_MARKS = ("oUTPUT1", "oUTPUT2", "oUTPUT3")
_QUESTION = user("6 x 7?")
_THOUGHT_TEXT = "I compute it."
_THOUGHT = f"<think>\n{_THOUGHT_TEXT}\n</think>\n\n"
_UNUSUAL = ' a"b\\n\n\\c é\t<b>\n\n'
_LONG = "all work and no play\n" * 500


@dataclass(frozen=True)
class CallFrame:
    """What the chat template of a tokenizer writes around outputs, and how it writes calls."""

    form: str
    """One of FORMS."""
    opened: str
    """What opens thinking in front of every turn; "" where nothing does."""
    end: str
    """The token that ends a turn, as text."""
    end_id: int
    head: str
    """Text from the end of the turn to the first output; with the call's name as _IDS[0]."""
    between: str | None
    """Text between two outputs, with the calls' names as _IDS[0] and _IDS[1]; None where a turn
    has one call."""
    tail: str
    """Text from the last output to the next turn, with its call's name as _IDS[0]."""
    example: str
    """A turn that calls the tool, without its end."""
    strips: bool = False
    """Whether white space around an output is left out."""
    quotes: bool = False
    """Whether an output is written as a string of JSON."""

    def written(self, output: str) -> str:
        """An output as the template writes it."""
        text = output.strip() if self.strips else output
        return json.dumps(text, ensure_ascii=False)[1:-1] if self.quotes else text

    def surrounding_texts(self, call_ids: Sequence[str]) -> list[str]:
        """The texts in front of, between and behind the outputs of calls with these names."""
        names = [name if _ID.fullmatch(name) else _OTHER_ID for name in call_ids]
        texts = [self.head.replace(_IDS[0], names[0])]
        for name, next_name in itertools.pairwise(names):
            assert self.between is not None
            pieces = self.between.replace(_IDS[0], "\0").replace(_IDS[1], next_name)
            texts.append(pieces.replace("\0", name))
        return [*texts, self.tail.replace(_IDS[0], names[-1])]

    def text(self, call_ids: Sequence[str], outputs: Sequence[str]) -> str:
        """All that stands between the end of a turn and the next turn."""
        head, *following_texts = self.surrounding_texts(call_ids)
        written = [self.written(output) for output in outputs]
        return head + "".join(map("".join, zip(written, following_texts, strict=True)))


def call_frame(tokenizer: PreTrainedTokenizerFast, names: SettingNames = KEYS) -> CallFrame:
    """What the tokenizer's chat template writes, tried with made-up calls.

    ValueError, which names settings by `names`, for a template of another form, or that does not
    append."""
    try:
        return _Trial(tokenizer).frame()
    except ValueError as error:
        folder = str(tokenizer.name_or_path or "the model")
        raise ValueError(
            f"{names.chat_format} is set, and the chat template of the tokenizer in {folder!r} "
            f"{error}. Use {names.fence_format}, or a {names.chat_template} that shows the tool and "
            "only appends"
        ) from error


class _Trial:
    """Conversations with made-up calls, in a tokenizer's chat template."""

    insertion = "a call"
    """What changes nothing before it, for errors."""
    turn_form = "a call"
    """What a turn holds, for errors."""
    output = "an output"
    """What stands behind a turn, for errors."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """ValueError for a template that does not show the tool."""
        self._tokenizer = tokenizer
        if not tokenizer.chat_template:
            raise ValueError("is missing")
        self._prompt = self._rendered([_QUESTION])
        self._require_tool()
        end_id = chat_end(tokenizer)
        if end_id is None:
            raise ValueError("ends a turn with no token of its own")
        self._end_id = end_id
        self._end = str(tokenizer.convert_ids_to_tokens(end_id))
        self._opened = opened_thinking(self._prompt)
        self._writes_calls = True
        """Whether the template writes calls of a message; else the message's text has them."""
        thinks = "</think>" in str(tokenizer.chat_template)
        self._thoughts = [_THOUGHT] if self._opened else ["", *([_THOUGHT] if thinks else [])]

    def frame(self) -> CallFrame:
        """The frame, tried with all that it must write."""
        form = self._form()
        turn, boundary = self._turn_and_boundary(1)
        head, tail = self._cut_out(boundary, _MARKS[:1])
        frame = CallFrame(
            form,
            self._opened,
            self._end,
            self._end_id,
            head=head,
            between=None,
            tail=tail,
            example=turn,
        )
        for strips, quotes in itertools.product((False, True), repeat=2):
            frame = replace(frame, strips=strips, quotes=quotes)
            if self._rendered_outputs([[_UNUSUAL]]).endswith(frame.text(_IDS[:1], [_UNUSUAL])):
                break
        frame = self._with_several(frame)
        for thought in self._thoughts:
            self._require_appends(frame, thought)
        self._require_tokens(frame)
        return frame

    def _require_tool(self) -> None:
        if DESCRIPTION not in self._prompt:
            raise ValueError("does not show a tool to the model")

    def _rendered(self, messages: Sequence[Message]) -> str:
        try:
            return render(messages, self._tokenizer, f"a conversation with {self.turn_form}")
        except ValueError as error:
            raise ValueError(f"fails: {str(error).removesuffix(CHANGE).rstrip('; ')}") from error

    def _turn(self, thought: str, first: int, count: int) -> Message:
        """An assistant's turn that calls the codes from `first` on."""
        numbers = range(first, first + count)
        calls = [
            {
                "id": _IDS[number],
                "type": "function",
                "function": {"name": NAME, "arguments": {"code": _CODES[number]}},
            }
            for number in numbers
        ]
        if self._writes_calls:
            return {"role": "assistant", "content": thought, "tool_calls": calls}
        texts = [f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>" for call in calls]
        return {"role": "assistant", "content": thought + "\n".join(texts)}

    def _rendered_outputs(self, rounds: Sequence[Sequence[str]], thought: str | None = None) -> str:
        """The text of a conversation: each round is a turn whose calls show these outputs."""
        messages: list[Message] = [_QUESTION]
        number = 0
        for outputs in rounds:
            first_thought = self._thoughts[0] if thought is None else thought
            messages.append(self._turn(first_thought, number, len(outputs)))
            for output in outputs:
                messages.append(self._output(number, output))
                number += 1
        return self._rendered(messages)

    def _output(self, number: int, text: str) -> Message:
        """The turn with the output of a call."""
        answer = {"role": "tool", "name": NAME, "tool_call_id": _IDS[number]}
        return {**answer, "content": text}

    def _form(self) -> str:
        """The form of the template's calls."""
        for writes_calls in (True, False):
            self._writes_calls = writes_calls
            is_asked_as_text = writes_calls and "<tool_call>" in self._prompt
            try:
                text = self._rendered_outputs([_MARKS[:1]])
            except ValueError:
                if is_asked_as_text:
                    continue
                raise
            position = text.find(_CODES[0], len(self._prompt))
            if position < 0 and is_asked_as_text:
                continue  # it leaves calls out, and asks for them in the answer's text
            self._require_prefix(self._prompt, text)
            if position < 0:
                raise ValueError("leaves the assistant's calls out")
            turn = self._turn_text(text, len(self._prompt), _CODES[0])
            for form in FORMS:
                codes = [call.code for call in calls_in_turn(turn, form, self._opened)]
                if codes == [_CODES[0]]:
                    return form
            raise ValueError(
                f"writes a call as {turn[-200:]!r}, a form that is none of {', '.join(FORMS)}"
            )
        raise AssertionError("unreachable")

    def _turn_text(self, text: str, start: int, last_code: str) -> str:
        """The text of the assistant's turn that begins here, to the end behind its last call."""
        position = text.find(last_code, start)
        end = text.find(self._end, position)
        if position < 0 or end < 0:
            raise ValueError(f"does not end a turn with {self.turn_form} with {self._end!r}")
        return text[start:end]

    def _turn_and_boundary(self, count: int) -> tuple[str, str]:
        """The text of a turn with so many calls, and that behind it, whose outputs are _MARKS."""
        text = self._rendered_outputs([_MARKS[:count]])
        self._require_prefix(self._prompt, text)
        turn = self._turn_text(text, len(self._prompt), _CODES[count - 1])
        return turn, text[len(self._prompt) + len(turn) + len(self._end) :]

    def _cut_out(self, boundary: str, marks: Sequence[str]) -> list[str]:
        """The texts around the marks of a boundary."""
        texts = []
        for mark in marks:
            if mark not in boundary:
                raise ValueError(f"leaves {self.output} behind {self.turn_form} out")
            text, _, boundary = boundary.partition(mark)
            texts.append(text)
        return [*texts, boundary]

    def _with_several(self, frame: CallFrame) -> CallFrame:
        """The frame, with the text between two outputs where a turn may have several calls."""
        try:
            _, boundary = self._turn_and_boundary(2)
        except ValueError:  # Llama 3's refuses them
            return frame
        _, between, _ = self._cut_out(boundary, _MARKS[:2])
        return replace(frame, between=between)

    def _require_prefix(self, before: str, text: str) -> None:
        """ValueError where a longer conversation does not begin as the shorter one."""
        if text.startswith(before):
            return
        earlier, later = _different_texts(before, text)
        raise ValueError(
            f"changes what stands before {self.insertion}: {earlier!r} becomes {later!r} "
            "(thinking that is taken out, enable_thinking=false, or a system prompt that the last "
            "question alone has), and what is sampled cannot be written again"
        )

    def _require_appends(self, frame: CallFrame, thought: str) -> None:
        """ValueError where a conversation with calls is no extension of the one without."""
        special = "".join(OutputTokens(self._tokenizer).control_texts)
        outputs = ("", "42\n", _LONG, _UNUSUAL, special)
        rounds: list[list[list[str]]] = [[[output]] for output in outputs]
        rounds += [[[output], ["5\n"]] for output in outputs]
        if frame.between is not None:
            rounds += [[[output, "5\n"]] for output in outputs]
            rounds += [[["42\n", output, ""]] for output in outputs]
            rounds += [[["42\n"], [output, "5\n"]] for output in outputs]
        for conversation in rounds:
            self._require_extension(frame, conversation, thought)
        if opened_thinking(frame.tail) != self._opened:
            raise ValueError(
                f"ends prompts with {self._prompt[-40:]!r}, and {self.output} with "
                f"{frame.tail[-40:]!r}, "
                "so that thinking is open behind one of them alone"
            )

    def _require_extension(
        self, frame: CallFrame, rounds: Sequence[Sequence[str]], thought: str
    ) -> None:
        """ValueError where a round does not extend the conversation before it by its frame."""
        before = self._prompt
        number = 0
        for index, outputs in enumerate(rounds):
            text = self._rendered_outputs(rounds[: index + 1], thought)
            self._require_prefix(before, text)
            names = _IDS[number : number + len(outputs)]
            codes = list(_CODES[number : number + len(outputs)])
            number += len(outputs)
            turn = self._turn_text(text, len(before), codes[-1])
            if thought.strip() and _THOUGHT_TEXT not in turn:
                raise ValueError(
                    f"takes thinking out of {turn[-200:]!r}, and what is sampled cannot be written "
                    "again"
                )
            if self._codes_in(turn, frame) != codes:
                raise ValueError(
                    f"writes {len(codes)} calls as {turn[-200:]!r}, which is not the form of "
                    f"{frame.form}"
                )
            expected = before + turn + self._end + frame.text(names, outputs)
            if text != expected:
                written_text, expected_text = _different_texts(text, expected)
                raise ValueError(
                    f"writes {written_text!r} at {self.output}, and {expected_text!r} at another"
                )
            before = text

    def _codes_in(self, turn: str, frame: CallFrame) -> list[str]:
        """What the calls of a turn execute."""
        return [call.code for call in calls_in_turn(turn, frame.form, frame.opened)]

    def _require_tokens(self, frame: CallFrame) -> None:
        """ValueError where a boundary is too long, or its tokens depend on what stands around."""
        writer = FrameTokens(self._tokenizer, frame)
        for calls in (1,) if frame.between is None else (1, 2, 3):
            for call_ids in (_IDS[:calls], _LONG_IDS[:calls]):
                count = len(writer.token_ids(call_ids, [""] * calls))
                if count > calls * CHAT_BOUNDARY_TOKENS:
                    raise ValueError(
                        f"puts {count} tokens around the outputs of {calls} calls, more than "
                        f"{CHAT_BOUNDARY_TOKENS} for each"
                    )
        tokens = OutputTokens(self._tokenizer)
        for output in ("", "42\n", tokens.as_read(_UNUSUAL)):
            text = self._rendered_outputs([[output]])
            before = text.removesuffix(frame.text(_IDS[:1], [output]))
            whole = tokens.ids_of(before) + writer.token_ids(_IDS[:1], [output])
            if tokens.ids_of(text) != whole:
                raise ValueError(
                    f"has other tokens for {text[len(before) :][:80]!r} in the conversation than "
                    "behind the turn"
                )


class _FeedbackTrial(_Trial):
    """Conversations with made-up answers, each with a user's turn behind it."""

    insertion = "a further question"
    turn_form = "an answer"
    output = "a further question"

    def _require_tool(self) -> None:
        pass

    def _turn(self, thought: str, first: int, count: int) -> Message:
        return {"role": "assistant", "content": thought + _CODES[first]}

    def _output(self, number: int, text: str) -> Message:
        return user(text)

    def _form(self) -> str:
        return "an answer"

    def _with_several(self, frame: CallFrame) -> CallFrame:
        return frame

    def _codes_in(self, turn: str, frame: CallFrame) -> list[str]:
        return [code for code in _CODES if turn.endswith(code)]


def feedback_frame(tokenizer: PreTrainedTokenizerFast) -> CallFrame:
    """What the tokenizer's chat template writes around a user's turn behind an answer.

    ValueError for a template that does not append."""
    try:
        return _FeedbackTrial(tokenizer).frame()
    except ValueError as error:
        folder = str(tokenizer.name_or_path or "the model")
        raise ValueError(
            f"finished answers go on (turns.feedback, environment.function), and the chat template "
            f"of the tokenizer in {folder!r} {error}. Use a data.chat_template that only appends, "
            "or another data.template"
        ) from error


def _different_texts(first: str, second: str) -> tuple[str, str]:
    """80 characters of each text, from 20 before they begin to differ."""
    pairs = zip(first, second, strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    start = max(0, common - 20)
    return first[start:][:80], second[start:][:80]


class FrameTokens:
    """Writes outputs in their frame as tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, frame: CallFrame) -> None:
        self._frame = frame
        self.outputs = OutputTokens(tokenizer)

    def token_ids(self, call_ids: Sequence[str], outputs: Sequence[str]) -> list[int]:
        """The tokens behind the end of a turn, to the next one; outputs make no special token.

        They are those of the whole text. Outputs that would join the template's own text to a
        special token, or take one away, are tokenized apart."""
        surrounding = self._frame.surrounding_texts(call_ids)
        written = [self._frame.written(output) for output in outputs]
        token_ids = self._joined_ids(surrounding, written)
        frame_ids = self._joined_ids(surrounding, [""] * len(written))
        if self._control(token_ids) == self._control(frame_ids):
            return token_ids
        token_ids = self._behind_end(surrounding[0])
        for text, following in zip(written, surrounding[1:], strict=True):
            token_ids += self.outputs.encoded(text)
            token_ids += self.outputs.part_ids(following, splits_special=False)
        return token_ids

    def _joined_ids(self, surrounding: Sequence[str], written: Sequence[str]) -> list[int]:
        """The tokens of texts and outputs in turn, cut inside of outputs' special texts alone."""
        parts = []
        part = surrounding[0]
        for text, following in zip(written, surrounding[1:], strict=True):
            first, *later_parts = self.outputs.split(text)
            part += first
            for later_part in later_parts:
                parts.append(part)
                part = later_part
            part += following
        first_part, *other_parts = [*parts, part]
        token_ids = self._behind_end(first_part)
        for other_part in other_parts:
            token_ids += self.outputs.part_ids(other_part, splits_special=False)
        return token_ids

    def _behind_end(self, text: str) -> list[int]:
        """The tokens of a text that stands behind the end of a turn."""
        token_ids = self.outputs.ids_of(self._frame.end + text)
        return token_ids[1:] if token_ids[:1] == [self._frame.end_id] else token_ids

    def _control(self, token_ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in token_ids if token_id in self.outputs.control]


# ---------------------------------------------------------------- the format, as an engine asks it


class ChatFormat:
    """Finds calls in sampled tokens, and writes outputs as tokens."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        max_output_tokens: int,
        stop_token_ids: Collection[int] = (),
        *,
        frame: CallFrame | None = None,
    ) -> None:
        """`stop_token_ids` end a completion. `frame` is that of the tokenizer; None: it is learned.

        ValueError where the chat template has another form, or does not append."""
        self.tokenizer = tokenizer
        self.frame = call_frame(tokenizer) if frame is None else frame
        self._max_output_tokens = max_output_tokens
        self._tokens = FrameTokens(tokenizer, self.frame)
        ends = {self.frame.end_id}
        message_end = tokenizer.added_tokens_encoder.get("<|eom_id|>")
        ends_here = self.frame.form == "Llama 3" and message_end in stop_token_ids
        if message_end is not None and ends_here:
            ends.add(message_end)
        self.can_complete = frozenset(ends)
        """Tokens that can be the last one of a call: ends of a turn."""
        self.example = self.frame.example + self.frame.end

    @property
    def frame_ids(self) -> frozenset[int]:
        """The tokens around the outputs of a turn's calls."""
        count = 1 if self.frame.between is None else 2
        return frozenset(self._tokens.token_ids(_IDS[:count], [""] * count))

    def turn_text(self, turn_ids: Sequence[int]) -> str:
        """The text of a turn that ended with a call, without its end."""
        ends = bool(turn_ids) and turn_ids[-1] in self.can_complete
        return completion_text(self.tokenizer, turn_ids, stopped=ends)

    def calls_in(self, turn_ids: Sequence[int]) -> tuple[SampledCall, ...]:
        """All calls of a turn; () where there is none, or the turn is not at its end.

        The tokens are those since the last output."""
        if not turn_ids or turn_ids[-1] not in self.can_complete:
            return ()
        calls = calls_in_turn(self.turn_text(turn_ids), self.frame.form, self.frame.opened)
        takes_all = self.frame.between is not None or len(calls) <= 1
        return tuple(calls) if takes_all else ()

    def outputs(
        self, turn_ids: Sequence[int], calls: Sequence[SampledCall], printed: Sequence[str]
    ) -> ShownOutputs:
        """What the model is shown behind a turn, whose `calls` `printed` these texts.

        Each output has at most `max_output_tokens` tokens, and all together no more than that and
        CHAT_BOUNDARY_TOKENS for each call: of a longer text the beginning and the end, with the
        number of tokens that are left out between them."""
        call_ids = [call.call_id for call in calls]
        texts = [_Text(self._tokens.outputs, self.frame, text) for text in printed]
        limit = len(texts) * (self._max_output_tokens + CHAT_BOUNDARY_TOKENS)

        def token_ids_of(most: int) -> list[int]:
            return self._tokens.token_ids(call_ids, [text.shown(most) for text in texts])

        length = greatest_that_fits(
            self._max_output_tokens, lambda most: len(token_ids_of(most)) <= limit
        )
        token_ids = token_ids_of(length)
        assert len(token_ids) <= limit, "outputs of nothing are too long"
        shown_texts = [text.shown(length) for text in texts]
        are_cut = [
            text.whole != shown_text for text, shown_text in zip(texts, shown_texts, strict=True)
        ]
        return ShownOutputs(token_ids, shown_texts, are_cut)


class _Text:
    """A printed text, and what is shown of it where that may have so many tokens."""

    def __init__(self, tokens: OutputTokens, frame: CallFrame, printed: str) -> None:
        self._tokens = tokens
        self._frame = frame
        self.whole = tokens.as_read(printed)
        """The text as its tokens say it."""
        self._token_ids = tokens.encoded(self.whole)
        self._length = self._written_tokens(self.whole)
        self._shown: dict[int, str] = {}
        """What was shown, by the number of tokens."""

    def shown(self, most: int) -> str:
        """The text, of at most so many tokens as it is written, or its beginning and its end.

        Where not even the number of tokens that are left out fits, it is that number."""
        if most not in self._shown:
            self._shown[most] = self.whole if self._length <= most else self._cut(most)
        return self._shown[most]

    def _cut(self, most: int) -> str:
        longest = max(0, min(most, len(self._token_ids) - 1))
        length = greatest_that_fits(
            longest,
            lambda tokens: self._written_tokens(self._tokens.cut(self._token_ids, tokens)) <= most,
        )
        return self._tokens.cut(self._token_ids, length)

    def _written_tokens(self, text: str) -> int:
        return len(self._tokens.encoded(self._frame.written(text)))


# ---------------------------------------------------------------- prompts


def settings_with_tool(settings: ChatSettings, tools: ToolsConfig) -> ChatSettings:
    """Settings of conversations, which show the tool where its format is "chat"."""
    return replace(settings, tool=PYTHON) if tools.format == "chat" else settings


def run_chat_settings(config: Config) -> ChatSettings:
    """The settings of conversations of a run with completions."""
    return settings_with_tool(chat_settings(config.data), config.tools)


def check_shown(
    prompts: Sequence[str], tools: ToolsConfig, source: str, names: SettingNames = KEYS
) -> None:
    """ValueError where the format is "chat", and a prompt does not show the tool.

    `source` is what the prompts are, `names` are those of settings."""
    if tools.format != "chat":
        return
    for text in prompts:
        if DESCRIPTION not in text:
            raise ValueError(
                f"{names.chat_format} is set, and a prompt of {source} does not show the tool, as "
                f"no chat template writes it: it begins {text[:60]!r}. Use "
                f"{names.message_template}, a function that returns messages, or "
                f"{names.fence_format}"
            )
