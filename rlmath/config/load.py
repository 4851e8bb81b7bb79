"""Settings read from YAML files and a command line, and written back to YAML.

Every mistake is reported at once.

A YAML file holds sections with the settings that differ from the defaults, and may name another to
start from (`base: other.yaml`); `key.sub=value` on the command line wins. The section `parallel`
may be one word, d32t2p1, or d12t2+d4 where engines have ranks of their own.

A value may name an environment variable, `${oc.env:NAME}`, another key, `${run.seed}`, or a
multiple of one, `${times:2,${data.prompts_per_step}}`: the `Config` has what that stands for. No
setting is a secret.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import io
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlmath.config import hub
from rlmath.config.files import MAX_YAML_BYTES, read_regular
from rlmath.config.help import (
    Setting,
    all_settings,
    as_yaml_word,
    help_text,
    nearest_path,
    nearest_slip,
    raise_problems,
    section_classes,
    setting_values,
    suggestion,
    text_problems,
    unknown_key_text,
)
from rlmath.config.run_files import CHECKPOINTS_FOLDER, CONFIG_FILE, write_whole
from rlmath.config.schema import MISSING, Config
from rlmath.config.shipped_files import shipped, shipped_config
from rlmath.config.yaml_errors import interpolation_problem, yaml_problem

VALUES_BEFORE = {"lora.engine": "merged"}
"""Settings that a file saved by an earlier release may lack, with what that did with LoRA."""

COMPACT_SECTION = "parallel"
"""The section that a word such as d32t2p1 stands for."""

_LETTERS = {
    "d": "data",
    "t": "tensor",
    "m": "tensor",
    "p": "pipeline",
    "c": "context",
    "e": "expert",
}
_SIZES = r"(?:[dtmpce][1-9]\d{0,5})+"
_LAYOUT = re.compile(
    rf"(?:(?:(?:sglang|vllm)[.:])?(?P<engines>{_SIZES}) *\+ *)?(?:megatron[.:])?(?P<training>{_SIZES})",
    re.ASCII,
)
"""A layout in one word.

It may have what AReaL writes before its parts, which says nothing here."""

_BASE = "base"
"""Top-level word of a YAML file that names the file it starts from."""

_COMMAND_LINE = "command line"

_YAML_ERRORS = (
    ValueError,
    RecursionError,
    LookupError,
    AttributeError,
    yaml.YAMLError,
    OmegaConfBaseException,
)
"""Errors of YAML that cannot be read.

LookupError and AttributeError are of a tag that its value does not fit."""


def load_config(
    yaml_paths: list[Path],
    overrides: list[str],
    saved: bool = False,
    stand_ins: Collection[str] = (),
    source: str = _COMMAND_LINE,
) -> Config:
    """Defaults, then the YAML files in their order, then the overrides; later ones win.

    `stand_ins` are written like overrides, and stand for settings that must be given where nothing
    gives them. Mistakes in overrides are said to be in `source`. With `saved`, of an earlier run's
    settings, text that names what cannot be resolved now stays.

    >>> load_config([], ["run.output_dir=o", "model.path=m", "data.train_path=t", "run.seed=7"]).run.seed
    7

    Errors: ValueError that lists every unknown key, value of a wrong type, malformed override and
    value that must be given and was not, and with them what is out of range; where only that is
    wrong, it is left to `help.schema_problems`. ValueError for a file that is missing, unreadable
    or not a mapping, and for a variable that is not set.
    """
    reader = _Reader(source)
    for stand_in in stand_ins:
        reader.read_override(stand_in)
    for path in yaml_paths:
        reader.read_file(Path(path))
    for override in overrides:
        reader.read_override(override)
    config = reader.config(saved)
    raise_problems("the settings", list(text_problems(config)))
    return config


def preset_settings(name: str) -> dict[str, Any]:
    """Settings of the preset of this name, by key.

    Its base's settings come before its own; interpolations are as written.

    >>> preset_settings("dr_grpo")
    ... # doctest: +NORMALIZE_WHITESPACE
    {'algorithm.advantage': 'dr_grpo', 'algorithm.loss_normalisation': 'constant',
     'reward.scheme': 'zero_one'}
    """
    reader = _Reader(name)
    reader.read_file(shipped(f"configs/algorithms/{name}.yaml"))
    raise_problems("the settings", reader._problems)
    return reader.given


def preset_values(config: Config) -> dict[str, Any]:
    """`preset_settings` of the run's preset, with interpolations resolved; empty without one."""
    if config.algorithm.preset is None:
        return {}
    tree = OmegaConf.create(_escaped(shown_sections(config)))
    preset = preset_settings(config.algorithm.preset)
    for key, value in preset.items():
        OmegaConf.update(tree, key, value)
    return {
        key: OmegaConf.select(tree, key) if "${" in str(preset[key]) else preset[key]
        for key in preset
    }


