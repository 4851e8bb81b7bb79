"""Completions that attack the verifier.

They try to run code, to hang it, to fill memory, or to be rewarded for nothing. MARKER stands for
a file that a successful attack would make."""

from __future__ import annotations

MARKER = "@MARKER@"

SOLUTIONS = ("\\boxed{\\frac{1}{2}}", "\\sqrt{2}", "x^2+1")
"""What the attacks claim to answer: they make every comparison go as deep as it can."""


def boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


_TOUCH = f"__import__('os').system('touch {MARKER}')"

CODE = [
    _TOUCH,
    f"\\text{{{_TOUCH}}}",
    f"\\frac{{1}}{{2}} + {_TOUCH}",
    f'eval("{_TOUCH}")',
    f"exec(\"open('{MARKER}', 'w')\")",
    f"open('{MARKER}', 'w').write('x')",
    "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen'][0](['touch', "
    f"'{MARKER}'])",
    f"lambda: {_TOUCH}",
    f'sympify("{_TOUCH}")',
    f"\\operatorname{{eval}}({_TOUCH})",
    f"\\sum_{{k=1}}^{{3}} {_TOUCH}",
    f"\\int_0^1 {_TOUCH} dx",
    f"x = {_TOUCH}",
    f"\\begin{{pmatrix}} {_TOUCH} \\end{{pmatrix}}",
    f"{{{_TOUCH}}}",
    f"$(touch {MARKER})",
    f"`touch {MARKER}`",
    f"\\write18{{touch {MARKER}}}",
    f"\\input{{{MARKER}}}",
    f"!!python/object/apply:os.system ['touch {MARKER}']",
    f"\\lim_{{x \\to 0}} {_TOUCH}",
    "{0.__class__}",
    "%(foo)s%n%s%s%s",
]
"""Each tries to run code through a parser."""

HEAVY = [
    "\\sum_{n=1}^{10^9} \\sin(n^2)",
    "\\prod_{k=1}^{10^8} k^k",
    "\\lim_{n \\to \\infty} n^{n^n}",
    "\\sum_{a=1}^{9} " * 60 + "1",
    "9^{9^{9}}",
    "10^{10^{10^{10}}}",
    "2^{2^{2^{2^{2^{2}}}}}",
    "(" * 20 + "9" + "^{99})" * 20,
    "1000000!",
    "((9!)!)!",
    "99999999999999!",
    "\\binom{10^{9}}{5\\cdot 10^{8}}",
    "3^{10^8}",
    "1" + "0" * 900,
    "0." + "3" * 900,
    "1e999999",
    "1e-999999",
    "\\frac{1}{10^{10^{10}}}",
    "e^{e^{e^{e^{e}}}}",
    "\\sin(10^{10^{10}})",
    "\\log_{1} 5",
    "\\frac{1}{0}",
    "0^0 + 0^{-1}",
    "x^{x^{x^{x^{x^{x}}}}}",
    "(1+x)^{100000}",
    "\\lfloor 10^{10^{9}} \\rfloor",
    "\\gcd(10^{10^{9}}, 3)",
    "(a+b+c+d+e+f+g+h)^{50}",
    "+".join(f"x_{{{n}}}^{n}" for n in range(80)),
    "\\sqrt{" * 120 + "2" + "}" * 120,
    "\\frac{1}{" * 100 + "2" + "}" * 100,
    "(" * 450 + "2" + ")" * 450,
    "{" * 450 + "2" + "}" * 450,
    "-" * 900 + "1",
    "|" * 500 + "x" + "|" * 400,
    "\\{" * 200 + "1" + "\\}" * 200,
    "2" + "^2" * 400,
    "2" + "!" * 500,
    "1" + ",1" * 490,
    "1" + "\\pm 1" * 150,
    "\\pm" * 300 + "1",
    "x" + "'" * 900,
    "1=" * 450 + "1",
    "x<" * 300 + "5",
    "(0,1)" + "\\cup(0,1)" * 100,
    "a" * 990,
    "a " * 490,
    "1 " * 490,
    "1,234" * 150,
    "\\text{" * 160 + "x" + "}" * 160,
    "\\overline{" * 90 + "3" + "}" * 90,
    "5" + " \\text{m}" * 100,
    "0.\\overline{" + "9" * 900 + "}",
    "0." + "12" * 400 + "...",
    "\\begin{pmatrix}" + "1&" * 300 + "1\\end{pmatrix}",
    "\\begin{pmatrix}" * 50,
    "\\left" * 190,
    "\\\\" * 490,
    "\\" * 999,
    "$" * 999,
    "_" * 999,
    "^" * 999,
    "{,}" * 300,
    "(" * 999,
    "\\sqrt[" * 160,
    "one " * 240,
    "one-" * 240 + "half",
    "\\text{" + "twenty-one and " * 60 + "a half}",
    "minus " * 150 + "one",
    "k" + ", k integer" * 90,
    "5k+2" + " for any integer k" * 50,
    "1" + " (the smallest one)" * 50,
    "1 (" * 300 + "the one" + ")" * 300,
    "1 " + "\\pmod{5}" * 100,
    "x \\equiv " + ",".join(map(str, range(1, 180))) + " \\pmod{9973}",
    " or ".join(f"x \\equiv 1 \\pmod{{{n}}}" for n in range(1, 45)),
    "\\begin{aligned}" * 60,
    "\\begin{aligned}" + "x&=1\\\\ " * 100 + "\\end{aligned}",
    "\\begin{cases}" * 20 + "1" + "\\end{cases}" * 20,
    "x=y=" * 200 + "0",
    "C_1 + C_2 + C_3 + C_4 + C_5 + C_6",
    "x=1 m" + ", x=1 m" * 110,
    "all integers " * 70,
    "((((((((((((((((((((x+1)^2+1)^2+1)^2+1)^2+1)^2+1)^2+1)^2+1)^2+1)^2+1)^2+1)^2+1)^2+1)^2+1)^2+1)^2+1)^2+1)^2+1)^2+1)",
]
"""Answers that are heavy for some parser or evaluator.

Ours decides at once, or hands on what is harmless."""

