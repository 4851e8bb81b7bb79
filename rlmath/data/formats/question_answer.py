"""Plain problems with their answers, as benchmarks have them."""

from __future__ import annotations

import re

from rlmath.data.formats.columns import Form, answer_text, further_columns, id_of, text_of
from rlmath.data.rows import PromptRow, RowError, short
from rlmath.rewards.extraction import extract_boxed

_PROBLEM = ("problem", "question", "prompt")
_ANSWER = ("answer", "final_answer", "solution")
_ID = ("query_id", "unique_id", "id", "idx")
_WORKED = "####"
"""What GSM8K's worked solutions have before the answer."""
_GROUPED = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_LETTER = re.compile(r"[A-J]")


def _row(columns: dict, number: int) -> PromptRow:
    key = next((key for key in _PROBLEM if isinstance(columns.get(key), str) and columns[key].strip()), None)
    if key is None:
        given = next((key for key in _PROBLEM if key in columns), _PROBLEM[0])
        raise RowError(f"{given} must be a string that is not blank, got {short(columns.get(given))}")
    problem = text_of(columns, key)
    context = columns.get("context")
    if isinstance(context, str) and context.strip():
        problem = f"{text_of(columns, 'context')}\n{problem}"
    solutions = _solutions(columns)
    choice = isinstance(columns.get("options"), list) and all(map(_LETTER.fullmatch, solutions))
    return PromptRow(
        prompt=problem,
        task="choice" if choice else "math",
        query_id=id_of(columns, _ID, number),
        solutions=solutions,
        more_json=further_columns(columns, (key, "context")),
        whole=False,
    )


def _solutions(columns: dict) -> tuple[str, ...]:
    """Of `answer`; else of `final_answer` (OlympiadBench); else of the box in `solution` (Minerva)."""
    if columns.get("answer") is not None:
        return _answers(columns["answer"], "answer")
    if columns.get("final_answer") is not None:
        found = _answers(columns["final_answer"], "final_answer")
        return (", ".join(found),) if columns.get("is_multiple_answer") is True else found
    if isinstance(columns.get("solution"), str):
        boxed = extract_boxed(columns["solution"])
        if boxed is None or not boxed.strip():
            raise RowError("no answer, and no \\boxed{...} in solution")
        return (boxed.strip(),)
    raise RowError(f"no answer in {', '.join(_ANSWER)}")


def _answers(value: object, name: str) -> tuple[str, ...]:
    if isinstance(value, list):
        if not value:
            raise RowError(f"{name} is an empty list")
        return tuple(_final(answer_text(one, f"each of {name}"), name) for one in value)
    return (_final(answer_text(value, name), name),)


def _final(text: str, name: str) -> str:
    """Behind GSM8K's mark, without the commas of thousands, and without dollars around all of it."""
    if _WORKED in text:
        text = text.rpartition(_WORKED)[2].strip()
        if not text:
            raise RowError(f"nothing behind {_WORKED} in {name}")
    if _GROUPED.fullmatch(text):
        return text.replace(",", "")
    if len(text) > 2 and text[0] == text[-1] == "$" and "$" not in text[1:-1]:
        return text[1:-1].strip()
    return text


PLAIN = Form(
    "question_answer",
    "problem or question, and answer (or final_answer, or solution with a box)",
    lambda columns: (
        any(isinstance(columns.get(key), str) for key in _PROBLEM) and any(key in columns for key in _ANSWER)
    ),
    lambda place: _row,
)
