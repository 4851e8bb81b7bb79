import pytest

from rlmath.rewards.extraction import extract_answer, extract_boxed, final_part, has_box


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is \\boxed{132}.", "132"),
        ("\\boxed{1}, no, \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed {7}", "7"),
        ("\\fbox{7}", "7"),
        ("\\boxed{1} and then \\boxed{2", "1"),
        ("\\boxed{x = \\boxed{5}}", "5"),
        ("\\boxed{\\left\\{ 1, 2 \\right.}", "\\left\\{ 1, 2 \\right."),
        ("{ unclosed \\boxed{3}", "3"),
        ("} \\boxed{3}", "3"),
        ("\\\\boxed{4}", "4"),
        ("\\boxed{}", ""),
        ("boxed{5}", None),
        ("\\boxed 5", None),
        ("\\boxed{5", None),
        ("", None),
    ],
)
def test_the_last_complete_box_is_extracted(text, answer):
    assert extract_boxed(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 100_000,
        "\\boxed" + " " * 500_000,
        "<answer>" * 100_000,
        "<think>" * 100_000 + "\\boxed{1}",
    ],
)
def test_hostile_text_holds_no_answer_and_takes_one_pass(text):
    assert extract_answer(text) is None
    assert not has_box(text)


def test_many_nested_boxes_give_the_innermost():
    assert extract_boxed("\\boxed{" * 50_000 + "}" * 49_999) == ""


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("no tags", "no tags"),
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("<think>a</think>b<think>c</think>d", "d"),
        ("<think>a</think>b<think>c", "b"),
        ("<think>a", ""),
    ],
)
def test_the_final_part_comes_after_the_thoughts(text, part):
    assert final_part(text) == part


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 5 </answer>", "5"),
        ("<answer>so \\boxed{5}</answer>", "5"),
        ("<ANSWER>5</ANSWER>", "5"),
        ("\\boxed{4}<answer>5</answer>", "5"),
        ("<answer>4</answer>\\boxed{5}", "5"),
        ("<answer>4</answer><answer>5", "4"),
        ("</answer>5<answer>", None),
    ],
)
def test_answer_tags_are_read(text, answer):
    assert extract_answer(text) == answer
