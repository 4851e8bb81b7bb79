"""What a user is shown of the data before a run.

A rendered prompt, and what is unusual about the files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlmath.algorithms.types import Prompt
from rlmath.answers.verifier import STRICT
from rlmath.checkpoint.hf.config_json import read_model_shape
from rlmath.cli.make_tiny_model import make_tokenizer
from rlmath.config.load import load_config
from rlmath.config.schema import RewardConfig
from rlmath.data.audit import DataAudit, all_are_checkable, audit_prompts
from rlmath.data.dataset import audit_inputs, load_inputs, load_sft_inputs, load_validation
from rlmath.data.loader import load_prompts, problem_key
from rlmath.data.tokenizer import FIXED, characters_without_token, load_tokenizer
from tests.tiny_models import make_model_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the demo's tokenizer.

    It has one token for every ASCII character, and none for others."""
    folder = make_model_folder(tmp_path_factory.mktemp("audit") / "model")
    (folder / "tokenizer.json").unlink()
    make_tokenizer().save_pretrained(folder)
    return folder


def questions(path: Path, rows: list[tuple[str, str]]) -> str:
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    return str(path)


SUMS = [(f"What is {n}+1?", str(n + 1)) for n in range(20)]


def audited(model: Path, train: list[str], *overrides: str) -> DataAudit:
    paths = [
        f"model.path={model}",
        f"data.train_path={train[0]}",
        f"data.more_train_paths=[{','.join(train[1:])}]",
    ]
    small = ["data.prompts_per_step=4", "rollout.max_new_tokens=16", "run.output_dir=out"]
    config = load_config([], [*paths, *small, *overrides])
    shape = read_model_shape(model)
    inputs = load_inputs(config, shape)
    validation = load_validation(config, inputs.tokenizer, shape.vocab_size)
    return audit_inputs(config, inputs, validation, inputs.tokenizer)


def finding(audit: DataAudit) -> tuple[str, tuple[str, ...]]:
    (only,) = audit.findings
    return only.text, only.examples


# ---------------------------------------------------------------- one prompt, as the model reads it


def test_nothing_is_found_in_data_that_are_in_order(model: Path, tmp_path: Path) -> None:
    audit = audited(model, [questions(tmp_path / "train.jsonl", SUMS)])
    assert audit.findings == audit.warnings() == () and audit.lines() == (
        *audit.shown,
        audit.summary,
    )
    assert "20 prompts" in audit.summary and audit.summary.endswith("nothing odd.")


def test_a_prompt_is_shown_with_its_template_and_its_tokens(model: Path, tmp_path: Path) -> None:
    text = FIXED["qwen_boxed"].render(SUMS[0][0])
    audit = audited(model, [questions(tmp_path / "train.jsonl", SUMS)])
    # One token a character, but one for the box.
    assert audit.shown[1:3] == (
        '  in the template "qwen_boxed" (data.template=auto),',
        f"  {len(text) - len('boxed{')} tokens, 0 of them unknown; │ ends a token:",
    )
    assert "    row        W│h│a│t│ │i│s│ │0│+│1│?│" in audit.shown


def test_what_the_tokenizer_does_not_know_is_told(model: Path, tmp_path: Path) -> None:
    path = questions(tmp_path / "train.jsonl", [*SUMS, ("Wie groß ist 1+1?", "2")])
    text, examples = finding(audited(model, [path]))
    assert "does not know parts of 1 of 21 prompts" in text and "no token for ß" in text
    assert examples == ("'20': Wie groß ist 1+1?",)


