"""YAML files and overrides to a Config and back, and what a user is told about a mistake."""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path

import pytest

from rlmath.config.help import (
    all_settings,
    help_text,
    schema_problems,
    section_classes,
    setting_values,
)
from rlmath.config.load import config_as_yaml, load_config, make_parser, save_config
from rlmath.config.schema import Config, ModelConfig, OptimizerConfig
from rlmath.planning.checks import used_keys

GIVEN = ["run.output_dir=out", "model.path=m", "data.train_path=t.jsonl"]


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def problem_with(overrides: list[str]) -> str:
    with pytest.raises(ValueError, match=r"problem|config file|resolved") as error:
        load_config([], [*GIVEN, *overrides])
    return str(error.value)


def problem_in(path: Path, text: str) -> str:
    with pytest.raises(ValueError, match=r"problem|config file|resolved") as error:
        load_config([written(path, text)], GIVEN)
    return str(error.value)


# ---------------------------------------------------------------- values


def test_later_sources_win(tmp_path: Path):
    first = written(
        tmp_path / "a.yaml", "optimizer:\n  lr: 1e-5\n  kind: sgd\nrollout:\n  group_size: 4\n"
    )
    second = written(tmp_path / "b.yaml", "optimizer:\n  lr: 2e-5\nrollout:\n  group_size: 8\n")
    config = load_config([first, second], [*GIVEN, "rollout.group_size=2"])
    assert (config.optimizer.kind, config.optimizer.lr, config.rollout.group_size) == (
        "sgd",
        2e-5,
        2,
    )
    assert config.optimizer.adam_beta2 == OptimizerConfig.adam_beta2
    assert isinstance(config, Config) and isinstance(config.model, ModelConfig)


def test_variables_of_a_template_may_be_a_mapping(tmp_path: Path):
    """The mapping may stand in YAML or on the command line, with JSON's values.

    A saved run has it as a list."""
    expected = ["enable_thinking=false", 'effort="low"', "budget=null", 'more={"a": [1, "x"]}']
    text = "{enable_thinking: false, effort: low, budget: null, more: {a: [1, x]}}"
    by_word = load_config([], [*GIVEN, f"data.chat_template_kwargs={text}"])
    by_file = load_config(
        [written(tmp_path / "a.yaml", f"data:\n  chat_template_kwargs: {text}\n")], GIVEN
    )
    assert by_word.data.chat_template_kwargs == by_file.data.chat_template_kwargs == expected
    reread = load_config([written(tmp_path / "again.yaml", config_as_yaml(by_word))], [])
    assert reread.data.chat_template_kwargs == expected
    for empty in ("{}", "[]"):
        assert (
            load_config(
                [], [*GIVEN, f"data.chat_template_kwargs={empty}"]
            ).data.chat_template_kwargs
            == []
        )
    for wrong in ("{1: 2}", "{a: .nan}"):
        assert '"data.chat_template_kwargs" got' in problem_with(
            [f"data.chat_template_kwargs={wrong}"]
        )
    assert "written {a: 1, b: 2} or [a=1, b=2]" in problem_with(["data.chat_template_kwargs=7"])


def test_a_file_may_start_from_another(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    written(tmp_path / "base.yaml", "run:\n  seed: 5\n  total_epochs: 3\n")
    top = written(tmp_path / "sub" / "top.yaml", "base: ../base.yaml\nrun:\n  seed: 6\n")
    config = load_config([top], GIVEN)
    assert (config.run.seed, config.run.total_epochs) == (6, 3)


def test_sections_without_a_line_in_them_are_fine(tmp_path: Path):
    assert load_config([written(tmp_path / "a.yaml", "run:\n# seed: 3\n")], GIVEN).run.seed == 1
    assert load_config([written(tmp_path / "empty.yaml", "")], GIVEN).run.seed == 1


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("007", "007"),
        ("1e3", "1e3"),
        ("a=b: c", "a=b: c"),
        ("[1", "[1"),
        ("null", "null"),
        ("'a b'", "a b"),
    ],
)
def test_text_on_the_command_line_is_taken_as_it_stands(text: str, path: str):
    assert load_config([], [*GIVEN, f"model.path={text}"]).model.path == path


def test_null_unsets_what_may_be_null():
    config = load_config(
        [], [*GIVEN, "algorithm.early_stop_ratio=null", "policy.recompute_method=null"]
    )
    assert config.algorithm.early_stop_ratio is None and config.policy.recompute_method is None


