"""The forms in which prompts are published: how each is recognised and read.

boba              AReaL-boba and ORZ: a whole prompt with its solutions
areal_v01         AReaL v0.1: a whole prompt; the solutions are in id2info.json beside
dapo, simplerl    verl's: a chat in `prompt`, the answer in `reward_model`
question_answer   plain problems with their answers, as benchmarks have them
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from operator import attrgetter
from pathlib import Path

from rlmath.answers.extraction import extract_boxed
from rlmath.answers.verifier import MAX_SOLUTIONS, TASKS
from rlmath.config.files import read_json_object
from rlmath.data.columns import checked_text, messages_of, texts_of, tools_of
from rlmath.data.files import CHARACTERS_PER_TOKEN, MAX_TEXT_CHARACTERS, raw_rows
from rlmath.data.rows import (
    PromptFile,
    PromptRow,
    RawRow,
    RowError,
    UnusableRow,
    short,
    unusable_lines,
)
from rlmath.data.tokenizer import has_template
from rlmath.workers.user_functions import UserFunction

Reader = Callable[[dict, int], PromptRow]
"""(columns, number of the row) to the row; RowError where it cannot be used."""


@dataclass(frozen=True)
class Form:
    """One form of prompt files."""

    name: str
    """Its word of data.format."""
    columns: str
    """Description of its rows' columns, for people."""
    fits: Callable[[dict], bool]
    """Whether a row is of this form, as far as its columns show."""
    reader_of: Callable[[Path], Reader]
    """The reader for a file or folder; ValueError where a file that belongs to it is missing."""


def text_of(columns: dict, key: str) -> str:
    """A column that must be a text with something in it."""
    return checked_text(columns.get(key), key)


def answer_text(value: object, name: str) -> str:
    """An answer as the verifier reads it: numbers without an empty fraction.

    >>> answer_text(27.0, "answer"), answer_text(0.5, "answer"), answer_text(" 3 ", "answer")
    ('27', '0.5', '3')
    """
    if isinstance(value, str):
        return checked_text(value, name).strip()
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise RowError(f"{name} must be a string or a number, got {short(value)}")
    if not isinstance(value, int) and not math.isfinite(value):
        raise RowError(f"{name} is {value}, which is no answer")
    try:
        number = Decimal(repr(value) if isinstance(value, float) else value)
        text = (
            f"{number:f}"
            if number != number.to_integral_value()
            else f"{number.to_integral_value():f}"
        )
    except (ArithmeticError, ValueError) as error:
        raise RowError(f"{name} is a number of too many digits") from error
    return "0" if text == "-0" else text


def id_of(columns: dict, keys: Collection[str], number: int) -> str:
    """The first of the columns that names the row; its number, from 0, where none does."""
    for key in keys:
        name = columns.get(key)
        if isinstance(name, str) and name.strip():
            return checked_text(name, key)
        if isinstance(name, int) and not isinstance(name, bool):
            return answer_text(name, key)
    return str(number - 1)


