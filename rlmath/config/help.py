"""The settings as the schema has them, and their `--help`.

Every key has its type, default, allowed values and sentence.

Also how a mistake is reported: all problems in one error, each with the nearest word or path that
exists.
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
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.config import algorithm_schema, objectives, schema
from rlmath.config.aliases import Alias, exact_aliases, is_alias, plain_name, similar_aliases
from rlmath.config.schema import MISSING, Config
from rlmath.config.setting_types import NamedValues, Range, TakesFunction, Words

MAX_NAME_BYTES = 255
"""The longest name of a file or folder that Linux file systems take."""
MAX_PATH_BYTES = 3500
"""The longest path: of Linux's 4,095 bytes, some are for what a run writes below its folder."""
MOST_ALIASES = 4
"""Most names of other trainers that the error of one unknown key explains."""
MOST_LETTERS_APART = 3
"""A key that differs from a known one in more letters is no slip of the hand."""


@dataclass(frozen=True)
class Setting:
    """One field of the config as a user sees it.

    An example is "optimizer.lr", float, 1e-06, "Peak learning rate.", above 0."""

    key: str
    kind: Any
    """Its type without range and words: `int`, `float | None`, `list[int]`, `str`, ..."""
    default: Any
    doc: str
    range: Range | None
    """Range of a number, or of every number of a list; None: not a number."""
    words: tuple[str, ...]
    """That a text may be; empty: any, or not a text."""
    takes_function: str | None = None
    """The kind of functions of the user's that it takes, too; None: none."""
    takes_mapping: bool = False
    """Whether a mapping may be written for a list of texts "name=value"
    (`setting_types.NamedValues`)."""

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
        """The type, and how a value of it is written where that is not plain.

        An example is "list of str, written [a, b]"."""
        if self.takes_mapping:
            return f"{self.type_name}, written {{a: 1, b: 2}} or [a=1, b=2]"
        if self.type_name.startswith("list"):
            return f"{self.type_name}, written {'[a, b]' if 'str' in self.type_name else '[1, 2]'}"
        return self.type_name.replace("bool", "bool (true or false)")

    @property
    def allowed(self) -> str:
        """ "float, above 0", "one of adam, sgd", "str"."""
        if self.words:
            function = ", or a function of yours" if self.takes_function else ""
            return (
                "one of "
                f"{', '.join(self.words)}{function}{', or null' if self.type_name != 'str' else ''}"
            )
        return f"{self.type_name}, {self.range}" if self.range else self.type_name

    def problem(self, value: Any, plugins: Collection[str] = ()) -> str | None:
        """The problem of a value of the right type: out of its range, or none of its words.

        None: there is none. A text that may name a function of the user's, because it has a colon
        or because `plugins` register names, is loaded elsewhere."""
        if value is None:
            return None
        if (
            self.words
            and value not in self.words
            and not (self.takes_function and (plugins or ":" in value))
        ):
            words = ", ".join(f'"{word}"' for word in self.words)
            function_text = (
                ', or a function of yours as "package.module:name"' if self.takes_function else ""
            )
            return (
                f'{self.key} is "{value}"; needed: one of '
                f"{words}{function_text}.{nearest_word(value, self.words)}"
            )
        limits = self.range
        numbers = value if isinstance(value, list) else [value]
        if limits and not all(map(limits.holds, numbers)):
            return (
                f"{self.key} is {value!s:.100}; needed: {limits.needed(numbers)}. {limits.why}"
            ).rstrip()
        return None