def test_unknown_tokens_are_counted_by_the_name_that_the_tokenizer_gives_them(
    tmp_path: Path,
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    path = questions(tmp_path / "a.jsonl", [("one", "1"), ("one two", "2")])
    prompts, _ = load_prompts(path, tokenizer, 9, template="raw")
    (only_finding,) = audit_prompts([("a", prompts)], [], RewardConfig(), tokenizer).findings
    assert (
        "parts of 1 of 2 prompts" in only_finding.text and "no token for" not in only_finding.text
    )


def test_a_tokenizer_that_leaves_out_spaces(model: Path, tmp_path: Path) -> None:
    assert characters_without_token("a b\u00e9\u200d", load_tokenizer(str(model))) == {"\u00e9"}
    folder = make_model_folder(
        tmp_path / "spaceless"
    )  # transformers reads its tokenizer with Qwen2's rules
    assert characters_without_token("a b", load_tokenizer(str(folder))) == {" "}


# ---------------------------------------------------------------- the same problem twice


def test_problems_that_are_validated_and_trained_on(model: Path, tmp_path: Path) -> None:
    train = questions(tmp_path / "train.jsonl", SUMS)
    held_out_path = questions(
        tmp_path / "held.jsonl", [("what is  3 + 1", "4"), ("What is 7-1?", "6")]
    )
    checked = ("validation.every_steps=2", "validation.max_new_tokens=8")
    text, examples = finding(
        audited(model, [train], *checked, f"validation.paths=[{held_out_path}]")
    )
    assert text.startswith(
        f'1 of the 2 problems of validation "held" are trained on, too, in {train}'
    )
    assert examples == ("'0': what is  3 + 1",)
    text, _ = finding(audited(model, [train], *checked, f"validation.paths=[{train}]"))
    assert text.startswith('20 of the 20 problems of validation "train"')


def test_a_problem_in_two_files(model: Path, tmp_path: Path) -> None:
    train = questions(tmp_path / "train.jsonl", SUMS)
    other_path = questions(
        tmp_path / "more.jsonl", [("What is 3+1?", "4"), ("What is 70+1?", "71")]
    )
    text, examples = finding(audited(model, [train, other_path]))
    assert (
        text.startswith(f"1 of the 2 problems of {other_path} are in an earlier file, too")
        and len(examples) == 1
    )
    text, examples = finding(audited(model, [train, questions(tmp_path / "copy.jsonl", SUMS)]))
    assert text.startswith("20 of the 20 problems") and len(examples) == 3


def test_problems_are_the_same_whatever_their_template_and_layout() -> None:
    plain = problem_key("What is $47+85$?")
    assert problem_key(FIXED["r1_distill"].render("what is 47 + 85?")) == plain
    assert (
        len(
            {plain, problem_key("What is 47-85?"), problem_key("What is 4+785?"), problem_key("5!")}
        )
        == 4
    )
    assert problem_key("Compute 5!") != problem_key("Compute 5")


# ---------------------------------------------------------------- references


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("see solution", "says that the answer is elsewhere"),
        ("\\boxed{\\text{See the figure above.}}", "says that the answer is elsewhere"),
        ("9" * 1_000_000, "has 1,000,000 characters"),
        ("\\frac{1}{2", "is not accepted as its own answer (no_answer)"),
        (
            "Since the two triangles are similar the ratio of their sides follows from the first "
            "part",
            "is a sentence, not an answer",
        ),
    ],
)
def test_references_that_no_answer_equals(
    model: Path, tmp_path: Path, answer: str, reason: str
) -> None:
    path = questions(tmp_path / "train.jsonl", [*SUMS, ("How many?", answer)])
    text, examples = finding(audited(model, [path]))
    assert text.startswith("1 of 21 training prompts have no usable reference")
    assert len(examples) == 1 and reason in examples[0] and len(examples[0]) < 200


def test_good_references_are_not_named(tmp_path: Path) -> None:
    cases = Path(__file__).parents[1] / "answers" / "cases.jsonl"
    rows = [json.loads(line) for line in cases.read_text(encoding="utf-8").splitlines()]
    answers = sorted({row["solutions"][0] for row in rows if row["correct"]})
    path = questions(
        tmp_path / "a.jsonl", [(f"Problem {n}", answer) for n, answer in enumerate(answers)]
    )
    prompts, _ = load_prompts(path, None, 99)
    assert len(prompts) > 100
    assert audit_prompts([("a", prompts)], [], RewardConfig(), None).findings == ()


@pytest.mark.parametrize(
    ("solutions", "task", "checkable"),
    [
        (("7",), "math", True),
        (("see solution", "\\frac{1}{2}"), "math", True),
        (("see solution",), "math", False),
        (("The answer is a story of at least twelve words about a cat and a dog",), "math", False),
        (("7",), "story", False),
    ],
)
def test_rows_are_checkable_where_each_has_a_reference_that_an_answer_could_equal(
    solutions: tuple[str, ...], task: str, checkable: bool
) -> None:
    good = Prompt("q1", "?", (1,), ("7",), "math")
    assert all_are_checkable([good, Prompt("q2", "?", (1,), solutions, task)], STRICT) is checkable


