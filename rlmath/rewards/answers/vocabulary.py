"""The words, signs and commands that the grammar knows."""

from __future__ import annotations

from rlmath.rewards.answers.normalize import word_set

RELATIONS = {
    "=": "=",
    "<": "<",
    ">": ">",
    "\\lt": "<",
    "\\gt": ">",
    "\\le": "<=",
    "\\leq": "<=",
    "\\leqslant": "<=",
    "\\leqq": "<=",
    "\\ge": ">=",
    "\\geq": ">=",
    "\\geqslant": ">=",
    "\\geqq": ">=",
    "\\ne": "!=",
    "\\neq": "!=",
    "\\approx": "~",
    "\\simeq": "~",
    "\\doteq": "~",
    "\\in": "in",
    "\\equiv": "==",
}

FUNCTIONS = word_set(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp min max gcd lcm det floor "
    "ceil abs asin acos atan"
)

ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log"}

CONSTANTS = {"pi": "pi", "e": "e", "i": "i", "infty": "inf", "infinity": "inf", "inf": "inf", "imath": "i"}

DROPPED = word_set(
    "\\mathit \\mathcal \\mathbf \\boldsymbol \\vec \\overrightarrow \\mathscr \\mathfrak \\bm \\hat "
    "\\widehat"
)

DECORATED = {"\\dot": "dot", "\\ddot": "ddot", "\\bar": "bar", "\\overline": "bar", "\\tilde": "tilde"}

CURRENCIES = frozenset(("\\dollar", "\\euro", "\\pound"))

MULTIPLY = frozenset(("*", "\\times", "\\cdot", "\\ast"))

DIVIDE = frozenset(("/", "\\div"))

CLOSING = {
    "(": (")", "]"),
    "[": ("]", ")"),
    "\\langle": ("\\rangle",),
    "]": ("[",),
    "\\lbrack": ("\\rbrack",),
}

PLAIN_WORDS = word_set(
    "the not and or is are no of yes for any all but if to by in at as an it so we be do on not one two "
    "six ten"
)

UNEVALUATED = word_set("\\int \\iint \\iiint \\oint \\sum \\prod \\lim \\limsup \\liminf")

CANNOT = word_set(
    "\\sup \\inf  \\bmod \\mod \\stackrel \\overset \\underset \\substack \\to "
    "\\rightarrow \\mapsto \\cong \\sim \\propto \\perp \\parallel \\subset \\subseteq \\supset \\forall "
    "\\exists \\neg \\iff \\implies \\Rightarrow \\Leftrightarrow \\oplus \\prime \\aleph \\Re \\Im \\arg "
    "\\deg \\dim \\ker \\Pr \\notin \\mid \\triangle \\angle \\circ \\sinh"
)

SET_OPERATIONS = {
    "\\cup": "union",
    "\\bigcup": "union",
    "\\cap": "intersection",
    "\\setminus": "without",
    "\\backslash": "without",
}

FACTOR_COMMANDS = word_set(
    "\\frac \\sqrt \\binom \\tbinom \\dbinom \\lfloor \\lceil \\lvert \\hbar \\ell \\begin \\varphi "
    "\\varepsilon \\vartheta"
)