def further_columns(columns: dict, used: Collection[str]) -> str:
    """The columns that are not `used`, as a JSON object.

    Values that JSON lacks, such as dates, become their text."""
    try:
        return json.dumps(
            {key: column for key, column in columns.items() if key not in used}, default=str
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(
            f"its further columns cannot be written as JSON ({str(error)[:100]})"
        ) from error


def check_length(row: PromptRow, most_characters: int) -> None:
    """RowError for a problem, with its messages and tools, of more characters."""
    count = max(len(row.prompt), sum(map(len, texts_of([*row.messages, *row.tools]))))
    if count > most_characters:
        raise RowError(
            f"its text has {count} characters, more than {most_characters}; it is not tokenized "
            f"({CHARACTERS_PER_TOKEN} characters for each token that it may have)"
        )


def columns_of(value: object) -> dict:
    """A value that is a dict of columns; an empty dict where it is something else."""
    return value if isinstance(value, dict) else {}


# ---------------------------------------------------------------- AReaL


_BOBA_COLUMNS = ("prompt", "task", "query_id", "solutions")
SOLUTIONS_FILE = "id2info.json"


def _boba_row(columns: dict, number: int) -> PromptRow:
    missing = [key for key in _BOBA_COLUMNS if key not in columns]
    if missing:
        keys_text = ", ".join(repr(key) for key in list(columns)[:20]) or "no keys"
        raise RowError(f"missing {', '.join(missing)}; the row has {keys_text}")
    return _areal_row(columns, columns["solutions"])


def _areal_row(columns: dict, solutions: object) -> PromptRow:
    """A row of AReaL's forms, whose prompt is whole."""
    prompt = text_of(columns, "prompt")
    task = text_of(columns, "task") if "task" in columns else "math"
    query_id = text_of(columns, "query_id")
    if not isinstance(solutions, list) or not solutions:
        raise RowError(f"solutions must be a list of at least one string, got {short(solutions)}")
    texts = tuple(checked_text(solution, "each of solutions") for solution in solutions)
    return PromptRow(
        prompt, task, query_id, solutions=texts, more_json=further_columns(columns, _BOBA_COLUMNS)
    )


def _v01_reader(place: Path) -> Reader:
    """The reader for AReaL v0.1, whose solutions are in a file beside the prompts."""
    file = (place if place.is_dir() else place.parent) / SOLUTIONS_FILE
    if not file.is_file():
        raise ValueError(
            f"{place}: its rows have prompts without solutions, as AReaL v0.1 has them; {file} "
            "with the solutions "
            "is needed beside it. Download it from the same data set"
        )
    known_problems = read_json_object(file, most_bytes=2**30)  # the published file is far below

    def read(columns: dict, number: int) -> PromptRow:
        query_id = text_of(columns, "query_id")
        problem = known_problems.get(query_id)
        if not isinstance(problem, dict):
            raise RowError(f"{SOLUTIONS_FILE} has no solutions of query_id {query_id[:60]!r}")
        return _areal_row(columns, problem.get("solutions"))

    return read


BOBA = Form(
    "boba",
    "prompt, task, query_id, solutions (AReaL-boba, ORZ)",
    lambda columns: "solutions" in columns and "prompt" in columns,
    lambda place: _boba_row,
)
V01 = Form(
    "areal_v01",
    f"prompt, query_id, with {SOLUTIONS_FILE} beside (AReaL v0.1)",
    lambda columns: (
        {"prompt", "query_id"} <= set(columns) and not {"answer", "reward_model"} & set(columns)
    ),
    _v01_reader,
)


# ---------------------------------------------------------------- verl: DAPO-Math and SimpleRL-Zoo


_DAPO_TEXT = re.compile(
    r"Solve the following math problem step by step\. The last line of your response should be of "
    r"the form "
    r"Answer: \$Answer \(without quotes\) where \$Answer is the answer to the "
    r"problem\.\n\n(?P<problem>.*)\n\n"
    r'Remember to put your answer on its own line after "Answer:"\.\s*',
    re.DOTALL,
)
_DAPO_SOURCE = "math_dapo"


def _chat_solutions(columns: dict) -> tuple[str, ...]:
    """The answers of a chat's row, from the first of its columns that has any."""
    extra = columns_of(columns.get("extra_info"))
    reward = columns_of(columns.get("reward_model"))
    places = {
        "reward_model.ground_truth": reward.get("ground_truth"),
        "extra_info.answer": extra.get("answer"),
        "gt_answer": columns.get("gt_answer"),
        "answer": columns.get("answer"),
    }
    for name, ground_truth in places.items():
        if isinstance(ground_truth, list) and ground_truth:
            return tuple(answer_text(answer, f"each of {name}") for answer in ground_truth)
        if ground_truth is not None and ground_truth != "":
            return (answer_text(ground_truth, name),)
    raise RowError(f"no answer in {', '.join(places)}")


def _chat_problem(columns: dict, last: str) -> str:
    """The problem without the text that the chat wraps it in, where the row shows it."""
    wrapped = _DAPO_TEXT.fullmatch(last)
    if wrapped and wrapped["problem"].strip():
        return wrapped["problem"]
    question = columns_of(columns.get("extra_info")).get("question") or columns.get("question")
    return (
        checked_text(question, "question")
        if isinstance(question, str) and question.strip()
        else last
    )


def _chat_row(columns: dict, number: int) -> PromptRow:
    """A row of verl's forms; a chat of one message with a template is a whole prompt."""
    messages = messages_of(columns.get("prompt"), "prompt")
    role = messages[-1]["role"]
    if role != "user":
        raise RowError(
            f'the last message of prompt must be that of the "user", got that of {role[:60]!r}'
        )
    last = checked_text(messages[-1]["content"], "content")
    is_whole = len(messages) == 1 and has_template(last)
    extra = columns_of(columns.get("extra_info"))
    name_columns = {"index": extra.get("index")} | {
        key: columns.get(key) for key in ("query_id", "id", "idx")
    }
    return PromptRow(
        prompt=last if is_whole else _chat_problem(columns, last),
        task="math",
        query_id=id_of(name_columns, tuple(name_columns), number),
        solutions=_chat_solutions(columns),
        more_json=further_columns(columns, ("prompt",)),
        whole=is_whole,
        messages=() if is_whole else messages,
        tools=() if is_whole else tools_of(columns.get("tools")),
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
    return source == _DAPO_SOURCE or (
        isinstance(content, str) and _DAPO_TEXT.fullmatch(content) is not None
    )


SIMPLERL = Form(
    "simplerl",
    "prompt (a list of messages), reward_model.ground_truth, extra_info (SimpleRL-Zoo)",
    lambda columns: _is_chat(columns) and not _is_dapo(columns),
    lambda place: _chat_row,
)
DAPO = Form(
    "dapo",
    f'prompt (a list of messages), reward_model.ground_truth, data_source "{_DAPO_SOURCE}" '
    "(DAPO-Math)",
    _is_dapo,
    lambda place: _chat_row,
)


# ---------------------------------------------------------------- plain problems


_PROBLEM = ("problem", "question", "prompt")
_ANSWER = ("answer", "final_answer", "solution")
_WORKED = "####"
"""The mark before the answer in GSM8K's worked solutions."""
_GROUPED = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")


def _plain_row(columns: dict, number: int) -> PromptRow:
    """A row of the plain form, with its context before the problem."""
    key = next(
        (key for key in _PROBLEM if isinstance(columns.get(key), str) and columns[key].strip()),
        None,
    )
    if key is None:
        problem_column = next((key for key in _PROBLEM if key in columns), _PROBLEM[0])
        raise RowError(
            f"{problem_column} must be a string that is not blank, "
            f"got {short(columns.get(problem_column))}"
        )
    problem = text_of(columns, key)
    context = columns.get("context")
    if isinstance(context, str) and context.strip():
        problem = f"{text_of(columns, 'context')}\n{problem}"
    solutions = _plain_solutions(columns)
    choice = isinstance(columns.get("options"), list) and all(
        re.fullmatch("[A-J]", solution) for solution in solutions
    )
    return PromptRow(
        prompt=problem,
        task="choice" if choice else "math",
        query_id=id_of(columns, ("query_id", "unique_id", "id", "idx"), number),
        solutions=solutions,
        more_json=further_columns(columns, (key, "context")),
        whole=False,
    )


def _plain_solutions(columns: dict) -> tuple[str, ...]:
    """The answers of a plain row: `answer`, else `final_answer`, else the box in `solution`.

    `final_answer` is OlympiadBench's, the box Minerva's."""
    if columns.get("answer") is not None:
        return _answers(columns["answer"], "answer")
    if columns.get("final_answer") is not None:
        answers = _answers(columns["final_answer"], "final_answer")
        return (", ".join(answers),) if columns.get("is_multiple_answer") is True else answers
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
        return tuple(_final(answer_text(answer, f"each of {name}"), name) for answer in value)
    return (_final(answer_text(value, name), name),)


def _final(text: str, name: str) -> str:
    """The answer after GSM8K's mark, without commas of thousands and surrounding dollars."""
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
        any(isinstance(columns.get(key), str) for key in _PROBLEM)
        and any(key in columns for key in _ANSWER)
    ),
    lambda place: _plain_row,
)


