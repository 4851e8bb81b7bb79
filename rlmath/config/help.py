"""What the settings are: every key of the config with type, default and docstring, and the text of `--help`.

Also how mistakes are told: all at once, with the nearest word or path that exists.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import os
import shutil
import textwrap
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.config import schema as config_module
from rlmath.config.schema import MISSING, Config

MAX_NAME_BYTES = 255
"""The longest name of a file or folder that Linux file systems take."""


@dataclass(frozen=True)
class Setting:
    """One field of the config as a user sees it: ("optimizer.lr", "float", 1e-06, "Peak learning rate.")."""

    key: str
    type_name: str
    """"int", "float or null", "list of int", ..."""
    default: Any
    doc: str

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]


@functools.cache
def all_settings() -> Mapping[str, Setting]:
    """Setting by key, in the order of config.py."""
    docs = field_docs(inspect.getsource(config_module))
    found = {}
    for section, section_class in section_classes().items():
        hints = typing.get_type_hints(section_class)
        for field in dataclasses.fields(section_class):
            key, doc = f"{section}.{field.name}", docs.get((section_class.__name__, field.name), "")
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            found[key] = Setting(key, _type_name(hints[field.name]), default, doc)
    return types.MappingProxyType(found)


@functools.cache
def section_classes() -> Mapping[str, Any]:
    """{"run": RunConfig, "model": ModelConfig, ...} in the order of `Config`."""
    return types.MappingProxyType(typing.get_type_hints(Config))


def setting_values(config: Config) -> dict[str, Any]:
    """{"run.output_dir": "outputs/a", "run.seed": 1, ...} in the order of config.py."""
    values = dataclasses.asdict(config)
    return {f"{section}.{name}": value for section in values for name, value in values[section].items()}


def text_problems(config: Config) -> Iterator[str]:
    """Texts that no file system takes as a path, whatever they are for: asking it would end in an error of its own."""
    for key, value in setting_values(config).items():
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str):
                continue
            longest = max(len(part.encode("utf-8", "surrogatepass")) for part in text.split("/"))
            if longest > MAX_NAME_BYTES:
                yield (
                    f"{key} has a name of {longest} bytes (counted between slashes); needed: at most {MAX_NAME_BYTES}. "
                    "Shorten it."
                )
            elif "\0" in text:
                yield f"{key} has a NUL character, at character {text.index(chr(0))}. Remove it."


def help_text(width: int | None = None, keys: Collection[str] | None = None) -> str:
    """Every key, or those of `keys`, with type, default and docstring, by section, wrapped to `width` or the
    terminal's."""
    width = width or min(max(shutil.get_terminal_size().columns, 60), 120)

    def wrapped(text: str, first: str, then: str) -> list[str]:
        return textwrap.wrap(
            text, width, initial_indent=first, subsequent_indent=then, break_on_hyphens=False
        )

    lines = ["Settings, given in a YAML file or as key.sub=value (null: not set)"]
    section = ""
    for setting in all_settings().values():
        if keys is not None and setting.key not in keys:
            continue
        if setting.section != section:
            section = setting.section
            doc = inspect.getdoc(section_classes()[section]) or ""
            lines += ["", *wrapped(f"{section}: {doc}", "", "  ")]
        lines.append(f"  {setting.key}  ({setting.type_name}, {_default_text(setting.default)})")
        lines += wrapped(setting.doc, " " * 6, " " * 6)
    return "\n".join(lines)


def field_docs(source: str) -> dict[tuple[str, str], str]:
    """{("RunConfig", "seed"): "Seed of ..."}: the string that stands right under a field in the source."""
    docs = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = _text_of(below)
                if text:
                    docs[node.name, field.target.id] = text
    return docs


def raise_problems(of_what: str, problems: list[str]) -> None:
    """One ValueError that lists all `problems`; nothing when there are none."""
    if not problems:
        return
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise ValueError("\n".join([f"{count} with {of_what}:", *(f"  - {problem}" for problem in problems)]))


def nearest_word(word: str, words: Iterable[str]) -> str:
    """' Did you mean "cosine"?' or, when nothing is near, ''."""
    close = difflib.get_close_matches(word.lower(), list(words), 1, 0.5)
    return f' Did you mean "{close[0]}"?' if close else ""


def nearest_path(path: Path) -> str:
    """What there is in place of a path that does not exist: ' There is "data/train.jsonl".' and the like."""
    if str(path).startswith("~"):
        return ' "~" is not expanded here: write the full path.'
    folder = path.parent
    while not os.path.exists(folder) and folder != folder.parent:
        path, folder = folder, folder.parent
    if not os.path.isdir(folder) or not os.access(folder, os.R_OK | os.X_OK):
        return ""
    close = difflib.get_close_matches(path.name, sorted(os.listdir(folder)), 1, 0.5)
    if close:
        return f' There is "{folder / close[0]}".'
    return f' The folder "{folder}" has nothing named like "{path.name}".'


def _text_of(node: ast.stmt) -> str:
    """The text of a statement that is only a string, on one line; else ''."""
    if (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ):
        return " ".join(node.value.value.split())
    return ""


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is list:
        return f"list of {_type_name(typing.get_args(hint)[0])}"
    return " or ".join(
        "null" if kind is types.NoneType else kind.__name__ for kind in typing.get_args(hint) or (hint,)
    )


def _default_text(default: Any) -> str:
    return "must be given" if default == MISSING else f"default {as_yaml_word(default)}"


def as_yaml_word(value: Any) -> str:
    """A value as one writes it in YAML: null, true, 3, [1, 2]."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{', '.join(map(as_yaml_word, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
