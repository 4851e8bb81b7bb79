"""The settings as the schema says them: every key with type, default, allowed values and sentence; `--help`.

Also how a mistake is reported: all problems in one error, each with the nearest word or path that exists.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import os
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.config import algorithm_schema, schema
from rlmath.config.schema import MISSING, Config
from rlmath.config.setting_types import Range, TakesFunction, Words

MAX_NAME_BYTES = 255
"""The longest name of a file or folder that Linux file systems take."""
MAX_PATH_BYTES = 3500
"""The longest path: of Linux's 4,095 bytes, some are for what a run writes below its folder."""


@dataclass(frozen=True)
class Setting:
    """One field of the config as a user sees it: "optimizer.lr", float, 1e-06, "Peak learning rate.", above 0."""

    key: str
    kind: Any
    """Its type without range and words: `int`, `float | None`, `list[int]`, `str`, ..."""
    default: Any
    doc: str
    range: Range | None
    """Of a number, or of every number of a list; None: not a number."""
    words: tuple[str, ...]
    """That a text may be; empty: any, or not a text."""
    takes_function: str | None = None
    """The kind of functions of the user's that it takes, too; None: none."""

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    @property
    def name(self) -> str:
        return self.key.partition(".")[2]

    @property
    def is_text(self) -> bool:
        return self.kind in (str, str | None)

    @property
    def type_name(self) -> str:
        """ "int", "float or null", "list of int", ..."""
        is_list = typing.get_origin(self.kind) is list
        kinds = typing.get_args(self.kind) or (self.kind,)
        names = " or ".join("null" if kind is types.NoneType else kind.__name__ for kind in kinds)
        return f"list of {names}" if is_list else names

    @property
    def written(self) -> str:
        """The type with how a value of it is written where that is not plain: "list of str, written [a, b]"."""
        if self.type_name.startswith("list"):
            return f"{self.type_name}, written {'[a, b]' if 'str' in self.type_name else '[1, 2]'}"
        return self.type_name.replace("bool", "bool (true or false)")

    @property
    def allowed(self) -> str:
        """ "float, above 0", "one of adam, sgd", "str"."""
        if self.words:
            function = ", or a function of yours" if self.takes_function else ""
            return f"one of {', '.join(self.words)}{function}{', or null' if self.type_name != 'str' else ''}"
        return f"{self.type_name}, {self.range}" if self.range else self.type_name

    def problem(self, value: Any, plugins: Collection[str] = ()) -> str | None:
        """What is wrong with a value of the right type: out of its range, or none of its words; None: nothing. A text
        that may name a function of the user's, as it has a colon, or as `plugins` register names, is loaded
        elsewhere."""
        if value is None:
            return None
        if self.words and value not in self.words and not (self.takes_function and (plugins or ":" in value)):
            words = ", ".join(f'"{word}"' for word in self.words)
            own = ', or a function of yours as "package.module:name"' if self.takes_function else ""
            return f'{self.key} is "{value}"; needed: one of {words}{own}.{nearest_word(value, self.words)}'
        limits, numbers = self.range, value if isinstance(value, list) else [value]
        if limits and not all(map(limits.holds, numbers)):
            return f"{self.key} is {value!s:.100}; needed: {limits}. {limits.why}".rstrip()
        return None


@functools.cache
def all_settings() -> Mapping[str, Setting]:
    """Setting by key, in the order of the schema."""
    docs = field_docs(inspect.getsource(algorithm_schema) + inspect.getsource(schema))
    found = {}
    for section, section_class in section_classes().items():
        plain, defaults = typing.get_type_hints(section_class), section_class()
        for name, hint in typing.get_type_hints(section_class, include_extras=True).items():
            inside = list(_parts(hint))
            limits = next((part for part in inside if isinstance(part, Range)), None)
            words = tuple(part for part in inside if isinstance(part, str))
            function = next((part.kind for part in inside if isinstance(part, TakesFunction)), None)
            kind = plain[name] if not words else str | None if types.NoneType in inside else str
            key, doc = f"{section}.{name}", docs.get((section_class.__name__, name), "")
            found[key] = Setting(
                key,
                kind,
                default=getattr(defaults, name),
                doc=doc,
                range=limits,
                words=words,
                takes_function=function,
            )
    return types.MappingProxyType(found)


def _parts(hint: Any) -> Iterator[Any]:
    """A type and what it is made of: the Range of an Annotated and the words of a Literal or of Words among it."""
    yield from hint.words if isinstance(hint, Words) else [hint]
    for part in typing.get_args(hint):
        yield from _parts(part)


@functools.cache
def section_classes() -> Mapping[str, Any]:
    """{"run": RunConfig, "model": ModelConfig, ...} in the order of `Config`."""
    return types.MappingProxyType(typing.get_type_hints(Config))


def setting_values(config: Config) -> dict[str, Any]:
    """{"run.output_dir": "outputs/a", ...} in the order of the schema. Lists are the config's own."""
    return {key: getattr(getattr(config, one.section), one.name) for key, one in all_settings().items()}


