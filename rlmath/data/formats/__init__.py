"""The forms in which prompts are published: what tells each of them, and what its rows mean."""

from __future__ import annotations

from rlmath.data.formats import areal, question_answer, verl_chat
from rlmath.data.formats.columns import Form

FORMS: dict[str, Form] = {
    form.name: form
    for form in (areal.BOBA, verl_chat.DAPO, verl_chat.SIMPLERL, areal.V01, question_answer.PLAIN)
}
"""By their words of data.format, in the order in which a row is compared with them."""


def form_of(columns: dict) -> Form | None:
    """The form of a row, None where it has none of them.

    >>> form_of({"question": "1+1?", "answer": 2}).name
    'question_answer'
    """
    return next((form for form in FORMS.values() if form.fits(columns)), None)
