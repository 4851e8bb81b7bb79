"""A layout in one word, as AReaL and its successors write it: d32t2p1."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import io
import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlmath.config.help import (
    all_settings,
    as_yaml_word,
    help_text,
    nearest_path,
    raise_problems,
    section_classes,
    text_problems,
)
from rlmath.config.schema import MISSING, Config

COMPACT_SECTION = "parallel"
"""The section of the config that such a word stands for."""


_LETTERS = {"d": "data", "t": "tensor", "m": "tensor", "p": "pipeline", "c": "context", "e": "expert"}

_FACTOR = re.compile(r"([a-z])(\d+)")


def compact_layout(word: str) -> dict[str, int | None]:
    """Sizes by the names of `ParallelConfig`; 1 where the word does not say, but for data: None, what remains.

    >>> compact_layout("d32t2p1")
    {'data': 32, 'tensor': 2, 'pipeline': 1, 'context': 1, 'expert': 1}

    ValueError for a word that is not one.
    """
    form = (
        f'"{COMPACT_SECTION}" got "{word:.40}"; needed: a layout such as d32t2p1 (d data, t or m tensor, p pipeline, '
        "c context, e expert)"
    )
    factors = _FACTOR.findall(word)
    if not factors or "".join(letter + size for letter, size in factors) != word:
        raise ValueError(f"{form}, or its keys one by one.")
    sizes: dict[str, int | None] = {"data": None, "tensor": 1, "pipeline": 1, "context": 1, "expert": 1}
    named = [_LETTERS.get(letter) for letter, _ in factors]
    for (letter, size), name in zip(factors, named, strict=True):
        if name is None:
            raise ValueError(f'{form}. There is no size "{letter}".')
        if named.count(name) > 1:
            raise ValueError(f"{form}. The {name} size is given twice.")
        if len(size) > 6 or int(size) == 0:
            raise ValueError(f"{form}. The {name} size is {size:.10}.")
        sizes[name] = int(size)
    return sizes


_BASE = "base"
"""Top-level word of a YAML file that names the file it starts from."""


@dataclass(frozen=True)
class _Given:
    """A value that somebody wrote, and where ("configs/x.yaml" or "command line")."""

    key: str
    value: Any
    source: str


def load_config(yaml_paths: list[Path], overrides: list[str]) -> Config:
    """Defaults, then the YAML files in their order, then the overrides; later ones win.

    >>> load_config([], ["run.output_dir=o", "model.path=m", "data.train_path=t", "run.seed=7"]).run.seed
    7

    A file may say `base: other.yaml` (relative to itself) to start from that one.

    Errors: ValueError that lists every unknown key, value of a wrong type, malformed override and value that
    must be given and was not; ValueError for a file that is missing, unreadable or not a mapping.
    """
    items = [item for path in yaml_paths for item in _read_yaml(Path(path), ())]
    items += [item for override in overrides for item in _parse_override(override)]
    given = [item for item in items if isinstance(item, _Given)]
    problems = [item for item in items if isinstance(item, str)]
    values = {item.key: item.value for item in given}
    merged = _merged(values)
    problems += [problem for item in given for problem in _type_problems(item, check_all=merged is None)]
    problems += _missing_problems(values)
    raise_problems("the settings", problems)
    assert merged is not None
    config = _resolved(merged, values)
    raise_problems("the settings", list(text_problems(config)))
    return config


def config_as_yaml(config: Config) -> str:
    """Every setting, as YAML that `load_config` reads back to an equal `Config`."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(dataclasses.asdict(config))))


def save_config(config: Config, path: Path) -> None:
    """Write `config_as_yaml` to `path` in one step: a reader sees the old file or the whole new one.

    On the way there is a file `.<name>.<random>.tmp` beside it.
    """
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(config_as_yaml(config))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def make_parser(description: str, keys: Collection[str] | None = None) -> argparse.ArgumentParser:
    """`--config FILE` (repeatable) and overrides; `--help` lists every setting, or those of `keys`. A script may add
    its own."""
    parser = _Parser(
        description=description,
        epilog=help_text(keys=keys),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", type=Path, action="append", default=[], help="YAML file; later files win"
    )
    parser.add_argument(
        "overrides", metavar="key.sub=value", nargs="*", help="settings that win over the files'"
    )
    return parser


