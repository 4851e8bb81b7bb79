"""Problems of a user's YAML and its interpolations in our own words.

They have the line, and what is needed there."""

from __future__ import annotations

import re

import yaml
from omegaconf.errors import (
    InterpolationKeyError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from rlmath.config.help import nearest_word, unknown_key_text

_IN_QUOTES = "Put the text in quotes"
_PROBLEMS = (
    (r"tab character|found character '\\t'", "a tab indents it; needed: spaces"),
    (
        r"mapping values are not allowed",
        '": " stands where no name can be: in a value (put that in quotes), or below a line that '
        "lacks one",
    ),
    (r"found duplicate key \"?([\w.-]+)", "{0} stands twice; needed: once"),
    (r"expected ',' or '\]'", 'a list is not closed; needed: "]", and commas between its values'),
    (
        r"expected ',' or '\}'",
        'a mapping is not closed; needed: "}}", and commas between its values',
    ),
    (
        r"unexpected end of stream",
        "a quotation mark is not closed; needed: the same mark behind the text",
    ),
    (
        r"undefined alias",
        f"a value begins with *, which names an anchor that is not there. {_IN_QUOTES}",
    ),
    (
        r"cannot start any token",
        "a line or value begins with a character that YAML keeps for itself, as a tab or %. "
        f"{_IN_QUOTES}",
    ),
    (
        r"expected node content",
        "a value is missing, or a bracket before it is not the one that ends it",
    ),
    (
        r"could not determine a constructor for the tag '([^']*)'",
        "the tag {0} is unknown; take it out",
    ),
    (
        r"expected <block end>|expected key|could not find expected ':'",
        'needed: "name: value" in each line, indented as the lines beside it',
    ),
)
"""Patterns of the parser's messages on common mistakes, and what the user is told."""


def yaml_problem(error: Exception) -> str:
    """ "line 3: a tab indents it; needed: spaces"."""
    if isinstance(error, LookupError | AttributeError):
        return f"a value is none of its tag ({error}); take the tag out"
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    problem = str(error.problem)
    for pattern, text in _PROBLEMS:
        if (match := re.search(pattern, problem)) is not None:
            problem = text.format(*match.groups())
            break
    # Where something is not closed, that begins where the context does.
    mark = error.context_mark if "not closed" in problem else error.problem_mark
    mark = mark or error.problem_mark or error.context_mark
    return problem if mark is None else f"line {mark.line + 1}: {problem}"


_RESOLVERS = {
    "times": "${times:2,${data.prompts_per_step}}, two numbers",
    "oc.env": "${oc.env:NAME}, or ${oc.env:NAME,default}",
}
"""Forms of `${...:...}`, as they are written."""


def interpolation_problem(error: Exception, needed: str) -> str:
    """The problem of what `${...}` stands for; `needed` is the setting's type."""
    text = str(error).partition("\n")[0]
    if (match := re.search(r"Environment variable '(.*)' not found", text)) is not None:
        return (
            f"the environment variable {match[1]} is not set; set it, or write "
            f"${{oc.env:{match[1]},default}}"
        )
    if isinstance(error, UnsupportedInterpolationType):
        name = text.rpartition(" ")[2]
        forms = "; ".join([*_RESOLVERS.values(), "${section.name}, another setting"])
        return f'there is no "${{{name}:...}}"; needed: {forms}.{nearest_word(name, _RESOLVERS)}'
    if (
        isinstance(error, InterpolationKeyError)
        and (match := re.search(r"key '(.*)' not found", text)) is not None
    ):
        return unknown_key_text(match[1])
    if isinstance(error, RecursionError) or "Recursive interpolation" in text:
        return "it stands for itself; needed: a value"
    if (match := re.search(r"Value '(.*)' of type '\w+' could not be converted", text)) is not None:
        return f"it stands for {match[1]!r}; needed: {needed}"
    if (match := re.search(r"raised while resolving interpolation: (.*)", text)) is not None:
        return f"{match[1].partition(' at full key')[0]}; needed: {'; '.join(_RESOLVERS.values())}"
    assert isinstance(error, OmegaConfBaseException | ValueError)
    return text