def recorded_settings(output_dir: str, preset: str) -> dict[str, Any]:
    """Every setting that a run in this folder has recorded, by key.

    It is empty where there is no run with this preset that has a checkpoint to resume from, or
    where its file cannot be read, which the checks of the folder report."""
    folder = Path(output_dir)
    try:
        if not any((folder / CHECKPOINTS_FOLDER).glob("step-*[0-9]")):
            return {}
        recorded = load_config([folder / CONFIG_FILE], [], saved=True)
    except (OSError, ValueError):
        return {}
    return setting_values(recorded) if recorded.algorithm.preset == preset else {}


def config_as_yaml(config: Config) -> str:
    """Every setting, as YAML that `load_config` reads back to an equal `Config`."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(shown_sections(config))))


def save_config(config: Config, path: Path) -> None:
    """Write `config_as_yaml` to `path` (`write_whole`).

    OSError where the disk takes no more."""
    write_whole(path, config_as_yaml(config))


def _escaped(value: Any) -> Any:
    r"""`${` in text as `\${`, so that it is read back as text and not as an interpolation."""
    if isinstance(value, dict):
        return {name: _escaped(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_escaped(part) for part in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def shown_values(config: Config) -> dict[str, Any]:
    """`help.setting_values` to be written, logged or sent.

    Ids of the hub stand for what was fetched by them."""
    return {
        key: hub.as_hub_ids(config, key, value) for key, value in setting_values(config).items()
    }


def shown_sections(config: Config) -> dict[str, dict[str, Any]]:
    """`shown_values` by section and name."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in shown_values(config).items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


# ---------------------------------------------------------------- the command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End with a mistake of the command line, with what was probably meant."""
        text = message
        if message.startswith("unrecognized arguments"):
            for word in message.partition(":")[2].split():
                name = word.partition("=")[0]
                option = nearest_slip(name, self._option_string_actions)
                suggested = suggestion(name) if option is None else f"did you mean {option}?"
                if word.startswith("--") and suggested is not None:
                    text += f"\n{name}: {suggested}"
            text += "\nSettings are written without dashes, as key.sub=value; --help lists them."
        try:
            super().error(text)
        except SystemExit as ended:
            raise ended from ValueError(message)