# ---------------------------------------------------------------- a form of the user's


_PROBLEM_KEYS = ("prompt", "solutions", "query_id", "task")


def _own_rows(
    function: UserFunction, raw: Iterable[RawRow]
) -> Iterator[tuple[RawRow, PromptRow | RowError]]:
    """Each raw row with the row that the user's data form makes of it, or the error."""
    n_late = n_before = 0
    rows = iter(raw)
    while chunk := list(itertools.islice(rows, _AT_ONCE)):
        parsed_rows: list[PromptRow | RowError | None] = [None] * len(chunk)
        calls: dict[int, tuple[dict]] = {}
        for place, raw_row in enumerate(chunk):
            if raw_row.columns is None:
                parsed_rows[place] = RowError(raw_row.reason)
                continue
            try:
                calls[place] = (json.loads(json.dumps(raw_row.columns, default=str)),)
            except (TypeError, ValueError, RecursionError) as error:
                parsed_rows[place] = RowError(
                    f"its columns cannot be written as JSON ({str(error)[:100]})"
                )
        for place, outcome in zip(calls, function.map(calls.values()), strict=True):
            n_late += outcome.failure == "timeout"
            if n_late > _MOST_LATE:
                raise ValueError(
                    f"{function.hook.setting} {function}: {function.reason(outcome)} on each of "
                    f"{n_late} rows; the last "
                    f"is {chunk[place].where}. Make it faster"
                )
            try:
                if outcome.failure is not None:
                    raise RowError(
                        f"{function.hook.setting} {function} failed: {function.reason(outcome)}"
                    )
                parsed_rows[place] = _own_row(
                    function, outcome.value, calls[place][0], number=n_before + place + 1
                )
            except RowError as error:
                parsed_rows[place] = error
        for raw_row, row in zip(chunk, parsed_rows, strict=True):
            assert row is not None
            yield raw_row, row
        n_before += len(chunk)