# ---------------------------------------------------------------- back to YAML


@pytest.mark.parametrize(("rank", "engine"), [(0, "adapters"), (8, "merged")])
def test_a_config_of_an_earlier_release_merges_its_adapters(
    tmp_path: Path, rank: int, engine: str
) -> None:
    """It lacks the setting; without adapters there is nothing to merge."""
    path = tmp_path / "config.yaml"
    path.write_text(f"lora: {{rank: {rank}}}\n")
    assert load_config([path], GIVEN, saved=True).lora.engine == engine
    assert load_config([path], GIVEN).lora.engine == "adapters"
    asked = load_config([path], [*GIVEN, "lora.engine=adapters"], saved=True)
    assert asked.lora.engine == "adapters"


def test_a_saved_config_reads_back_equal(tmp_path: Path):
    overrides = [
        "optimizer.lr=3.3e-7",
        "run.total_steps=12",
        "algorithm.early_stop_ratio=null",
        "data.shuffle=false",
    ]
    config = load_config([], [*GIVEN, *overrides])
    save_config(config, tmp_path / "config.yaml")
    assert load_config([tmp_path / "config.yaml"], []) == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert stat.S_IMODE((tmp_path / "config.yaml").stat().st_mode) == 0o644


@pytest.mark.parametrize(
    "text",
    ["${x}", "a\\${b}", "\\\\${", "$\\{}\\", "null", "1e3", "[a: #x", "é\n$", "'\"", "2020-01-01"],
)
def test_any_path_reads_back_equal(tmp_path: Path, text: str):
    config = dataclasses.replace(load_config([], GIVEN), model=ModelConfig(text))
    save_config(config, tmp_path / "config.yaml")
    assert load_config([tmp_path / "config.yaml"], []) == config


def test_the_yaml_has_every_key():
    yaml = config_as_yaml(load_config([], GIVEN))
    assert yaml.startswith("run:\n  output_dir: out\n  seed: 1\n")
    assert all(f"  {key.split('.')[1]}: " in yaml for key in all_settings())


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = written(tmp_path / "config.yaml", "old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_config(load_config([], GIVEN), path)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_setting_values_are_flat_and_in_order():
    values = setting_values(load_config([], GIVEN))
    assert list(values) == list(all_settings())
    assert values["model.path"] == "m" and values["run.total_steps"] is None


# ---------------------------------------------------------------- from the environment


def test_what_is_from_the_environment_is_written_as_its_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RLMATH_TEST_TEAM", "our/${team}")
    monkeypatch.setenv("RLMATH_TEST_NUMBER", "77")
    words = [
        "telemetry.wandb_project=${oc.env:RLMATH_TEST_TEAM}",
        "run.seed=${oc.env:RLMATH_TEST_NUMBER}",
    ]
    config = load_config([], [*GIVEN, *words])
    assert (config.telemetry.wandb_project, config.run.seed) == ("our/${team}", 77)
    save_config(config, tmp_path / "config.yaml")
    monkeypatch.delenv("RLMATH_TEST_TEAM")
    assert load_config([tmp_path / "config.yaml"], []) == config


def test_a_variable_that_is_not_set_is_named_with_the_key():
    message = problem_with(["run.output_dir=${oc.env:RLMATH_TEST_UNSET}/a"])
    assert (
        '"run.output_dir" got' in message
        and "variable RLMATH_TEST_UNSET is not set; set it" in message
    )
    assert "raised while" not in message


def test_saved_settings_are_read_without_their_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    written_as = "${oc.env:RLMATH_TEST_FOLDER}/t"
    path = written(tmp_path / "a.yaml", f"data:\n  train_path: {written_as}\n")
    with pytest.raises(ValueError, match="variable RLMATH_TEST_FOLDER is not set"):
        load_config([path], GIVEN[:2])
    assert load_config([path], GIVEN[:2], saved=True).data.train_path == written_as
    monkeypatch.setenv("RLMATH_TEST_FOLDER", "/scratch")
    assert load_config([path], GIVEN[:2], saved=True).data.train_path == "/scratch/t"


@pytest.mark.parametrize("value", ["!!bool abc", "!!timestamp abc", "!!int ''"])
def test_a_yaml_tag_that_does_not_fit_is_refused(tmp_path: Path, value: str):
    """PyYAML's constructors raise KeyError, AttributeError and IndexError for it."""
    message = problem_in(tmp_path / "a.yaml", f"run:\n  seed: {value}\n")
    assert 'a.yaml" cannot be read: ' in message
    assert f'the value in "run.seed={value}" cannot be read' in problem_with([f"run.seed={value}"])


# ---------------------------------------------------------------- mistakes


def test_a_number_beyond_64_bits_is_out_of_range():
    config = load_config([], [*GIVEN, f"run.total_steps={10**300}"])
    (problem,) = schema_problems(config)
    assert problem.startswith("run.total_steps is 1000") and "at least 1" in problem


def test_a_fifo_in_the_place_of_a_config_file_is_told(tmp_path: Path):
    os.mkfifo(tmp_path / "a.yaml")
    with pytest.raises(ValueError, match=r"a\.yaml.*is not a file"):
        load_config([tmp_path / "a.yaml"], GIVEN)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("run.sed=1", "run.seed"),
        ("optim.lr=1", "optimizer.lr"),
        ("policy.tensor=2", "parallel.tensor"),
        ("run.data.train_path=x", "data.train_path"),
        ("--optimizer.lr=3", "optimizer.lr"),
        ("Optimizer.LR=3", "optimizer.lr"),
    ],
)
def test_an_unknown_key_names_the_nearest(wrong: str, nearest: str):
    message = problem_with([wrong])
    assert f'unknown key "{wrong.partition("=")[0]}", did you mean "{nearest}"?' in message


