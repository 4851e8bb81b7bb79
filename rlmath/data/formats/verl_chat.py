"""SimpleRL-Zoo and DAPO-Math: a chat in `prompt`, and the answer in `reward_model`, as verl has them."""

from __future__ import annotations

import re

from rlmath.data.formats.columns import Form, answer_text, checked_text, columns_of, further_columns, id_of
from rlmath.data.rows import PromptRow, RowError, short
from rlmath.data.templates import has_template

_DAPO = re.compile(
    r"Solve the following math problem step by step\. The last line of your response should be of the form "
    r"Answer: \$Answer \(without quotes\) where \$Answer is the answer to the problem\.\n\n(?P<problem>.*)\n\n"
    r'Remember to put your answer on its own line after "Answer:"\.\s*',
    re.DOTALL,
)
_DAPO_SOURCE = "math_dapo"
_MAX_MESSAGES = 100


def _messages(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or not 0 < len(value) <= _MAX_MESSAGES:
        raise RowError(f"prompt must be a list of 1 to {_MAX_MESSAGES} messages, got {short(value)}")
    found = []
    for message in value:
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            raise RowError(f"each message of prompt needs role and content, got {short(message)}")
        found.append((checked_text(message["role"], "role"), checked_text(message["content"], "content")))
    if found[-1][0] != "user":
        raise RowError(f'the last message of prompt must be that of the "user", got that of {found[-1][0]!r}')
    return tuple(found)


def _solutions(columns: dict) -> tuple[str, ...]:
    extra, reward = columns_of(columns.get("extra_info")), columns_of(columns.get("reward_model"))
    places = {
        "reward_model.ground_truth": reward.get("ground_truth"),
        "extra_info.answer": extra.get("answer"),
        "gt_answer": columns.get("gt_answer"),
        "answer": columns.get("answer"),
    }
    for name, value in places.items():
        if isinstance(value, list) and value:
            return tuple(answer_text(one, f"each of {name}") for one in value)
        if value is not None and value != "":
            return (answer_text(value, name),)
    raise RowError(f"no answer in {', '.join(places)}")


def _problem(columns: dict, last: str) -> str:
    """The problem without what the chat asks beside it, where the row has it so."""
    wrapped = _DAPO.fullmatch(last)
    if wrapped and wrapped["problem"].strip():
        return wrapped["problem"]
    question = columns_of(columns.get("extra_info")).get("question") or columns.get("question")
    return checked_text(question, "question") if isinstance(question, str) and question.strip() else last


def _row(columns: dict, number: int) -> PromptRow:
    messages = _messages(columns.get("prompt"))
    last = messages[-1][1]
    whole = len(messages) == 1 and has_template(last)
    extra = columns_of(columns.get("extra_info"))
    named = {"index": extra.get("index")} | {key: columns.get(key) for key in ("query_id", "id", "idx")}
    return PromptRow(
        prompt=last if whole else _problem(columns, last),
        task="math",
        query_id=id_of(named, tuple(named), number),
        solutions=_solutions(columns),
        more_json=further_columns(columns, ("prompt",)),
        whole=whole,
        messages=() if whole else messages,
    )


def _is_chat(columns: dict) -> bool:
    return isinstance(columns.get("prompt"), list) and bool(
        {"reward_model", "extra_info", "gt_answer"} & set(columns)
    )


def _is_dapo(columns: dict) -> bool:
    if not _is_chat(columns):
        return False
    source = columns.get("data_source")
    last = columns["prompt"][-1] if columns["prompt"] else None
    content = columns_of(last).get("content")
    return source == _DAPO_SOURCE or (isinstance(content, str) and _DAPO.fullmatch(content) is not None)


SIMPLERL = Form(
    "simplerl",
    "prompt (a list of messages), reward_model.ground_truth, extra_info (SimpleRL-Zoo)",
    lambda columns: _is_chat(columns) and not _is_dapo(columns),
    lambda place: _row,
)
DAPO = Form(
    "dapo",
    f'prompt (a list of messages), reward_model.ground_truth, data_source "{_DAPO_SOURCE}" (DAPO-Math)',
    _is_dapo,
    lambda place: _row,
)