def _own_row(
    function: UserFunction, returned: dict | None, columns: dict, number: int
) -> PromptRow:
    """The row that a data form of the user's `returned`; RowError where it cannot be used."""
    if returned is None:
        raise RowError(f"{function} leaves it out")
    unknown = [key for key in returned if key not in _PROBLEM_KEYS]
    if unknown:
        raise RowError(f"{function} returned {unknown[0]!r:.40}; known: {', '.join(_PROBLEM_KEYS)}")
    solutions = returned.get("solutions")
    if not isinstance(solutions, list) or not solutions:
        raise RowError(
            f"solutions of {function} must be a list of at least one answer, got {short(solutions)}"
        )
    task = returned.get("task", TASKS[0])
    if task not in TASKS:
        raise RowError(f"task of {function} is {short(task)}; needed: {' or '.join(TASKS)}")
    return PromptRow(
        prompt=text_of(returned, "prompt"),
        task=task,
        query_id=id_of(returned, ("query_id",), number),
        solutions=tuple(answer_text(solution, "each of solutions") for solution in solutions),
        more_json=further_columns(columns, ()),
        whole=False,
    )


# ---------------------------------------------------------------- reading


_AT_ONCE = 100
"""Rows that wait for a data form of the user's at a time."""
_MOST_LATE = 20
"""Rows of a file on which a data form of the user's may take too long."""
FORMS: dict[str, Form] = {form.name: form for form in (BOBA, DAPO, SIMPLERL, V01, PLAIN)}
"""Forms by their words of data.format, in the order in which a row is compared with them."""


def form_of(columns: dict) -> Form | None:
    """The form of a row, None where it has none of them."""
    return next((form for form in FORMS.values() if form.fits(columns)), None)


_LOOKED_AT = 100
"""Rows that are read to find the form."""
_contents = attrgetter("prompt", "task", "solutions", "messages", "tools")
"""The fields that rows with one query_id must have in common."""