def test_an_unknown_key_near_to_nothing_lists_the_sections():
    message = problem_with(["zzz=1"])
    assert 'unknown key "zzz"' in message and ", ".join(section_classes()) in message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("optim:\n  lr: 1\n", 'unknown key "optim.lr", did you mean "optimizer.lr"?'),
        ("rollout: 3\n", '"rollout" is a section, it cannot be 3. Set keys in it.'),
        ("run:\n  seed:\n    value: 3\n", "needs int"),
        (
            "model:\n  path: 007\n",
            '"model.path" got 7 (int), needs str. Put text that looks like something else',
        ),
        ("run:\n  seed:\n", '"run.seed" got null, needs int'),
        ("run:\n  seed: 1\n  seed: 2\n", "seed"),
        ("- run\n", "must hold sections"),
        (
            "run: [1\n",
            'a.yaml" cannot be read: line 1: a list is not closed; needed: "]", and commas between',
        ),
        ("run: {a: 1\n", 'a.yaml" cannot be read: line 1: a mapping is not closed; needed: "}"'),
        (
            "run:\n  a: b\n\tseed: 1\n",
            'a.yaml" cannot be read: line 3: a tab indents it; needed: spaces.',
        ),
        ("run:\n  a: 1\n  a: 2\n", 'a.yaml" cannot be read: line 3: a stands twice; needed: once.'),
        (
            "run:\n  a: 'b\n",
            'a.yaml" cannot be read: line 2: a quotation mark is not closed; needed: the same mark',
        ),
        ("run:\n  a: b: c\n", 'a.yaml" cannot be read: line 2: ": " stands where no name can be'),
        (
            "run:\n  a: *b\n",
            'a.yaml" cannot be read: line 2: a value begins with *, which names an anchor',
        ),
        (
            "run:\n  a: %b\n",
            'a.yaml" cannot be read: line 2: a line or value begins with a character',
        ),
        (
            "run:\n  a: !b c\n",
            'a.yaml" cannot be read: line 2: the tag !b is unknown; take it out.',
        ),
        ("run: a\n- b\n", 'a.yaml" cannot be read: line 2: needed: "name: value" in each line'),
        ("base: [a, b]\n", '"base" must be the name of one YAML file'),
    ],
)
def test_a_wrong_file_is_told_with_its_name(tmp_path: Path, text: str, told: str):
    message = problem_in(tmp_path / "a.yaml", text)
    assert told in message and "a.yaml" in message


def test_a_key_with_dots_in_a_file_is_a_nested_one(tmp_path: Path):
    file = written(tmp_path / "a.yaml", "rollout.group_size: 3\noptimizer: {lr: 2.0}\n")
    config = load_config([file], GIVEN)
    assert (config.rollout.group_size, config.optimizer.lr) == (3, 2.0)


def test_a_file_that_is_not_text_is_told(tmp_path: Path):
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00run")
    with pytest.raises(ValueError, match=r"a\.yaml.*cannot be read: "):
        load_config([tmp_path / "a.yaml"], GIVEN)


