"""The forms in which prompts are published: what tells each of them, and what its rows mean."""

from __future__ import annotations

from rlmath.data.forms import areal, chat, plain
from rlmath.data.forms.common import Form

FORMS: dict[str, Form] = {
    form.name: form for form in (areal.BOBA, chat.DAPO, chat.SIMPLERL, areal.V01, plain.PLAIN)
}
"""By their words of data.format, in the order in which a row is compared with them."""


def form_of(columns: dict) -> Form | None:
    """The form of a row, None where it has none of them.

    >>> form_of({"question": "1+1?", "answer": 2}).name
    'question_answer'
    """
    return next((form for form in FORMS.values() if form.fits(columns)), None)