def is_among(key: str, names: Iterable[str]) -> bool:
    """Whether a key, or its whole section ("save."), is one of `names`."""
    return any(key.startswith(name) if name.endswith(".") else key == name for name in names)


def schema_problems(config: Config) -> list[str]:
    """Every number out of its range and every text that is none of its words."""
    plugins = config.run.plugins
    found = (all_settings()[key].problem(value, plugins) for key, value in setting_values(config).items())
    return [problem for problem in found if problem]


def text_problems(config: Config) -> Iterator[str]:
    """Texts that no file system takes as a path, whatever they are for: opening one would raise an OSError."""
    for key, value in setting_values(config).items():
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str):
                continue
            encoded = text.encode("utf-8", "surrogatepass")
            longest = max(map(len, encoded.split(b"/")))
            is_utf8 = text == text.encode("utf-8", "ignore").decode()
            if len(encoded) > MAX_PATH_BYTES or longest > MAX_NAME_BYTES or "\0" in text or not is_utf8:
                yield (
                    f"{key} has {len(encoded)} bytes: {text!r:.80}; needed: UTF-8 without NUL, at most "
                    f"{MAX_PATH_BYTES} bytes, {MAX_NAME_BYTES} of them between slashes."
                )


def help_text(word: str = "", width: int | None = None, keys: Collection[str] | None = None) -> str:
    """The sections in a line each; with a `word` the settings of that section, or that setting, or "all", each with
    what it may be, its default and its sentence. Only those of `keys`. ValueError for another word.

    Wrapped to `width` characters, or the terminal's.
    """
    width = width or min(max(shutil.get_terminal_size().columns, 60), 120)

    def wrapped(text: str, first: int, then: int) -> list[str]:
        wrapper = textwrap.TextWrapper(width, " " * first, " " * then, break_on_hyphens=False)
        return wrapper.wrap(text)

    shown = [one for one in all_settings().values() if keys is None or one.key in keys]
    sections = {one.section: inspect.getdoc(section_classes()[one.section]) or "" for one in shown}
    if not word:
        lines = wrapped(
            "Settings, given in a YAML file or as key.sub=value. --help SECTION explains those of a section, --help "
            "all every one:",
            0,
            0,
        )
        for section, doc in sections.items():
            first = re.split(r"[:;(]|\.(?: |$)", " ".join(doc.split()), maxsplit=1)[0].strip()
            lines += wrapped(f"{section:<11} {first}", 2, 14)
        return "\n".join(lines)
    chosen = [one for one in shown if word in ("all", one.section, one.key)]
    if not chosen:
        hint = nearest_word(word, [*sections, *(one.key for one in shown)])
        raise ValueError(
            f'there is no section and no setting "{word}".{hint} Sections: {", ".join(sections)}'
        )
    lines = ["Settings, given in a YAML file or as key.sub=value (null: not set)"]
    section = ""
    for setting in chosen:
        if setting.section != section:
            section = setting.section
            lines += ["", *wrapped(f"{section}: {sections[section]}", 0, 2)]
        default = (
            "must be given" if setting.default == MISSING else f"default {as_yaml_word(setting.default)}"
        )
        lines += wrapped(f"{setting.key}  ({setting.allowed}; {default})", 2, 6)
        lines += wrapped(setting.doc, 6, 6)
    return "\n".join(lines)


def field_docs(source: str) -> dict[tuple[str, str], str]:
    """{("RunConfig", "seed"): "Seed of ..."}: the string that stands right under a field in the source."""
    docs = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for above, below in zip(node.body, node.body[1:], strict=False):
            match above, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[node.name, name] = " ".join(text.split())
    return docs


def raise_problems(of_what: str, problems: list[str]) -> None:
    """One ValueError that lists all `problems`; nothing when there are none."""
    if not problems:
        return
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise ValueError("\n".join([f"{count} with {of_what}:", *(f"  - {problem}" for problem in problems)]))


def counted(count: int, noun: str) -> str:
    """ "1 row", "2 rows"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def nearest_word(word: str, words: Iterable[str]) -> str:
    """' Did you mean "cosine"?' or, when nothing is near, ''. Upper and lower case are alike.

    >>> nearest_word("Cosin", ["cosine", "linear"])
    ' Did you mean "cosine"?'
    """
    known = {one.lower(): one for one in words}
    near = difflib.get_close_matches(word.lower(), list(known), 1)
    return f' Did you mean "{known[near[0]]}"?' if near else ""


def nearest_path(path: Path) -> str:
    """' There is "data/train.jsonl".': what there is beside a path that does not exist, or ''."""
    if str(path).startswith("~"):
        return ' "~" is not expanded here: write the full path.'
    try:
        there = os.listdir(path.parent)
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, there, 1)
    return f' There is "{path.parent / near[0]}".' if near else ""


def as_yaml_word(value: Any) -> str:
    """A value as one writes it in YAML: null, true, 3, [1, 2]."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{', '.join(map(as_yaml_word, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