def test_a_file_that_starts_from_itself_is_told(tmp_path: Path):
    written(tmp_path / "b.yaml", "base: a.yaml\n")
    assert "starts from itself" in problem_in(tmp_path / "a.yaml", "base: b.yaml\n")


def test_a_missing_file_names_the_nearest(tmp_path: Path):
    written(tmp_path / "demo.yaml", "")
    with pytest.raises(ValueError, match=r'no config file ".*demo\.yml"\. There is ".*demo\.yaml"'):
        load_config([tmp_path / "demo.yml"], GIVEN)
    with pytest.raises(ValueError, match="is not a file"):
        load_config([tmp_path], GIVEN)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("run.seed=1.5", "got 1.5 (float), needs int"),
        ("data.shuffle=maybe", "got 'maybe' (str), needs bool (true or false)."),
        ("run.total_steps=[1]", "got [1] (list), needs int or null"),
        ("run.seed=null", '"run.seed" got null, needs int'),
        ("data.train_weights={a: 1}", "got {'a': 1} (dict), needs list of float, written [1, 2]."),
        ("run.output_dir=a${b", "got 'a${b' (str), needs str. Write \"\\${\" for text"),
    ],
)
def test_a_wrong_type_says_what_was_got_and_needed(wrong: str, told: str):
    assert told in problem_with([wrong])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("run.seed", '"run.seed" is not of the form key.sub=value'),
        ("run.output_dir=", '"run.output_dir=" has nothing after "="'),
        (
            "run.total_steps=[1",
            'the value in "run.total_steps=[1" cannot be read: a list is not closed; needed: "]"',
        ),
        (
            "run.seed=!!bool abc",
            "cannot be read: a value is none of its tag ('abc'); take the tag out.",
        ),
        (
            "run.seed=${run.nothing}",
            '"${run.nothing}", which cannot be resolved: unknown key "run.nothing". --help run',
        ),
        (
            "run.seed=${_auto_}",
            'which cannot be resolved: unknown key "_auto_". The sections are run, ',
        ),
        (
            "run.seed=${data.train_path}",
            "which cannot be resolved: it stands for 't.jsonl'; needed: int.",
        ),
        (
            "run.seed=${run.seed}",
            "which cannot be resolved: it stands for itself; needed: a value.",
        ),
        ("run.seed=${times:2}", "missing a required argument: 'number'; needed: ${times:2,"),
        (
            "run.seed=${oc.evn:A}",
            'there is no "${oc.evn:...}"; needed: ${times:2,${data.prompts_per_step}}, two '
            "numbers; ",
        ),
        ("run.seed=${oc.evn:A}", '${section.name}, another setting. Did you mean "oc.env"?'),
    ],
)
def test_a_malformed_override_is_told(wrong: str, told: str):
    assert told in problem_with([wrong])


def test_omegaconfs_mark_for_a_missing_value_leaves_the_default():
    assert load_config([], [*GIVEN, "run.seed=???"]).run.seed == 1


def test_all_that_is_missing_is_listed_with_how_to_give_it():
    with pytest.raises(ValueError, match=r"problem|config file|resolved") as error:
        load_config([], ["model.path=???"])
    message = str(error.value)
    assert message.startswith("3 problems with the settings:")
    for key in ("run.output_dir", "model.path", "data.train_path"):
        assert (
            f'"{key}" must be given' in message
            and f"Write {key}=... on the command line" in message
        )
    assert '"model:" and under it "  path: ..."' in message


def test_ranges_and_words_are_told_with_the_other_mistakes(tmp_path: Path):
    """Without other mistakes, ranges and words are left to the checks of a run.

    Those list them together with settings that conflict with each other."""
    path = written(
        tmp_path / "a.yaml",
        "run:\n  sed: 1\n  total_epochs: x\noptimizer:\n  lr: -1\n  kind: adamw\nrollout:\n  "
        "group_size: 0\n",
    )
    overrides = [
        "model.path=m",
        "data.train_path=t",
        "run.output_dir=o",
        "rollout.group_size=2",
        "run.seed=-1",
    ]
    with pytest.raises(ValueError, match=r"^5 problems with the settings") as error:
        load_config([path], overrides)
    for part in (
        'a.yaml: unknown key "run.sed", did you mean "run.seed"?',
        "a.yaml: \"run.total_epochs\" got 'x' (str), needs int",
        "optimizer.lr is -1.0; needed: above 0",
        'optimizer.kind is "adamw"; needed: one of "adam", "sgd". Did you mean "adam"?',
        "run.seed is -1; needed: at least 0, at most 2147483647",
    ):
        assert part in str(error.value)
    config = load_config([], [*GIVEN, "run.seed=-1", "optimizer.kind=adamw", "stages.steps=[1,0]"])
    assert [problem.partition(" is ")[0] for problem in schema_problems(config)] == [
        "run.seed",
        "stages.steps",
        "optimizer.kind",
    ]