@functools.cache
def all_settings() -> Mapping[str, Setting]:
    """Setting by key, in the order of the schema."""
    docs = field_docs("".join(map(inspect.getsource, (objectives, algorithm_schema, schema))))
    settings = {}
    for section, section_class in section_classes().items():
        plain = typing.get_type_hints(section_class)
        defaults = section_class()
        for name, hint in typing.get_type_hints(section_class, include_extras=True).items():
            inside = list(_parts(hint))
            limits = next((part for part in inside if isinstance(part, Range)), None)
            words = tuple(part for part in inside if isinstance(part, str))
            function = next((part.kind for part in inside if isinstance(part, TakesFunction)), None)
            kind = plain[name] if not words else str | None if types.NoneType in inside else str
            key = f"{section}.{name}"
            places = [(parent.__name__, name) for parent in section_class.__mro__]
            doc = next((docs[place] for place in places if place in docs), "")
            settings[key] = Setting(
                key,
                kind,
                default=getattr(defaults, name),
                doc=doc,
                range=limits,
                words=words,
                takes_function=function,
                takes_mapping=any(isinstance(part, NamedValues) for part in inside),
            )
    return types.MappingProxyType(settings)


def _parts(hint: Any) -> Iterator[Any]:
    """A type and its parts, such as an Annotated's Range and the words of a Literal or of Words."""
    yield from hint.words if isinstance(hint, Words) else [hint]
    for part in typing.get_args(hint):
        yield from _parts(part)


@functools.cache
def section_classes() -> Mapping[str, Any]:
    """{"run": RunConfig, "model": ModelConfig, ...} in the order of `Config`."""
    return types.MappingProxyType(typing.get_type_hints(Config))


def setting_values(config: Config) -> dict[str, Any]:
    """{"run.output_dir": "outputs/a", ...} in the order of the schema.

    Lists are the config's own."""
    return {
        key: getattr(getattr(config, setting.section), setting.name)
        for key, setting in all_settings().items()
    }


def is_among(key: str, names: Iterable[str]) -> bool:
    """Whether a key, or its whole section ("save."), is one of `names`."""
    return any(key.startswith(name) if name.endswith(".") else key == name for name in names)


def schema_problems(config: Config) -> list[str]:
    """Every number out of its range and every text that is none of its words."""
    plugins = config.run.plugins
    problems = (
        all_settings()[key].problem(value, plugins) for key, value in setting_values(config).items()
    )
    return [problem for problem in problems if problem]


def text_problems(config: Config) -> Iterator[str]:
    """Problems of texts that no file system takes as a path, whatever they are for.

    Opening one would raise an OSError."""
    for key, value in setting_values(config).items():
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str):
                continue
            encoded = text.encode("utf-8", "surrogatepass")
            longest = max(map(len, encoded.split(b"/")))
            is_utf8 = text == text.encode("utf-8", "ignore").decode()
            if (
                len(encoded) > MAX_PATH_BYTES
                or longest > MAX_NAME_BYTES
                or "\0" in text
                or not is_utf8
            ):
                yield (
                    f"{key} has {len(encoded)} bytes: {text!r:.80}; needed: UTF-8 without NUL, at "
                    "most "
                    f"{MAX_PATH_BYTES} bytes, {MAX_NAME_BYTES} of them between slashes."
                )