def read_prompts(
    path: str, form: str | UserFunction = "auto", most_characters: int = MAX_TEXT_CHARACTERS
) -> PromptFile:
    """All rows of a file or folder of prompts, in its order.

    `form` is a word of data.format, or a function. Rows that cannot be used, such as those of more
    than `most_characters`, are listed with their reasons, and repeated ones are counted. ValueError
    where the file cannot be read, has another form or none, or has no row that can be used."""
    rows = raw_rows(path)
    if isinstance(form, UserFunction):
        about = f"what {form} makes of its rows"
        return _collected(
            path,
            str(form),
            about,
            parsed_rows=_own_rows(form, rows),
            most_characters=most_characters,
        )
    first: list[RawRow] = []
    for row in rows:
        first.append(row)
        if len(first) == _LOOKED_AT or (row.columns is not None and form_of(row.columns)):
            break
    file_form = _checked_form(path, form, first)
    parsed_rows = _rows_of(file_form.reader_of(Path(path)), itertools.chain(first, rows))
    return _collected(
        path,
        file_form.name,
        file_form.columns,
        parsed_rows=parsed_rows,
        most_characters=most_characters,
    )


def _checked_form(path: str, form: str, first: list[RawRow]) -> Form:
    """The form of the first rows.

    ValueError where they have none, or not the one that `form` names."""
    forms = [form_of(row.columns) for row in first if row.columns is not None]
    first_form = next(filter(None, forms), None)
    if form != "auto" and (first_form is FORMS[form] or (first_form is None and forms)):
        return FORMS[form]
    if form == "auto" and first_form is not None:
        return first_form
    known_forms = "".join(
        f'\n    "{known_form.name}": {known_form.columns}' for known_form in FORMS.values()
    )
    needed = (
        "Needed: JSON lines, parquet or Arrow with one problem a row. Rename its columns, or give "
        "data.format=my_rows.py:function, a function of yours that reads them (docs/data.md). "
        "Forms there are:"
    )
    row = next((row for row in first if row.columns is not None), None)
    if row is None:
        raise ValueError(
            f"{first[0].where}: {first[0].reason}; it begins {first[0].start!r}. Needed: JSON "
            "lines, parquet or Arrow "
            "with one problem a row. Mend that line, or give another file"
        )
    assert row.columns is not None
    columns_text = f"it has the columns {', '.join(map(repr, list(row.columns)[:20])) or 'none'}"
    description = f'of the form "{first_form.name}"' if first_form else "of an unknown form"
    raise ValueError(
        f'{path} has rows {description}; data.format is "{form}". {row.where}: {columns_text}. '
        f"{needed}{known_forms}"
    )


def _rows_of(read: Reader, raw: Iterable[RawRow]) -> Iterator[tuple[RawRow, PromptRow | RowError]]:
    """Each raw row with the row that the reader makes of it, or the error."""
    for number, raw_row in enumerate(raw, start=1):
        try:
            if raw_row.columns is None:
                raise RowError(raw_row.reason)
            yield raw_row, read(raw_row.columns, number)
        except RowError as error:
            yield raw_row, error
        except RecursionError:
            yield raw_row, RowError("nested too deep")


def _collected(
    path: str,
    name: str,
    about: str,
    parsed_rows: Iterable[tuple[RawRow, PromptRow | RowError]],
    most_characters: int,
) -> PromptFile:
    """The rows that can be used; `name` and `about` are the form's."""
    rows: list[PromptRow] = []
    unusable: list[UnusableRow] = []
    repeated = 0
    first_of_id: dict[str, tuple[int, str]] = {}
    for raw_row, row in parsed_rows:
        try:
            if isinstance(row, RowError):
                raise row
            check_length(row, most_characters)
            if len(row.solutions) > MAX_SOLUTIONS:
                raise RowError(
                    f"it has {len(row.solutions)} solutions; at most {MAX_SOLUTIONS} are compared "
                    "with"
                )
            if row.query_id not in first_of_id:
                first_of_id[row.query_id] = len(rows), raw_row.where
                rows.append(row)
                continue
            index, earlier_place = first_of_id[row.query_id]
            if _contents(rows[index]) != _contents(row):
                raise RowError(
                    f"query_id {row.query_id[:60]!r} is already used in {earlier_place} "
                    "with other contents"
                )
            repeated += 1
        except RowError as error:
            unusable.append(UnusableRow(raw_row.where, str(error), raw_row.start))
    if not rows:
        reasons = "".join(f"\n    {line}" for line in unusable_lines(path, unusable))
        raise ValueError(
            f'{path}: none of its {len(unusable)} rows can be used as "{name}" ({about}). How '
            "many, and "
            f"why:{reasons}"
        )
    return PromptFile(name, rows, unusable, repeated)