class _Help(argparse.Action):
    """The action of `--help`: print the options and the sections of settings.

    `--help SECTION` prints the settings of a section."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, const: Collection[str] | None
    ) -> None:
        text = "this; SECTION, a setting, or all: what the settings are"
        super().__init__(
            option_strings,
            dest,
            nargs="?",
            const=const,
            default=argparse.SUPPRESS,
            metavar="SECTION",
            help=text,
        )

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        try:
            if values is self.const:
                parser.epilog = help_text(keys=self.const)
                parser.print_help()
            else:
                print(help_text(values, keys=self.const))
        except ValueError as error:
            parser.error(str(error))
        parser.exit()


def make_parser(description: str, keys: Collection[str] | None = None) -> argparse.ArgumentParser:
    """A parser that takes `--config FILE` (repeatable), overrides, and `--help`.

    The help is about all settings, or those of `keys`."""
    parser = _Parser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.add_argument
    add("-h", "--help", action=_Help, const=keys)
    add(
        "--config",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="YAML file; later files win",
    )
    add("overrides", metavar="key.sub=value", nargs="*", help="settings that win over the files'")
    return parser


# ---------------------------------------------------------------- reading


class _Reader:
    """Takes what a user wrote by its type, and collects every mistake."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.given: dict[str, Any] = {}
        """What was set, by key."""
        self._values: dict[str, Any] = {}
        """Of what was set, what fits its type, as that has it."""
        self._tree: DictConfig | None = None
        """All settings, where interpolations are resolved; None: not made, or a value was set
        since."""
        self._problems: list[str] = []

    def read_file(self, path: Path, below: tuple[Path, ...] = ()) -> None:
        """Read a YAML file, after the one that it starts from.

        `below` are the files that start from this one. Where there is none, and the path is that of
        a file which rlmath ships (configs/demo.yaml), it is that one."""
        if path.resolve() in below:
            raise ValueError(
                f'The config file "{path}" starts from itself. Take out one of the "{_BASE}:" '
                "lines."
            )
        if not os.path.exists(path):
            path = shipped_config(path) or path
        if not os.path.exists(path):
            raise ValueError(f'There is no config file "{path}".{nearest_path(path)}')
        if not os.path.isfile(path):
            raise ValueError(f'The config file "{path}" is not a file. Give a YAML file.')
        try:
            text = read_regular(path, MAX_YAML_BYTES).decode("utf-8")
            tree = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
        except (OSError, *_YAML_ERRORS) as error:
            reason = error.strerror if isinstance(error, OSError) else yaml_problem(error)
            raise ValueError(
                f'The config file "{path}" cannot be read: {_sentence(reason)}'
            ) from error
        if not isinstance(tree, dict):
            got = type(tree).__name__
            raise ValueError(
                f'The config file "{path}" must hold sections such as "run:", got a {got}.'
            )
        base = tree.pop(_BASE, None)
        if isinstance(base, str):
            self.read_file(path.parent / base, (*below, path.resolve()))
        elif base is not None:
            self._problems.append(
                f'{path}: "{_BASE}" must be the name of one YAML file, got {base!r}.'
            )
        self._read_mapping(tree, "", str(path))

    def read_override(self, text: str) -> None:
        """Read `key.sub=value`.

        For a text setting the value is taken as it stands, else it is read as YAML."""
        key, equals, word = text.partition("=")
        setting = all_settings().get(key)
        add_problem = self._problems.append
        if key == COMPACT_SECTION and word:
            self._set_layout(word, self._source)
        elif not equals or not key:
            hint = (
                f". To read that file give --config {key}"
                if key.endswith((".yaml", ".yml"))
                else "."
            )
            add_problem(f'{self._source}: "{text}" is not of the form key.sub=value{hint}')
        elif key in section_classes():
            add_problem(
                f'{self._source}: "{key}" is a section, it cannot be {word!r}. Set keys in it.'
            )
        elif setting is None:
            add_problem(f"{self._source}: {unknown_key_text(key)}")
        elif not word:
            add_problem(
                f'{self._source}: "{text}" has nothing after "=". Write a value '
                f"({setting.type_name})."
            )
        elif setting.is_text and word[0] not in "\"'" and (word != "null" or setting.kind is str):
            self._set(key, word, self._source)
        else:
            try:
                read: Any = OmegaConf.to_container(
                    OmegaConf.from_dotlist([f"value={word}"]), resolve=False
                )
                self._set(key, read["value"], self._source)
            except _YAML_ERRORS as error:
                reason = _sentence(yaml_problem(error).removeprefix("line 1: "))
                add_problem(
                    f'{self._source}: the value in "{_bounded(text)}" cannot be read: {reason}'
                )

    def config(self, saved: bool) -> Config:
        """The settings that were read, over those of a preset; ValueError with all mistakes.

        A saved file has all settings of its time: a preset that has changed since adds nothing, and
        a setting that is younger has the value that says what was done before."""
        if not saved:
            self._read_preset()
        elif self._written("lora.rank"):
            self._values = VALUES_BEFORE | self._values
        written = {key: self._written(key) for key in all_settings()}
        for key, setting in all_settings().items():
            if written[key] == MISSING:
                self._problems.append(
                    f'"{key}" must be given. {setting.doc} Write {key}=... on the command line, '
                    "or in a YAML file "
                    f'"{setting.section}:" and under it "  {setting.name}: ...".'
                )
        if self._problems:
            for key, setting in all_settings().items():
                value = written[key]
                if "${" not in str(value) and (
                    problem := setting.problem(value, written["run.plugins"])
                ):
                    self._problems.append(problem)
        raise_problems("the settings", self._problems)
        values: dict[str, dict[str, Any]] = {}
        for key, setting in all_settings().items():
            values.setdefault(setting.section, {})[setting.name] = self._resolved(
                setting, written[key], saved
            )
        return Config(
            **{name: section(**values[name]) for name, section in section_classes().items()}
        )

    def _read_preset(self) -> None:
        """Set what the preset sets and nobody else does.

        In a resumed run it is as it was when the run in `run.output_dir` began."""
        name = self.given.get("algorithm.preset")
        if name not in all_settings()["algorithm.preset"].words:
            return
        recorded = self._recorded_settings(name)
        for key, value in preset_settings(name).items():
            if key not in self.given:
                self._set(key, recorded.get(key, value), f"algorithm.preset={name}")

    def _recorded_settings(self, preset: str) -> dict[str, Any]:
        """Settings that the run in `run.output_dir` has recorded, where it may resume."""
        if self._written("run.output_dir") == MISSING:
            return {}
        output_dir, recover_mode = (
            self._resolved(all_settings()[key], self._written(key), saved=False)
            for key in ("run.output_dir", "run.recover_mode")
        )
        return {} if recover_mode == "disabled" else recorded_settings(output_dir, preset)

    def _written(self, key: str) -> Any:
        """The value that was set, else the default; interpolations as written."""
        return self._values[key] if key in self._values else copy.copy(_default_values()[key])

    def _whole_tree(self) -> DictConfig:
        if self._tree is None:
            self._tree = copy.deepcopy(_defaults())
            for key, value in self._values.items():
                OmegaConf.update(self._tree, key, value, merge=False)
        return self._tree

    def _resolved(self, setting: Setting, written: Any, saved: bool) -> Any:
        """The value of a setting, with what its interpolations stand for."""
        if "${" not in str(written):
            return written
        try:
            node: Any = self._whole_tree()[setting.section][setting.name]
            return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        except (OmegaConfBaseException, ValueError, RecursionError) as error:
            if saved and setting.is_text:
                return written
            reason = _sentence(interpolation_problem(error, setting.written))
            raise ValueError(
                f'"{setting.key}" got "{_bounded(as_yaml_word(written))}", which cannot be '
                f"resolved: {reason}"
            ) from error

    def _read_mapping(self, mapping: Mapping[Any, Any], above: str, source: str) -> None:
        """The values of a nested mapping; `above` is the key that leads to it, with a dot."""
        for name, value in mapping.items():
            key = f"{above}{name}"
            if key in all_settings():
                self._set(key, value, source)
            elif isinstance(value, Mapping) and value:
                self._read_mapping(value, f"{key}.", source)
            elif key == COMPACT_SECTION and isinstance(value, str):
                self._set_layout(value, source)
            elif key not in section_classes():
                self._problems.append(f"{source}: {unknown_key_text(key)}")
            elif value is not None and not isinstance(value, Mapping):
                self._problems.append(
                    f'{source}: "{key}" is a section, it cannot be {value!r}. Set keys in it.'
                )

    def _set_layout(self, word: str, source: str) -> None:
        try:
            for key, size in layout_settings(word).items():
                self._set(key, size, source)
        except ValueError as error:
            self._problems.append(f"{source}: {error}")

    def _set(self, key: str, value: Any, source: str) -> None:
        """Set a value, unless it does not fit its type.

        An interpolation is checked when it is resolved."""
        setting = all_settings()[key]
        if value == MISSING:
            return
        if setting.takes_mapping and isinstance(value, Mapping):
            try:
                value = _named_values(value)
            except (TypeError, ValueError) as error:
                self._problems.append(
                    f'{source}: "{key}" got {_bounded(value)}: {error}. {setting.doc}'
                )
                return
        self.given[key] = value
        if setting.is_text and not isinstance(value, str | None):
            change = "Put text that looks like something else in quotes."
        else:
            try:
                typed = copy.deepcopy(_typed(key))
                OmegaConf.update(typed, setting.name, value, merge=False)
                self._values[key] = _plain(typed)[setting.name]
                self._tree = None
                return
            except (OmegaConfBaseException, RecursionError, OverflowError):
                change = 'Write "\\${" for text.' if "${" in str(value) else setting.doc
        value_text = (
            "null" if value is None else f"{_bounded(repr(value))} ({type(value).__name__})"
        )
        self._problems.append(
            f'{source}: "{key}" got {value_text}, needs {setting.written}. {change}'
        )