def help_text(word: str = "", width: int | None = None, keys: Collection[str] | None = None) -> str:
    """The help on settings, wrapped to `width` characters or the terminal's.

    Without a `word` it has a line for each section. With one it has the settings of that section,
    or that setting, or of "all", each with what it may be, its default and its sentence; or the
    settings of that name in any section, and those that another trainer's name of it corresponds
    to. Only settings of `keys` are in it. ValueError for another word."""
    width = width or min(max(shutil.get_terminal_size().columns, 60), 120)

    def wrapped(text: str, first_indent: int, further_indent: int) -> list[str]:
        wrapper = textwrap.TextWrapper(
            width, " " * first_indent, " " * further_indent, break_on_hyphens=False
        )
        return wrapper.wrap(text)

    settings = [
        setting for setting in all_settings().values() if keys is None or setting.key in keys
    ]
    sections = _section_texts(settings)
    if not word:
        lines = wrapped(
            "Settings, given in a YAML file or as key.sub=value. --help SECTION explains those of "
            "a section, --help "
            "all every one, --help NAME what is called so, here or by another trainer "
            "(learning_rate):",
            0,
            0,
        )
        for section, doc in sections.items():
            summary = re.split(r"[:;(]|\.(?: |$)", " ".join(doc.split()), maxsplit=1)[0].strip()
            lines += wrapped(f"{section:<11} {summary}", 2, 14)
        return "\n".join(lines)
    chosen = [setting for setting in settings if word in ("all", setting.section, setting.key)]
    lines = []
    if not chosen:
        aliases, keys_of_name = settings_of_name(word)
        chosen = [setting for setting in settings if setting.key in keys_of_name]
        lines = [line for alias in aliases for line in wrapped(f"{alias}.", 0, 2)]
        if keys_of_name and not chosen:
            raise ValueError(
                f"{', '.join(keys_of_name)}: without effect in this program, so it has no help here"
            )
    if not chosen and not lines:
        hint = near_key(word)
        suggestion = f' Did you mean "{hint}"?' if hint else _settings_with(word, settings)
        raise ValueError(
            f'there is no section and no setting "{word}".{suggestion} Sections: '
            f"{', '.join(sections)}"
        )
    if not chosen:
        return "\n".join(lines)
    lines += [""] * bool(lines) + [
        "Settings, given in a YAML file or as key.sub=value (null: not set)"
    ]
    section = ""
    for setting in chosen:
        if setting.section != section:
            section = setting.section
            lines += ["", *wrapped(f"{section}: {sections[section]}", 0, 2)]
        default = (
            "must be given"
            if setting.default == MISSING
            else f"default {as_yaml_word(setting.default)}"
        )
        lines += wrapped(f"{setting.key}  ({setting.allowed}; {default})", 2, 6)
        lines += wrapped(setting.doc, 6, 6)
    return "\n".join(lines)


MOST_SETTINGS = 8
"""Most settings that the answer to a word names."""


def _settings_with(word: str, settings: Sequence[Setting]) -> str:
    """' Settings with it in their names: rollout.group_size.'; '' where there are none.

    They are those where a word of the name, else of the text, begins with `word`."""
    begins = re.compile(rf"(?<![a-z]){re.escape(plain_name(word))}")
    for place, texts in {
        "names": {setting.key: setting.key for setting in settings},
        "texts": {setting.key: setting.doc.lower() for setting in settings},
    }.items():
        keys = [key for key, text in texts.items() if begins.search(text)]
        if keys:
            remainder = f", and {len(keys) - MOST_SETTINGS} others" if keys[MOST_SETTINGS:] else ""
            return (
                f" Settings with it in their {place}: {', '.join(keys[:MOST_SETTINGS])}{remainder}."
            )
    return ""


# ---------------------------------------------------------------- names that are no settings


def settings_of_name(name: str) -> tuple[list[Alias], list[str]]:
    """Aliases and keys that a user may mean by a name that is no key.

    The aliases are of other trainers. The keys are those of that name in any section, and those
    that the aliases correspond to.

    >>> settings_of_name("lr")
    ([], ['optimizer.lr', 'critic.lr'])
    """
    keys = keys_of_last_word(name)
    aliases = exact_aliases(name)
    if not keys and not aliases:
        aliases = similar_aliases(name)
    return aliases, list(
        dict.fromkeys([*keys, *(key for alias in aliases for key in keys_in(alias))])
    )


def keys_of_last_word(name: str) -> list[str]:
    """Keys of the settings whose name within their section is the last dotted part of `name`.

    >>> keys_of_last_word("actor.group_size")
    ['rollout.group_size']
    """
    word = plain_name(name).rpartition(".")[2]
    return [key for key, setting in all_settings().items() if setting.name == word]


def keys_in(alias: Alias) -> list[str]:
    """Our settings that the alias names."""
    return [
        key for key in re.findall(r"`([a-z]+\.[a-z0-9_]+)", alias.answer) if key in all_settings()
    ]