HANG_SOLUTIONS = ("\\int_0^1 3x^2 dx",)


def hanging(number: int) -> str:
    """One of many answers that only math-verify reads, and on which sympy works for minutes."""
    return (
        f"\\int_0^1 \\frac{{\\sin(x^{{x^x}})+\\cos(\\ln(x+{number + 1}))}}"
        f"{{e^{{x^x}}+\\tan(x+{number + 1})}} dx"
    )


HANGING = [hanging(0), "\\int_0^{\\infty} e^{-x^x} dx"]

TEXTS = [
    "\\boxed{" * 10_000,
    "\\boxed{" * 10_000 + "1" + "}" * 10_000,
    boxed("(" * 10_000 + "1" + ")" * 10_000),
    boxed("\\frac{" * 10_000 + "1"),
    "a" * 1_000_000,
    boxed("7" * 1_000_000),
    "7" * 1_000_000,
    boxed("x" * 1_000_000),
    "\\boxed" + " " * 1_000_000 + "{3",
    "{" * 1_000_000,
    "}" * 1_000_000 + boxed("3"),
    "<think>" * 100_000 + boxed("\\frac12"),
    "</think>" * 100_000 + "<think>" + boxed("\\frac12"),
    "<answer>" * 100_000 + boxed("3"),
    "the answer is " * 70_000,
    "\\" * 1_000_000,
    boxed("\x00"),
    boxed("\\frac{1}{2}\x00"),
    boxed("\x00\\frac{1}{2}"),
    boxed("\ud800"),
    boxed("\\frac{1}{2}\udfff"),
    boxed("\u202e\\frac{2}{1}"),
    boxed("٣/٦"),
    boxed("\\frac{1}{2} or \\sqrt{3}"),
    boxed("one half or one third"),
    boxed("\\frac{1}{2} (or one third)"),
    boxed("\\frac{1}{2}") + " or " + boxed("\\frac{1}{3}"),
    boxed("\\sqrt{3}") + ", " + boxed("\\sqrt{2}"),
    ", ".join(boxed(f"\\frac{{{n}}}{{2}}") for n in range(40)),
    (boxed("\\frac{1}{3}") + " and ") * 50_000 + boxed("\\frac{1}{2}"),
    "\\boxed " * 200_000,
    "\\boxed\\frac{" * 100_000,
    boxed("\\frac{1}{2}, \\sqrt{2}, x^2+1"),
    boxed("\\text{any of the solutions}"),
    boxed(""),
    boxed("{"),
    boxed("}"),
]
"""Whole completions."""

QUICK = [boxed(answer) for answer in (*CODE, *HEAVY)] + TEXTS
HANGS = [boxed(answer) for answer in HANGING]