def _named_values(mapping: Mapping[Any, Any]) -> list[str]:
    """A mapping as a list of "name=value" with JSON values.

    TypeError or ValueError for what JSON has no word for."""
    entries = []
    for name, value in mapping.items():
        if not isinstance(name, str):
            raise TypeError(f"the name {name!r} is no text")
        entries.append(f"{name}={json.dumps(value, ensure_ascii=False, allow_nan=False)}")
    return entries


def _bounded(content: object) -> str:
    """Text for a message, however long it is."""
    text = str(content)
    return text if len(text) <= 500 else f"{text[:400]} [... {len(text) - 400} more characters]"


def _sentence(content: object) -> str:
    """`_bounded` text with the stop that ends a sentence."""
    text = _bounded(content)
    return text if text.endswith((".", "?")) else f"{text}."


def _times(factor: int | float, number: int | float) -> int | float:
    """The product that `${times:2,${data.prompts_per_step}}` stands for.

    A product that is a whole number is an int.

    >>> _times(2, 64), _times(0.5, 64), _times(0.3, 64)
    (128, 32, 19.2)
    """
    product = float(factor * number)
    return int(product) if product.is_integer() else product


OmegaConf.register_resolver("times", _times, replace=True, annotation_validation="error")


def _structured(settings: Iterable[Setting]) -> DictConfig:
    """Settings by name, with types and defaults.

    A word is any text here: `schema_problems` refuses wrong ones."""
    fields = [
        (s.name, s.kind, dataclasses.field(default_factory=functools.partial(copy.copy, s.default)))
        for s in settings
    ]
    return OmegaConf.structured(dataclasses.make_dataclass("Settings", fields))


