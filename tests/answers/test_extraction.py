from rlmath.answers.extraction import (
    extract_answer,
    extract_boxed,
    final_part,
    has_box,
    split_boxes,
)
from rlmath.answers.string_match import Rules
from rlmath.answers.verifier import verify
from tests.answers.table import check_table


def test_the_last_complete_box_is_extracted():
    check_table(
        extract_boxed,
        [
            ("The answer is \\boxed{132}.", "132"),
            ("\\boxed{1}, no, \\boxed{2}", "2"),
            ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
            ("\\boxed {7}", "7"),
            ("\\boxed{1} and then \\boxed{2", "1"),
            ("\\boxed{x = \\boxed{5}}", "5"),
            ("{ unclosed \\boxed{3}", "3"),
            ("} \\boxed{3}", "3"),
            ("\\\\boxed{4}", "4"),
            ("\\boxed{}", ""),
            ("boxed{5}", None),
            ("\\boxed 5", "5"),
            ("so $\\boxed 42$.", "42"),
            ("$\\boxed\\frac{1}{2}$", "\\frac{1}{2}"),
            ("$\\boxed \\frac12$", "\\frac12"),
            ("\\boxed answers", None),
            ("\\boxed", None),
            ("\\boxed{5", None),
        ],
    )


def test_boxes_that_are_joined_are_one_answer():
    check_table(
        extract_answer,
        [
            ("$\\boxed{2}$ and $\\boxed{3}$", "2 and 3"),
            ("\\boxed{2}, \\boxed{3}", "2 , 3"),
            ("\\(\\boxed{2}\\) or \\(\\boxed{3}\\)", "2 or 3"),
            ("\\[\\boxed{2}\\quad\\text{and}\\quad\\boxed{3}\\]", "2 and 3"),
            ("$x = \\boxed{2}$ and $y = \\boxed{3}$", "x=2 and y=3"),
            ("- $\\boxed{2}$\n- $\\boxed{3}$", "2, 3"),
            ("(a) $\\boxed{2}$\n(b) $\\boxed{3}$", "2, 3"),
            ("(a) $\\boxed{2}$ and (b) $\\boxed{3}$", "2, 3"),
            ("Part A: $\\boxed{3}$; Part B: $\\boxed{3}$", "3, 3"),
            ("(a) $\\boxed{2}$, but not (b) $\\boxed{3}$", "3"),
            ("\\boxed{3}, \\boxed{3}", "3"),
            ("\\boxed{1}. So \\boxed{2} and \\boxed{3}", "2 and 3"),
            ("\\boxed{1}, so \\boxed{2}", "2"),
            ("\\boxed{84}\n\n\\boxed{42}", "42"),
        ],
    )


def test_a_completion_cannot_write_the_mark_of_several_boxes():
    text = "The answer is 7 [boxes: 3; 8]"
    for rules in (Rules("phrase"), Rules("number")):
        assert split_boxes(extract_answer(text, rules.answer_from))[1] == ""
        assert not verify(text, ("7", "3, 8", "3; 8"), rules=rules).correct


def test_many_joined_boxes_are_all_kept_up_to_a_bound():
    assert extract_boxed("\\boxed{1}, " * 100_000 + "\\boxed{2}").count("1") == 1
    many = extract_boxed(", ".join(f"\\boxed{{{n}}}" for n in range(100_000)))
    assert many.startswith("99968 , ") and many.endswith(" 99999")


def test_hostile_text_holds_no_answer_and_takes_one_pass():
    for text in (
        "\\boxed " * 100_000,
        "\\boxed\\frac{" * 100_000,
        "\\boxed{" * 100_000,
        "\\boxed" + " " * 500_000,
        "<answer>" * 100_000,
        "<think>" * 100_000 + "\\boxed{1}",
    ):
        assert extract_answer(text) is None, text[:20]
        assert not has_box(text), text[:20]


def test_many_nested_boxes_give_the_innermost():
    assert extract_boxed("\\boxed{" * 50_000 + "}" * 49_999) == ""


def test_the_final_part_comes_after_the_thoughts():
    check_table(
        final_part,
        [
            ("no tags", "no tags"),
            ("<think>a</think>b", "b"),
            ("a</think>b", "b"),
            ("<think>a</think>b<think>c</think>d", "d"),
            ("<think>a</think>b<think>c", "b"),
            ("<think>a", ""),
        ],
    )