# ---------------------------------------------------------------- command line


def test_help_lists_every_setting_with_type_default_and_docstring():
    flat = " ".join(help_text("all", 80).split())
    for key, setting in all_settings().items():
        assert (
            f"{key} ({setting.type_name}" in flat
            or f"{key} (one of {', '.join(setting.words)}" in flat
        )
        assert setting.doc in flat
    assert "optimizer.lr (float, above 0; default 1e-06)" in flat
    assert "run.total_steps (int or null, at least 1; default null)" in flat
    assert "optimizer.decay (one of constant, linear, cosine; default constant)" in flat
    assert "policy.recompute_method (one of uniform, block, or null; default null)" in flat
    assert "model.path (str; must be given)" in flat


def test_help_explains_a_section_or_a_setting_and_names_the_sections():
    assert "optimizer.lr " in help_text("optimizer") and "policy." not in help_text("optimizer")
    assert help_text("optimizer.lr").count("\n  ") == 3
    assert len(help_text(width=80).splitlines()) < 32 and "optimizer.lr" not in help_text()
    with pytest.raises(ValueError, match=r'no setting "optimiser"\. Did you mean "optimizer"'):
        help_text("optimiser")


def test_a_section_of_which_few_settings_count_is_described_by_their_names():
    """Supervised training has no advantages, and no engines while which anything is offloaded."""
    lines = help_text(width=80, keys=used_keys()).splitlines()
    assert "  algorithm   rollback, rollback_lr_factor" in lines
    assert "  memory      gpu, gpu_gib" in lines
    assert "  optimizer   The optimizer and its learning-rate schedule" in lines
    section = help_text("memory", 80, used_keys()).splitlines()
    assert section[2] == "memory: gpu, gpu_gib." and "offload" not in "".join(section)
    assert "  memory      What is offloaded while the engines generate" in help_text(width=80)


def test_help_fits_the_terminal(monkeypatch: pytest.MonkeyPatch):
    for columns in (70, 90):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert columns - 8 < max(map(len, help_text("all").splitlines())) <= columns


def test_arguments_are_split_into_files_and_overrides():
    argv = ["--config", "a.yaml", "run.seed=3", "--config", "b.yaml", "rollout.top_k=-1"]
    parsed = make_parser("Train.").parse_intermixed_args(argv)
    assert parsed.config == [Path("a.yaml"), Path("b.yaml")]
    assert parsed.overrides == ["run.seed=3", "rollout.top_k=-1"]
    parsed = make_parser("Train.").parse_intermixed_args([])
    assert (parsed.config, parsed.overrides) == ([], [])


def test_a_config_in_a_folder_that_may_not_be_entered_is_told(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    child = os.fork()
    if child == 0:  # root may enter every folder
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            load_config([tmp_path / "closed" / "my.yaml"], [])
        except ValueError as error:
            os._exit(7 if "There is no config file" in str(error) else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_texts_that_are_no_path_on_any_disk_are_told_together() -> None:
    fits = ["run.output_dir=" + "o" * 255 + "/" + "é" * 127, "model.path=m", "data.train_path=t"]
    load_config([], fits)
    with pytest.raises(ValueError) as error:
        load_config([], [*fits, "model.path=a/" + "é" * 128, 'validation.paths=["v\\0w"]'])
    assert "2 problems" in str(error.value)
    assert "model.path has 258 bytes: 'a/" in str(error.value)
    assert (
        "validation.paths has 3 bytes: 'v\\x00w'; needed: UTF-8 without NUL, at most 3500"
        in str(error.value)
    )
    with pytest.raises(ValueError, match=r"data.train_path has 4002 bytes: "):
        load_config([], [*fits, "data.train_path=" + "a/" * 2001])
    with pytest.raises(ValueError, match=r"run.output_dir has 4 bytes: 'o\\udcff'; needed: UTF-8"):
        load_config([], [*fits, "run.output_dir=" + os.fsdecode(b"o\xff")])