@functools.cache
def _typed(key: str) -> DictConfig:
    """One setting: making all of them for each that is read would take ten times as long."""
    return _structured([all_settings()[key]])


@functools.cache
def _defaults() -> DictConfig:
    """All settings, by section and name."""
    settings = all_settings().values()
    return OmegaConf.create(
        {
            section: _structured(s for s in settings if s.section == section)
            for section in section_classes()
        }
    )


@functools.cache
def _default_values() -> dict[str, Any]:
    """Default values by key.

    Lists in them are shared: copy them before they are changed."""
    sections = _plain(_defaults())
    return {key: sections[setting.section][setting.name] for key, setting in all_settings().items()}


def _plain(tree: DictConfig) -> dict[str, Any]:
    """Values by name, interpolations as written."""
    values: Any = OmegaConf.to_container(tree, resolve=False)
    return values


def layout_settings(word: str) -> dict[str, int | None]:
    """Sizes by key, of a layout in one word, as AReaL and its successors write it.

    They are of `parallel`: 1 where the word does not name one, but for data None, which is what
    remains. Where there are two parts, generation first (d12t2+d4: 12 engines of 2 ranks each, and
    4 that train), they are of `rollout`, too.

    >>> layout_settings("sglang.d12t2p1+d4")
    ... # doctest: +NORMALIZE_WHITESPACE
    {'rollout.ranks': 24, 'rollout.tensor_parallel': 2, 'parallel.data': 4, 'parallel.tensor': 1,
     'parallel.pipeline': 1, 'parallel.context': 1, 'parallel.expert': 1}

    Errors: ValueError for a word that is not one, and for engines that there cannot be.
    """
    got = f'"{COMPACT_SECTION}" got "{word:.40}"'
    match = _LAYOUT.fullmatch(word)
    if match is None:
        raise ValueError(
            f"{got}; needed: a layout such as d32t2p1 (d data, t or m tensor, p pipeline, c "
            "context, e expert), after "
            "d12t2+ where 12 engines of t2 have ranks of their own; or its keys one by one."
        )
    training, engines = (_sizes(match[part] or "", got) for part in ("training", "engines"))
    settings = {f"{COMPACT_SECTION}.{name}": size for name, size in training.items()}
    if match["engines"] is None:
        return settings
    number, tensor, *other_sizes = engines.values()
    if number is None or tensor is None or other_sizes != [1, 1, 1]:
        raise ValueError(
            f"{got}; needed before the plus sign: d, the number of engines, and t, the ranks of "
            "each, as in d12t2, "
            "with no other size above 1."
        )
    return {"rollout.ranks": number * tensor, "rollout.tensor_parallel": tensor} | settings


def _sizes(part: str, got: str) -> dict[str, int | None]:
    """Sizes of one part of a layout, by the names of `ParallelConfig`.

    ValueError where one is given twice."""
    named = [(_LETTERS[letter], int(size)) for letter, size in re.findall(r"(\D)(\d+)", part)]
    if len(dict(named)) < len(named):
        raise ValueError(f"{got}; needed: every size once.")
    return {"data": None, "tensor": 1, "pipeline": 1, "context": 1, "expert": 1} | dict(named)