def unknown_key_text(key: str) -> str:
    """A sentence that `key` does not exist.

    It says what was probably meant (`suggestion`), else where the settings are listed.

    >>> print(unknown_key_text("rollout.num_generations"))
    unknown key "rollout.num_generations". TRL's num_generations corresponds to rollout.group_size.
    """
    section = key.partition(".")[0]
    if (suggested := suggestion(key)) is not None:
        separator = "," if suggested.startswith("did") else "."
        return f'unknown key "{key}"{separator} {suggested}'
    if section in section_classes():
        return f'unknown key "{key}". --help {section} lists the settings of {section}.'
    return (
        f'unknown key "{key}". The sections are {", ".join(section_classes())}; --help lists '
        "every key."
    )


def suggestion(key: str) -> str | None:
    """A text on what a user may have meant by a key that does not exist; None: nothing is near.

    It is what another trainer's name corresponds to, else a key that differs by a slip of the hand,
    else what a name that the key ends with corresponds to, else the setting of that name in another
    section."""
    if not is_alias(key) and (near := near_key(key)) is not None:
        return f'did you mean "{near}"?'
    aliases = exact_aliases(key)
    if not aliases:
        if keys := keys_of_last_word(key):
            return f"did you mean {_alternatives(keys)}?"
        aliases = similar_aliases(key)
    return f"{'; '.join(map(str, aliases[:MOST_ALIASES]))}." if aliases else None


def _alternatives(keys: Sequence[str]) -> str:
    """'"a"', '"a" or "b"', '"a", "b" or "c"'."""
    *first, last = (f'"{key}"' for key in keys)
    return f"{', '.join(first)} or {last}" if first else last


def near_key(key: str) -> str | None:
    """The section or setting that differs from `key` by a slip of the hand.

    It differs in few letters, or in its section where that is the beginning of one ("optim") or
    differs in few letters. None where there is none, or several are as near.

    >>> near_key("rollout.grop_size"), near_key("optim.lr"), near_key("rollout.num_generations")
    ('rollout.group_size', 'optimizer.lr', None)
    """
    word = plain_name(key)
    section, dot, _ = word.rpartition(".")
    same_name = keys_of_last_word(word)
    if word in all_settings():
        return word
    if not dot:
        beginnings = [
            candidate
            for candidate in section_classes()
            if len(word) >= 3 and candidate.startswith(word)
        ]
        names = {setting.name for setting in all_settings().values()}
        near_name = nearest_slip(word, names)
        return (
            _only(beginnings)
            or nearest_slip(word, section_classes())
            or (_only(keys_of_last_word(near_name)) if near_name else None)
        )
    ends = [candidate for candidate in same_name if word.endswith(f".{candidate}")]
    near_sections = [
        candidate
        for candidate in same_name
        if (len(section) >= 3 and candidate.startswith(section))
        or _is_near(section, candidate.partition(".")[0])
    ]
    return _only(ends) or _only(near_sections) or nearest_slip(word, all_settings())


def _only(words: Sequence[str]) -> str | None:
    return words[0] if len(words) == 1 else None


def nearest_slip(word: str, known: Iterable[str]) -> str | None:
    """The only known word with the fewest letters other than `word`, if these are few."""
    distances = {
        candidate: letters_apart(word, candidate)
        for candidate in known
        if _is_near(word, candidate)
    }
    least = min(distances.values(), default=0)
    return _only([candidate for candidate, distance in distances.items() if distance == least])


def _is_near(word: str, known: str) -> bool:
    """Whether at most one letter of four differs, and at most MOST_LETTERS_APART in all."""
    max_letters_apart = min(MOST_LETTERS_APART, max(len(word), len(known)) // 4)
    return (
        abs(len(word) - len(known)) <= max_letters_apart
        and letters_apart(word, known) <= max_letters_apart
    )


def letters_apart(first: str, second: str) -> int:
    """Number of letters to change in one word to make the other.

    A change inserts, deletes or replaces a letter, or swaps it with its neighbour (optimal string
    alignment distance).

    >>> letters_apart("grop_size", "group_size"), letters_apart("sede", "seed"), letters_apart("beta", "eta")
    (1, 1, 1)
    """
    previous: list[int] = []
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, start=1):
        above = previous
        previous = row
        row = [i]
        for j, other_letter in enumerate(second, start=1):
            cost = min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (letter != other_letter))
            if i > 1 and j > 1 and letter == second[j - 2] and first[i - 2] == other_letter:
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
    return row[-1]