def split_arguments(
    description: str, argv: list[str] | None = None, keys: Collection[str] | None = None
) -> tuple[list[Path], list[str]]:
    """(YAML files, overrides) of a command line (default: this process's). `--help` prints the settings, or those of
    `keys`, and exits.

    Of the ranks that torchrun starts, only rank 0 prints.
    """
    parsed = parse_arguments(make_parser(description, keys), argv)
    return parsed.config, parsed.overrides


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What `parser` makes of a command line (default: this process's), `config` and `overrides` among it.

    Of the ranks that torchrun starts, only rank 0 prints.
    """
    with contextlib.ExitStack() as stack:
        if os.environ.get("RANK", "0") != "0":
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        return parser.parse_intermixed_args(sys.argv[1:] if argv is None else argv)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(f"{message}\nSettings are written without dashes, as key.sub=value; --help lists them.")


def _read_yaml(path: Path, below: tuple[Path, ...]) -> Iterator[_Given | str]:
    """Values and problems of a file, after those of the one it starts from; `below` led to this file."""
    if path.resolve() in below:
        raise ValueError(
            f'The config file "{path}" starts from itself. Take out one of the "{_BASE}:" lines.'
        )
    tree = _yaml_mapping(path)
    base = tree.pop(_BASE, None)
    if isinstance(base, str):
        yield from _read_yaml(path.parent / base, (*below, path.resolve()))
    elif base is not None:
        yield f'{path}: "{_BASE}" must be the name of one YAML file, got {base!r}.'
    yield from _leaves(tree, (), str(path))


def _yaml_mapping(path: Path) -> dict[Any, Any]:
    if not path.exists():
        raise ValueError(f'There is no config file "{path}".{nearest_path(path)}')
    if not path.is_file():
        raise ValueError(f'The config file "{path}" is not a file. Give a YAML file.')
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f'The config file "{path}" cannot be read as YAML sections: {error}') from error
    if not isinstance(tree, dict):
        raise ValueError(
            f'The config file "{path}" must hold sections such as "run:", got a {type(tree).__name__}.'
        )
    return tree


def _leaves(tree: Mapping[Any, Any], above: tuple[str, ...], source: str) -> Iterator[_Given | str]:
    """The values of a nested mapping by dotted key; a key that does not exist becomes a problem."""
    for name, value in tree.items():
        parts = (*above, str(name))
        key = ".".join(parts)
        if "." in str(name):
            first, _, rest = str(name).partition(".")
            yield f'{source}: "{name}" must be nested: "{first}:" and, indented under it, "{rest}: ...".'
        elif key in all_settings():
            yield _Given(key, value, source)
        elif isinstance(value, Mapping) and value:
            yield from _leaves(value, parts, source)
        elif key == COMPACT_SECTION and isinstance(value, str):
            yield from _compact(value, source)
        elif key not in section_classes():
            yield f"{source}: {_unknown(key)}"
        elif value is not None and not isinstance(value, Mapping):
            yield f"{source}: {_section_not_value(key, value)}"


def _parse_override(text: str) -> Iterator[_Given | str]:
    """`key.sub=value`, or the compact form of a section."""
    section, _, word = text.partition("=")
    if section == COMPACT_SECTION and word:
        yield from _compact(word, "command line")
    else:
        yield _parse_value(text)


def _compact(word: str, source: str) -> Iterator[_Given | str]:
    """The settings that a layout such as d32t2p1 stands for: all sizes that it can name, 1 where it does not."""
    try:
        sizes = compact_layout(word)
    except ValueError as error:
        yield f"{source}: {error}"
        return
    for name, size in sizes.items():
        yield _Given(f"{COMPACT_SECTION}.{name}", size, source)


def _parse_value(text: str) -> _Given | str:
    """`key.sub=value`; for a text setting the value is taken as it stands, else it is read as YAML."""
    key, equals, value_text = text.partition("=")
    source = "command line"
    if not equals or not key:
        hint = f" The {_unknown(key)}" if key and key not in all_settings() else ""
        return f'{source}: "{text}" is not of the form key.sub=value.{hint}'
    if key in section_classes():
        return f"{source}: {_section_not_value(key, value_text)}"
    if key not in all_settings():
        return f"{source}: {_unknown(key)}"
    type_name = all_settings()[key].type_name
    if not value_text:
        return f'{source}: "{text}" has nothing after "=". Write a value ({type_name}).'
    if value_text[0] not in "\"'" and (
        type_name == "str" or (type_name == "str or null" and value_text != "null")
    ):
        return _Given(key, value_text, source)
    try:
        read = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value_text}"]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        return f'{source}: the value in "{text}" cannot be read: {" ".join(str(error).split())}'
    assert isinstance(read, dict)
    return _Given(key, read["value"], source)


def _unknown(key: str) -> str:
    """Says that `key` does not exist and which one was probably meant."""
    for known in all_settings():
        if key.startswith(known + "."):
            return f'unknown key "{key}": "{known}" is a value, it has no keys below it.'
    nearest = _nearest_key(key)
    if nearest:
        return f'unknown key "{key}", did you mean "{nearest}"?'
    return f'unknown key "{key}". The sections are {", ".join(section_classes())}; --help lists every key.'


def _nearest_key(key: str) -> str | None:
    """The known key or section that a wrong key most likely stands for.

    In this order: the key under sections too many, its last word in another section, the nearest whole key,
    the nearest last word in its own section, the nearest last word anywhere.
    """
    leaf_of = {known: known.rpartition(".")[2] for known in all_settings()}
    for known in all_settings():
        if key.endswith("." + known):
            return known
    leaf = key.rpartition(".")[2]
    same_leaf = [known for known in leaf_of if leaf_of[known] == leaf]
    if same_leaf:
        return difflib.get_close_matches(key, same_leaf, 1, 0.0)[0]
    plain = key.strip("+~-").lower().replace("-", "_")
    for known in difflib.get_close_matches(plain, [*leaf_of, *section_classes()], 1, 0.75):
        return known
    own_section = key.partition(".")[0] + "."
    for keys, least in (([k for k in leaf_of if k.startswith(own_section)], 0.5), (list(leaf_of), 0.6)):
        for close in difflib.get_close_matches(leaf, [leaf_of[k] for k in keys], 1, least):
            return next(k for k in keys if leaf_of[k] == close)
    return None


def _section_not_value(section: str, value: Any) -> str:
    example = next(key for key, setting in all_settings().items() if setting.section == section)
    return f'"{section}" is a section, it cannot be {value!r}. Set keys in it, such as "{example}".'


def _type_problems(item: _Given, check_all: bool) -> Iterator[str]:
    """One text when the value does not fit; an interpolation is checked when it is resolved.

    `check_all` asks OmegaConf too (a few milliseconds), which is needed only when it refused the whole.
    """
    setting = all_settings()[item.key]
    if isinstance(item.value, str) and "${" in item.value:
        return
    shown = "null" if item.value is None else f"{item.value!r} ({type(item.value).__name__})"
    wrong = f'{item.source}: "{item.key}" got {shown}, needs {setting.type_name}.'
    if setting.type_name.startswith("str") and not isinstance(item.value, str | None):
        yield f"{wrong} Put text that looks like something else in quotes."
        return
    if check_all and _merged({item.key: item.value}) is None:
        yield f"{wrong} {setting.doc}"


def _missing_problems(values: Mapping[str, Any]) -> list[str]:
    missing = [
        setting
        for setting in all_settings().values()
        if setting.default == MISSING and values.get(setting.key, MISSING) == MISSING
    ]
    return [
        f'"{setting.key}" must be given. {setting.doc} Write {setting.key}=... on the command line, or in a '
        f'YAML file "{setting.section}:" and under it "  {setting.key.partition(".")[2]}: ...".'
        for setting in missing
    ]


def _merged(values: Mapping[str, Any]) -> DictConfig | None:
    """The sections that `values` has keys in, with these values; None if OmegaConf refuses one."""
    nested: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    try:
        merged = {name: OmegaConf.merge(_schema(name), part) for name, part in nested.items()}
    except OmegaConfBaseException:
        return None
    return OmegaConf.create(merged)


@functools.cache
def _schema(section: str) -> DictConfig:
    """Defaults and types of a section; read-only like its dataclass, but `OmegaConf.merge` copies it."""
    return OmegaConf.structured(section_classes()[section])


def _resolved(merged: DictConfig, values: Mapping[str, Any]) -> Config:
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), merged))
    except OmegaConfBaseException as error:
        value = as_yaml_word(values.get(str(error.full_key)))
        reason = str(error).partition("\n")[0]
        raise ValueError(f'"{error.full_key}" got "{value}", which cannot be resolved: {reason}') from error
    assert isinstance(config, Config)
    return config


def _escaped(value: Any) -> Any:
    r"""`${` in text as `\${`, so that it is read back as text and not as an interpolation."""
    if isinstance(value, dict):
        return {name: _escaped(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_escaped(part) for part in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
