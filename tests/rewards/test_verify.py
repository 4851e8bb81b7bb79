import os
import subprocess
import sys

import pytest

from rlmath.rewards.verify import (
    MAX_ANSWER_CHARS,
    Verdict,
    cheap_verdict,
    check_tasks,
    extract_boxed,
    judge,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is \\boxed{132}.", "132"),
        ("\\boxed{1}, no, \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed {7}", "7"),
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


def test_extraction_takes_one_pass_whatever_the_text():
    assert extract_boxed("\\boxed{" * 100_000) is None
    assert extract_boxed("\\boxed{" * 50_000 + "}" * 49_999) == ""
    assert extract_boxed("\\boxed" + " " * 500_000) is None


@pytest.mark.parametrize(
    ("text", "solutions", "expected"),
    [
        ("no box", ["1"], Verdict(False, "", "no_answer")),
        ("\\boxed{ }", ["1"], Verdict(False, "", "no_answer")),
        ("\\boxed{ 132 }", ["\\boxed{132}"], Verdict(True, "132", "string")),
        ("\\boxed{$x+1$}", ["$\\boxed{x+1}$"], Verdict(True, "$x+1$", "string")),
        ("\\boxed{a \n b}", ["a b"], Verdict(True, "a \n b", "string")),
        ("\\boxed{3}", ["1", "3"], Verdict(True, "3", "string")),
        ("\\boxed{0.50}", ["\\boxed{.5}"], Verdict(True, "0.50", "number")),
        ("\\boxed{007}", ["7."], Verdict(True, "007", "number")),
        ("\\boxed{-0}", ["0"], Verdict(True, "-0", "number")),
        ("\\boxed{131}", ["\\boxed{132}"], Verdict(False, "131", "number")),
        ("\\boxed{0.3333333333}", ["0.33333333333"], Verdict(False, "0.3333333333", "number")),
        ("\\boxed{" + "9" * 999 + "}", ["9" * 998], Verdict(False, "9" * 999, "number")),
        ("\\boxed{" + "9" * 1001 + "}", ["9" * 1001], Verdict(False, "9" * MAX_ANSWER_CHARS, "too_long")),
    ],
)
def test_cheap_decisions_need_no_worker(text, solutions, expected):
    assert cheap_verdict(extract_boxed(text), solutions) is not None
    assert judge(text, solutions, "math") == expected


def test_the_cheap_half_leaves_what_needs_a_parser():
    assert cheap_verdict("\\frac12", ["0.5"]) is None
    assert cheap_verdict("5", ["4", "x+1"]) is None
    assert cheap_verdict("1,234", ["1234"]) is None


@pytest.mark.parametrize(
    ("text", "solutions", "correct"),
    [
        ("\\boxed{\\frac{1}{2}}", ["\\boxed{0.5}"], True),
        ("\\boxed{\\dfrac{2}{4}}", ["\\boxed{\\frac{1}{2}}"], True),
        ("\\boxed{(x+1)^2}", ["\\boxed{x^2+2x+1}"], True),
        ("\\boxed{\\{2, 1\\}}", ["\\boxed{\\{1, 2\\}}"], True),
        ("\\boxed{2\\sqrt{3}}", ["\\boxed{4}", "\\boxed{\\sqrt{12}}"], True),
        ("\\boxed{1,234}", ["\\boxed{1234}"], True),
        ("\\boxed{\\frac{1}{3}}", ["\\boxed{0.5}"], False),
        ("\\boxed{(1, 2)}", ["\\boxed{(2, 1)}"], False),
        ("\\boxed{\\pi}", ["\\boxed{3.14}"], False),
        ("\\boxed{\\frac{1}{}", ["\\boxed{0.5}"], False),
    ],
)
def test_math_verify_decides_the_rest(text, solutions, correct):
    verdict = judge(text, solutions, "math")
    assert verdict.correct is correct
    assert verdict.verdict == ("symbolic" if extract_boxed(text) else "no_answer")


@pytest.mark.parametrize(
    "attack",
    [
        "__import__('os').system('touch {path}')",
        "\\text{{__import__('os').system('touch {path}')}}",
        "exec(\"open('{path}', 'w')\")",
        "[c for c in ().__class__.__base__.__subclasses__()]",
        "open('{path}','w').write('x')+1",
    ],
)
def test_code_in_an_answer_is_never_run(attack, tmp_path):
    path = tmp_path / "written"
    assert not judge(f"\\boxed{{{attack.format(path=path)}}}", ["\\boxed{\\frac{1}{2}}"], "math").correct
    assert not path.exists()


def test_rows_that_no_judge_knows_are_refused():
    check_tasks(["math", "math"])
    with pytest.raises(ValueError, match="task 'code', which cannot be judged"):
        check_tasks(["math", "code"])


def test_the_cheap_half_loads_neither_sympy_nor_torch():
    code = (
        "import sys; from rlmath.rewards.pool import VerifierPool; from rlmath.rewards.verify import judge;"
        "judge('\\\\boxed{1}', ['1'], 'math'); print({'sympy', 'torch', 'math_verify'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert result.stdout.strip() == "set()"