def _section_texts(shown: Sequence[Setting]) -> dict[str, str]:
    """The description of every section.

    A section of which less than half is shown is about those settings alone, and its text is their
    names."""
    all_counts = Counter(setting.section for setting in all_settings().values())
    names: dict[str, list[str]] = {}
    for setting in shown:
        names.setdefault(setting.section, []).append(setting.name)
    return {
        section: f"{', '.join(section_names)}."
        if 2 * len(section_names) < all_counts[section]
        else inspect.getdoc(section_classes()[section]) or ""
        for section, section_names in names.items()
    }


def field_docs(source: str) -> dict[tuple[str, str], str]:
    """Docstrings of fields: {("RunConfig", "seed"): "Seed of ..."}.

    Each stands right under its field in the source."""
    docs = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for above, below in zip(node.body, node.body[1:], strict=False):
            match above, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(text))
                ):
                    docs[node.name, name] = " ".join(text.split())
    return docs


def raise_problems(of_what: str, problems: list[str]) -> None:
    """One ValueError that lists all `problems`; nothing when there are none."""
    if not problems:
        return
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise ValueError(
        "\n".join([f"{count} with {of_what}:", *(f"  - {problem}" for problem in problems)])
    )


def counted(count: int, noun: str, verb: str = "") -> str:
    """ "1 row", "2 rows"; with a verb what they do.

    >>> counted(1, "rank", "need"), counted(2, "rank", "need"), counted(1, "step", "are")
    ('1 rank needs', '2 ranks need', '1 step is')
    """
    done = {"are": "is", "do": "does"}.get(verb, f"{verb}s") if verb and count == 1 else verb
    return f"{count} {noun}{'s' * (count != 1)} {done}".rstrip()


def nearest_word(word: str, words: Iterable[str]) -> str:
    """' Did you mean "cosine"?' or, when nothing is near, ''.

    Upper and lower case are alike.

    >>> nearest_word("Cosin", ["cosine", "linear"])
    ' Did you mean "cosine"?'
    """
    word_by_lower = {candidate.lower(): candidate for candidate in words}
    near = difflib.get_close_matches(word.lower(), list(word_by_lower), 1)
    return f' Did you mean "{word_by_lower[near[0]]}"?' if near else ""


def nearest_path(path: Path) -> str:
    """' There is "data/train.jsonl".', for a path that does not exist; '' where nothing is near.

    The file beside it has its name except for a slip of the hand, capitals or the ending."""
    if str(path).startswith("~"):
        return ' "~" is not expanded here: write the full path.'
    try:
        names = {name.lower(): name for name in os.listdir(path.parent)}
    except OSError:
        return ""
    name = path.name.lower()
    near = nearest_slip(name, names) or _only(
        [candidate for candidate in names if Path(candidate).stem == Path(name).stem]
    )
    return f' There is "{path.parent / names[near]}".' if near else ""


def no_run_text(folder: Path, problem: str) -> str:
    """Why a folder is not that of a run, and what is needed.

    >>> no_run_text(Path("/nowhere/run"), "which is not there")
    'got "/nowhere/run", which is not there; needed: the folder of a run (run.output_dir).'
    """
    near = "" if folder.is_dir() else nearest_path(folder)
    return f'got "{folder}", {problem}; needed: the folder of a run (run.output_dir).{near}'


def as_yaml_word(value: Any) -> str:
    """A value as one writes it in YAML: null, true, 3, [1, 2]."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{', '.join(map(as_yaml_word, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
