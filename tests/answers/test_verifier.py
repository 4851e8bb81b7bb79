"""Both halves of the verifier, its rules, and what it must never load or run.

Labelled cases are in test_cases."""

import os
import subprocess
import sys

import pytest

from rlmath.answers.verifier import (
    MAX_ANSWER_CHARS,
    Rules,
    Verdict,
    check_tasks,
    gold_answer,
    verify,
    verify_by_string,
)
from tests.answers.table import check_table

LOOSE = Rules(protocol=True)


def test_cheap_decisions_need_no_worker():
    check_table(
        verify,
        [
            ("no box", ["1"], Verdict(False, "", "no_answer")),
            ("\\boxed{ 132 }", ["\\boxed{132}"], Verdict(True, "132", "string")),
            ("\\boxed{$x+1$}", ["$\\boxed{x+1}$"], Verdict(True, "$x+1$", "string")),
            ("\\boxed{a \n b}", ["a b"], Verdict(True, "a \n b", "string")),
            ("\\boxed{3}", ["1", "3"], Verdict(True, "3", "string")),
            ("\\boxed{0.50}", ["\\boxed{.5}"], Verdict(True, "0.50", "number")),
            ("\\boxed{\\dfrac{2}{4}}", ["1/2"], Verdict(True, "\\dfrac{2}{4}", "number")),
            ("\\boxed{1,234}", ["1234"], Verdict(True, "1,234", "number")),
            ("\\boxed{B}", ["\\text{(C)}"], Verdict(False, "B", "choice")),
            ("\\boxed{The Ellipse}", ["\\text{ellipse}"], Verdict(True, "The Ellipse", "string")),
            ("\\boxed{" + "9" * 999 + "}", ["9" * 998], Verdict(False, "9" * 999, "number")),
            (
                "\\boxed{" + "9" * 1001 + "}",
                ["9" * 1001],
                Verdict(False, "9" * MAX_ANSWER_CHARS, "too_long"),
            ),
        ],
    )


def test_the_cheap_half_leaves_what_needs_a_parser():
    assert verify_by_string("\\sqrt{4}", ["2"]) is None
    assert verify_by_string("5", ["4", "x+1"]) is None
    assert verify_by_string("1,234", ["1235"]) is None  # it may be a list


def test_the_grammar_decides_the_rest():
    assert verify("\\boxed{(x+1)^2}", ["x^2+2x+1"], "math") == Verdict(True, "(x+1)^2", "symbolic")
    assert verify("\\boxed{\\frac{1}{}}", ["0.5"], "math") == Verdict(
        False, "\\frac{1}{}", "symbolic"
    )


def test_math_verify_decides_what_the_grammar_does_not_read():
    integral = ["\\int_0^1 2x\\,dx"]
    assert verify("\\boxed{1}", integral, "math").correct
    assert not verify("\\boxed{2}", integral, "math").correct


def test_what_is_left_to_be_worked_out_is_no_answer():
    assert not verify("\\boxed{\\int_0^1 2x\\,dx}", ["1"], "math").correct
    assert not verify("\\boxed{\\lim_{x\\to 0}\\frac{\\sin x}{x}}", ["1"], "math").correct
    assert verify("\\boxed{\\int_0^1 2x\\,dx = 1}", ["1"], "math").correct


def under_both_rules(gold: str, answer: str) -> tuple[bool, bool]:
    """Whether an answer is right (by default, by the protocol)."""
    text = f"\\boxed{{{answer}}}"
    return verify(text, [gold]).correct, verify(text, [gold], rules=LOOSE).correct


def test_the_protocol_is_loose_where_the_default_is_strict():
    loosely = (False, True)
    never = (False, False)
    check_table(
        under_both_rules,
        [
            ("\\pi", "3.14", loosely),
            ("\\frac{1}{3}", "0.3333", loosely),
            ("0.5", "50", loosely),
            ("50", "0.5", loosely),
            ("\\pi", "3", never),
            ("0.5", "0.6", never),
        ],
    )


def test_base_models_may_answer_without_a_box():
    check_table(
        lambda text, answer_from: verify(text, ["0"], rules=Rules(answer_from)).extracted,
        [
            ("So the answer is 42.", "boxed", ""),
            ("So the answer is 42.", "phrase", "42"),
            ("So the final answer is: $\\frac{1}{2}$.\nDone", "phrase", "$\\frac{1}{2}$"),
            ("First 17, then 42", "number", "42"),
            ("The answer is 7, since 9 > 8.", "number", "7, since 9 > 8"),
            ("the answer is 42, or \\boxed{43}", "number", "43"),
            ("<think>the answer is 42</think>", "number", ""),
        ],
    )


def test_reference_answers_may_come_in_a_box():
    check_table(
        gold_answer,
        [
            ("\\boxed{5}", "5"),
            ("5", "5"),
            ("so \\boxed{\\frac12}.", "\\frac12"),
            ("a box of 3", "a box of 3"),
        ],
    )


def test_rows_of_an_unsupported_task_are_refused():
    check_tasks(["math", "math"])
    with pytest.raises(ValueError, match="task 'code', which cannot be verified"):
        check_tasks(["math", "code"])


def test_the_cheap_half_loads_neither_sympy_nor_torch():
    code = (
        "import sys; from rlmath.workers.worker_pool import WorkerPool; from "
        "rlmath.answers.verifier import verify;"
        "verify('\\\\boxed{1}', ['1'], 'math');"
        "print({'sympy', 'torch', 'math_verify', 'mpmath'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert process.stdout.strip() == "set()"


def test_a_monstrous_reference_answer_stops_nobody():
    for gold in ("9" * 5000, "\\frac{" + "9" * 5000 + "}{3}", "9" * 30_000):
        assert verify("\\boxed{7}", [gold, "8"]).verdict in ("number", "symbolic"), gold[:20]
        assert verify("\\boxed{\\sqrt{49}}", [gold, "7"]).correct, gold[:20]