def test_one_good_reference_of_several_is_enough_and_own_functions_are_not_judged(
    tmp_path: Path,
) -> None:
    rows = [
        {"question": "a", "answer": ["see solution", "3"]},
        {"question": "b", "answer": "see solution"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prompts, _ = load_prompts(str(tmp_path / "a.jsonl"), None, 99)
    (only_finding,) = audit_prompts([("a", prompts)], [], RewardConfig(), None).findings
    assert only_finding.text.startswith("1 of 2") and only_finding.examples[0].endswith(
        "('1': 'see solution')"
    )
    own_function = RewardConfig(function="tests.reward_by_hash:reward")
    assert audit_prompts([("a", prompts)], [], own_function, None).findings == ()


def test_data_without_any_reference_that_could_be_answered_are_refused(
    model: Path, tmp_path: Path
) -> None:
    path = questions(tmp_path / "train.jsonl", [(q, "see solution") for q, _ in SUMS])
    with pytest.raises(
        ValueError, match=r"none of the 20 training prompts .* or set reward\.function"
    ) as error:
        audited(model, [path])
    assert "20: the reference says that the answer is elsewhere ('0': 'see solution', '1': " in str(
        error.value
    )


def test_sentences_as_references_are_warned_of_and_not_refused(tmp_path: Path) -> None:
    """The same words are right: a task may ask for them in another order."""
    words = "zeal yam wolf vine urn tree sun rope quilt pear oak nut moon"
    path = questions(tmp_path / "a.jsonl", [(f"Sort {n}: {words}", words) for n in range(3)])
    prompts, _ = load_prompts(path, None, 99)
    (only_finding,) = audit_prompts([("a", prompts)], [], RewardConfig(), None).findings
    assert (
        only_finding.text.startswith("3 of 3 training prompts")
        and "is a sentence" in only_finding.examples[0]
    )


# --------------------------------------------------- supervised training, and refusals that explain


def sft_config(model: Path, path: str, *overrides: str):
    paths = [
        f"model.path={model}",
        f"data.train_path={path}",
        "run.output_dir=out",
        "data.prompts_per_step=4",
    ]
    return load_config([], [*paths, *overrides])


def test_a_sequence_is_shown_with_the_part_that_is_learned(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "completion": f"{n + 1}"} for n in range(20)]
    path = tmp_path / "sft.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    inputs = load_sft_inputs(
        sft_config(model, str(path), "sft.held_out_share=0"), read_model_shape(model)
    )
    assert inputs.audit.shown[1:] == (
        "  6 tokens, 0 of them unknown; │ ends a token;",
        "  the 2 of lines with * are learned:",
        "    row        0│+│1│=│",
        "  * row        1│",
        "  * end        <eos>│",
    )
    assert inputs.audit.findings == ()
    copy = shutil.copy(path, tmp_path / "copy.jsonl")
    config = sft_config(
        model, str(path), f"sft.held_out_path={path}", f"data.more_train_paths=[{copy}]"
    )
    repeated, both = load_sft_inputs(config, read_model_shape(model)).audit.findings
    assert repeated.text.startswith("20 of the 20 prompts") and both.text.startswith(
        "20 of the 20 held-out sequences"
    )
    assert both.examples == ("0+1=", "1+1=", "2+1=")
    path.write_text("\n".join(json.dumps(row | {"completion": "é"}) for row in rows))
    (unknown,) = load_sft_inputs(
        sft_config(model, str(path)), read_model_shape(model)
    ).audit.findings
    assert "no token for é" in unknown.text


def test_a_refusal_for_too_few_prompts_says_what_became_of_the_rows(
    model: Path, tmp_path: Path
) -> None:
    long = "too long " * 20
    rows = [{"id": "one", "question": "What is 1+1?", "answer": "2"}] * 5
    rows.append({"id": "two", "question": long, "answer": "2"})
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"only 1 prompt is left after filtering") as error:
        audited(
            model,
            [str(tmp_path / "train.jsonl")],
            "data.max_prompt_tokens=100",
            "data.template=raw",
        )
    assert "4 further rows repeating earlier ones" in str(error.value)
    assert "dropped: 1 longer than data.max_prompt_tokens=100" in str(error.value)
    assert "dropped, too long (180 tokens): 'two'" in str(error.value)


def test_so_does_supervised_training(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "completion": "1" * (100 if n else 1)} for n in range(33)]
    path = tmp_path / "sft.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    config = sft_config(model, str(path), "sft.max_sequence_tokens=50", "sft.held_out_share=0")
    with pytest.raises(ValueError, match=r"only 1 prompt is left") as error:
        load_sft_inputs(config, read_model_shape(model))
    assert "dropped: 32 longer than sft.max_sequence_tokens=50" in str(error.value)
