"""The words, signs and commands of the grammar."""

from __future__ import annotations

from rlmath.answers.normalize import word_list, word_set

RELATIONS = {
    text: operator
    for operator, texts in {
        "=": "=",
        "<": "< \\lt",
        ">": "> \\gt",
        "<=": "\\le \\leq \\leqslant \\leqq",
        ">=": "\\ge \\geq \\geqslant \\geqq",
        "!=": "\\ne \\neq",
        "~": "\\approx \\simeq \\doteq",
        "in": "\\in",
        "==": "\\equiv",
    }.items()
    for text in texts.split()
}
FUNCTIONS = word_set(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp min max gcd lcm det floor "
    "ceil abs asin acos atan tg ctg arctg cis"
)
ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log"}
ALIASES |= {"tg": "tan", "ctg": "cot", "arctg": "arctan"}
CONSTANTS = {"pi": "pi", "e": "e", "i": "i", "infty": "inf", "infinity": "inf", "inf": "inf", "imath": "i"}
DROPPED = word_set(
    "\\mathit \\mathcal \\mathbf \\boldsymbol \\vec \\overrightarrow \\mathscr \\mathfrak \\bm \\hat "
    "\\widehat"
)
DECORATED = {"\\dot": "dot", "\\ddot": "ddot", "\\bar": "bar", "\\overline": "bar", "\\tilde": "tilde"}
LABELS = {"max": "max", "min": "min", "maximum": "max", "minimum": "min"}
LABELS |= {
    name: name
    for name in word_list(
        "mean median mode range length width height area perimeter volume quotient remainder "
        "vertex center radius diameter slope midpoint focus"
    )
}
"""Names of quantities that stand before their values: `maximum 5`."""
MODULUS = frozenset(("\\pmod", "\\bmod", "\\mod", "mod"))
CURRENCIES = frozenset(("\\dollar", "\\euro", "\\pound", "\\rupee", "\\yen"))
MULTIPLY = frozenset(("*", "\\times", "\\cdot", "\\ast"))
DIVIDE = frozenset(("/", "\\div"))
CLOSING = {"(": (")", "]"), "[": ("]", ")", "["), "]": ("[", "]")}
"""The closing brackets of a group, by its opening one."""
PLAIN_WORDS = word_set(
    "the not and or is are no of yes for any all but if to by in at as an it so we be do on not one two "
    "six ten"
)
UNEVALUATED = word_set("\\int \\iint \\iiint \\oint \\sum \\prod \\lim \\limsup \\liminf")
UNSUPPORTED = word_set(
    "\\sup \\inf  \\bmod \\mod \\stackrel \\overset \\underset \\substack \\to "
    "\\rightarrow \\mapsto \\cong \\sim \\propto \\perp \\parallel \\subset \\subseteq \\supset \\forall "
    "\\exists \\neg \\iff \\implies \\Rightarrow \\Leftrightarrow \\oplus \\prime \\aleph \\Re \\Im \\arg "
    "\\deg \\dim \\ker \\Pr \\notin \\mid \\triangle \\angle \\circ \\sinh"
)
SET_OPERATIONS = {"\\cup": "union", "\\bigcup": "union", "\\cap": "intersection"}
SET_OPERATIONS |= {"\\setminus": "without", "\\backslash": "without"}
FACTOR_COMMANDS = word_set(
    "\\frac \\sqrt \\binom \\tbinom \\dbinom \\lfloor \\lceil \\lvert \\hbar \\ell \\begin \\langle \\varphi "
    "\\varepsilon \\vartheta"
)
