"""Finds the final answer in a completion, in one pass: the last box, with those joined to it."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from rlmath.answers.normalize import word_set

_GROUP = r"\s?\{(?:[^{}]|\{[^{}]{0,100}\}){0,200}\}"
_UNBRACED = (
    r"[+-]?(?:[0-9][0-9,]{0,60}(?:\.[0-9]{1,60})?(?:/[0-9]{1,60})?|[A-Za-z](?![A-Za-z])"
    rf"|\\[dt]?frac(?:{_GROUP}{_GROUP}|\s?[0-9]{{2}})|\\sqrt(?:{_GROUP}|\s?[0-9])|\\pi(?![A-Za-z]))"
)
"""Contents that may follow `\\boxed` without braces: a number, a letter, a fraction or a root."""
_BRACES = re.compile(
    rf"\\f?box(?:ed)?\s*\{{|\\boxed(?:\s{{1,3}}|(?=\\))(?P<unbraced>{_UNBRACED})"
    r"|\\(?!\\?f?boxe?d?)[\s\S]|[{}]"
)
"""The start of a box, a box without braces, an escaped character (never a brace), or a brace."""
_BOX = re.compile(r"\\f?box")
"""Braces before the first box tell nothing of it."""
_LAYOUT = re.compile(
    r"\\[()\[\],;:! ]|\\q?quad(?![A-Za-z])|\\(?:text|textbf|mbox|mathrm)\s?\{|[$(){}*~\s]"
)
_JOINER = re.compile(
    r"(?P<word>[,;]|[,;]?\s?(?:and also|as well as|and|or|or else)|=|\\approx|≈)?"
    r"\s?(?P<label>[A-Za-z](?:_ ?[A-Za-z0-9]{1,9})? ?=)?"
)
"""Joiners of two boxes, without their layout: `, `, `or`, `and y =`."""
_BULLET = re.compile(r"[-•]|[b-h]|[2-9][.]?|i{2,3}")
_LABEL = re.compile(
    r"(?:^|(?<=[\s$(,;:]))([A-Za-z](?:_(?:[A-Za-z0-9]|\{[A-Za-z0-9]{1,9}\}))?)\s{0,3}=[\s$]{0,3}$"
)
_PART = re.compile(
    r"(?:\b[Pp]art\s?)?\((?:[b-h]|i{2,3}|iv|[2-6])\)|\b[Pp]art\s[B-Hb-h2-6][:.)]?|"
    r"(?<![(A-Za-z])[b-h]\)"
)
"""The label of a further part: `(b)`, `Part B:`."""
_NEXT_PART = ", "
"""The joiner of parts with labels or bullets; two of them may be the same."""
NAMED_BEFORE = " := "
"""Separator between the function that is named before a box and the content: `f(n) := n+1`."""
_FUNCTION = re.compile(
    r"(?:^|(?<=[\s$(,;:\[]))([A-Za-z]\(([a-z])\)|[a-z]_\{?([a-z])\}?)\s{0,3}=[\s$]{0,3}$"
)
_LETTERS = r"\$?[a-dkm]\$?(?:(?:, ?| and |, and )\$?[a-dkm]\$?){0,3}"
_REAL_LETTERS = r"([a-d], ?[a-d]) ?\\in ?\\mathbb\{R\}"
DECLARED = re.compile(
    rf" for arbitrary constants ({_LETTERS})$|[,\s] ?(?:\\q?quad)? ?\(?{_REAL_LETTERS}\)?$"
)
"""Letters that an answer declares as arbitrary, at its end."""
_CONSTANTS = re.compile(
    rf"\$?,? ?(?:for|where|with) (?:any |all |some )?(?:(?:arbitrary|real|arbitrary real) constants? ({_LETTERS})"
    rf"|({_LETTERS}) (?:is|are|being) (?:an? |any )?(?:arbitrary|real|arbitrary real) constants?)"
    rf"|\$?,? ?(?:for|where|with) ({_LETTERS}) ?\\in ?\\mathbb\{{R\}}"
)
ALL_BOXES = " [boxes: "
"""Separator before the contents of several boxes with text between, which follow the last box's:
`7 [boxes: 3; 7]`."""
_BOX_END = "]"
BOX_SEPARATOR = "; "
_OTHER_PURPOSE = re.compile(
    r"\b(?:wait|actually|no|instead|but|correct(?:ion|ed|ing)?|incorrect|mistake|however|sorry|"
    r"hmm+|(?:re|double.?)?check"
    r"(?:ing|ed)?|rather|not|wrong|maybe|perhaps|forgot|error|again|restate|final(?:ly)?|answer|"
    r"therefore|thus|hence|so"
    r"|altogether|total|asked|intermediate|lemma|reject(?:ed|ing)?|extraneous|invalid|"
    r"discard(?:ed|ing)?|impossible"
    r"|guess|attempt|initially|unless|except|verify|substitut\w{1,5}|equivalently|simplif\w{1,6}|"
    r"i\.e)\b",
    re.IGNORECASE,
)
"""Words between two boxes of which the first is taken back, or only leads to the second."""
_TAKEN_BACK = re.compile(
    r"\b(?:can ?not|\w{2,6}n['’]t|fail(?:s|ed|ing)?|violat\w{1,4}|leav(?:es?|ing)|exclud\w{1,4}|"
    r"contradict\w{0,7}|not"
    r"|never|neither|nor|without|reject\w{0,3}|extraneous|invalid|inadmissible|discard\w{0,3}|"
    r"impossible|incorrect\w{0,2}|wrong"
    r"|false|mistake|outside|ignor\w{1,3}|eliminat\w{1,3}|rul(?:es?|ed|ing) out|except|unless|"
    r"instead)\b"
    r"|\\n(?:eq?|ot)(?![a-zA-Z])|≠",
    re.IGNORECASE,
)
"""Words beside a box that is not part of the answer."""
_BESIDE_SOLUTIONS = word_set(
    "a an and also another are at by case cases coordinate else equal equals find first for "
    "fourth from get give "
    "gives giving greater has have ii iii in is it its iv larger lesser of on one or other part "
    "parts possibility "
    "possible respectively root roots second similarly smaller solution solutions the third to "
    "two value values "
    "variable we when whereas while with yield yielding yields zero zeros"
)
"""All words that may be between two boxes that are both part of the answer, beside the names of
quantities."""
_QUANTITY = re.compile(
    r"(?<=\b(?:the|its) )(?!result|rest|truth|conclusion|actual|final)[a-z]{2,20}(?= (?:is|are|of|"
    r"equals)\b)",
    re.I,
)
_WORDS = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{2,}")
_OTHER_SOLUTION = re.compile(
    r"\b(?:first|other|second|another|third) (?:possible )?(?:root|solution|zero|possibility)\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{3}")
_LONGEST_TEXT_BETWEEN = 250
_LONGEST_ALL = 500
_SENTENCE_END = re.compile(r"[.!?]\s|\n")
_LONGEST_JOINER = 60
_MOST_JOINED = 32
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_PHRASE = re.compile(r"\b(?:final\s+)?answer\s*(?:is|:|=)\s*:?\s*", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![A-Za-z0-9_.])-?[0-9][0-9,]{0,60}(?:\.[0-9]{1,60})?(?:/[0-9]{1,60})?%?")
_PHRASE_END = re.compile(r"\.(?:\s|$)|\n|<")
_TAIL_CHARS = 2000
"""Longest answer after "the answer is" (characters)."""


def final_part(text: str) -> str:
    """The text after the thinking section.

    It is all of the text without thinking tags, and nothing if the section is not closed.

    >>> final_part("<think>is it 3? no</think> It is 4.")
    ' It is 4.'
    """
    _, closed, after = text.rpartition("</think>")
    opened = after.find("<think>")
    if opened >= 0:
        return after[:opened]
    return after if closed else text


def extract_answer(text: str, answer_from: str = "boxed") -> str | None:
    """The final answer, None if there is none.

    "boxed": the content of the last complete box or `<answer>` tag, whichever ends last. "phrase":
    without these, the text after the last "the answer is". "number": without that too, the last
    number, for base models that write no boxes yet. The contents of boxes with text between follow
    it (`ALL_BOXES`).
    """
    part = final_part(text)
    answer = _boxed_or_tagged(part)
    if answer is None and answer_from in ("phrase", "number"):
        answer = _after_phrase(part)
    if answer is None and answer_from == "number":
        last = _last_match(_NUMBER, part[-20 * _TAIL_CHARS :])
        answer = last.group().rstrip(",") if last else None
    return answer


def has_box(text: str) -> bool:
    """Whether the final part has a complete box."""
    return extract_boxed(final_part(text)) is not None


def _boxed_or_tagged(part: str) -> str | None:
    """The content of the last boxes or `<answer>` tag, whichever ends last; None without any."""
    boxes = _complete_boxes(part)
    tagged = _last_tag(part) if "<answer>" in part.lower() else None
    if tagged is not None and (not boxes or boxes[-1].end <= tagged[1]):
        inside = extract_boxed(tagged[0])
        return (inside if inside is not None else tagged[0]).replace(ALL_BOXES, " ")
    if not boxes or not boxes[-1].content.strip():
        return boxes[-1].content if boxes else None
    answer, first = _joined(part, boxes)
    answer = answer.replace(ALL_BOXES, " ")
    apart = _boxes_apart(part, list(boxes)) if first is boxes[-1] and len(boxes) > 1 else None
    if apart is None:
        return answer
    all_contents, are_solutions = apart
    return all_contents if are_solutions else f"{answer}{ALL_BOXES}{all_contents}{_BOX_END}"


def split_boxes(answer: str) -> tuple[str, str]:
    """(the answer, the contents of all boxes or "") of what `extract_answer` gives."""
    answer, _, all_contents = answer.partition(ALL_BOXES)
    return answer, all_contents.removesuffix(_BOX_END)


def _boxes_apart(text: str, boxes: list[_Box]) -> tuple[str, bool] | None:
    """(contents of the last box and those before it with text between, whether they are solutions).

    The contents are as in `3; 7`; the second says whether the text between calls them several
    solutions. None if there are no such boxes, or if that text or what follows takes one of them
    back."""
    apart = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        text_between = text[box.end : apart[0].start]
        in_words = len(text_between) <= _LONGEST_TEXT_BETWEEN and _WORD.search(text_between)
        if not in_words or not _only_leads_on(text_between):
            break
        apart.insert(0, box)
    if len(apart) < 2:
        return None
    text_after = text[apart[-1].end : apart[-1].end + _LONGEST_TEXT_BETWEEN]
    sentence_before = _SENTENCE_END.split(
        text[max(0, apart[0].start - _LONGEST_TEXT_BETWEEN) : apart[0].start]
    )[-1]
    if (
        _OTHER_PURPOSE.search(text_after)
        or _TAKEN_BACK.search(text_after)
        or _TAKEN_BACK.search(sentence_before)
    ):
        return None
    contents = [
        ("" if "=" in box.content else _label(text, box)) + box.content.strip() for box in apart
    ]
    all_contents = BOX_SEPARATOR.join(contents)
    if (
        len(all_contents) > _LONGEST_ALL
        or ALL_BOXES in all_contents
        or not all(box.content.strip() for box in apart)
    ):
        return None
    return all_contents, _OTHER_SOLUTION.search(text, apart[0].end, apart[-1].start) is not None


def _only_leads_on(between: str) -> bool:
    """Whether a text between two boxes does nothing but to name the second one."""
    if _OTHER_PURPOSE.search(between) or _TAKEN_BACK.search(between):
        return False
    words = _WORDS.findall(_QUANTITY.sub("", " ".join(_LAYOUT.sub(" ", between).split())))
    return all(word.lower() in _BESIDE_SOLUTIONS for word in words)


def extract_boxed(text: str) -> str | None:
    """The content of the last complete \\boxed{...}, of nested boxes the innermost.

    Boxes that a comma, "and" or "or" joins to it are included. Linear in the text.

    >>> extract_boxed("\\\\boxed{1}. So \\\\boxed{2} or $x = \\\\boxed{4}$, not \\\\boxed{3")
    '2 or x=4'
    """
    boxes = _complete_boxes(text)
    return _joined(text, boxes)[0] if boxes else None


@dataclass(frozen=True)
class _Box:
    """A box in a text."""

    start: int
    """Position at which its command begins."""
    content: str
    end: int
    """Position after its closing brace."""


def _joined(text: str, boxes: deque[_Box]) -> tuple[str, _Box]:
    """(contents of the last box and of those that are joined to it, the first of these)."""
    answer = boxes[-1].content
    next_box = boxes[-1]
    parts = {answer.strip()}
    next_label = ""
    for box in list(boxes)[-2::-1]:
        text_between = text[box.end : next_box.start]
        joiner = (
            _joiner(text_between)
            if len(text_between) <= _LONGEST_JOINER and box.content.strip()
            else None
        )
        label = _part_label(text_between) if joiner == _NEXT_PART else ""
        if joiner is None or (next_label and label >= next_label):
            break
        next_label = label
        labelled = _label(text, next_box)
        if box.content.strip() not in parts or labelled or joiner == _NEXT_PART:
            parts.add(box.content.strip())
            answer = f"{box.content}{joiner}{labelled}{answer}"
        next_box = box
    if next_box is not boxes[-1] and "=" not in next_box.content:
        answer = _label(text, next_box) + answer
    return (_in_context(text, boxes[-1]) if next_box is boxes[-1] else answer), next_box


def _in_context(text: str, box: _Box) -> str:
    """A box's content with the function before it, or the constants that are declared after it."""
    answer = box.content
    text_after = text[box.end : box.end + 60]
    if ("constant" in text_after or "\\in" in text_after) and (
        match := _CONSTANTS.match(text, box.end)
    ):
        answer = f"{answer} for arbitrary constants {match[1] or match[2] or match[3]}"
    function_match = (
        _FUNCTION.search(text, max(0, box.start - 20), box.start)
        if "=" in text[box.start - 5 : box.start]
        else None
    )
    if function_match is not None and "=" not in answer:
        letter = re.compile(rf"(?<![A-Za-z\\]){function_match[2] or function_match[3]}(?![A-Za-z])")
        text_before = text[max(0, box.start - 60) : function_match.start()].rstrip()
        if letter.search(box.content) and not text_before.endswith(tuple("+-*/^=")):
            return f"{function_match[1]}{NAMED_BEFORE}{answer}"
    return answer


def _complete_boxes(text: str) -> deque[_Box]:
    """The last boxes that are closed and hold no other box, in their order."""
    first = _BOX.search(text)
    if first is None:
        return deque()
    # For each open brace the starts of its box and of the content, None if it opens no box.
    open_braces: list[tuple[int, int] | None] = []
    boxes: deque[_Box] = deque(maxlen=_MOST_JOINED)
    for match in _BRACES.finditer(text, first.start()):
        token = match.group()
        if match["unbraced"]:
            boxes.append(_Box(match.start(), match["unbraced"], match.end()))
        elif token == "{":
            open_braces.append(None)
        elif token.endswith("{") and len(token) > 2:
            open_braces.append((match.start(), match.end()))
        elif token == "}" and open_braces:
            opened = open_braces.pop()
            if opened is not None and not (boxes and boxes[-1].start > opened[0]):
                boxes.append(_Box(opened[0], text[opened[1] : match.start()], match.end()))
    return boxes


def _joiner(between: str) -> str | None:
    """The joiner of two boxes with this text between; None if they are not parts of one answer."""
    labelled = _PART.sub(" ", between, count=1)
    if labelled != between and " ".join(_LAYOUT.sub(" ", labelled).split()).strip(" .,;:") in (
        "",
        "and",
    ):
        return _NEXT_PART
    plain = " ".join(_LAYOUT.sub(" ", between).split())
    on_new_line = "\n" in between
    if on_new_line and _BULLET.fullmatch(plain):
        return _NEXT_PART
    match = _JOINER.fullmatch(plain)
    if match is None or (on_new_line and not plain):
        return None
    return f" {match['word'] or ','} "


def _part_label(between: str) -> str:
    """The `b` of `(b)`, by which labels are in order; "" where there is none."""
    part = _PART.search(between)
    return "" if part is None else re.sub(r"(?i)part|[^a-z0-9]", "", part.group()).lower()


def _label(text: str, box: _Box) -> str:
    """`x=` where it is written before a box, else ""."""
    match = _LABEL.search(text, max(0, box.start - 30), box.start)
    text_before = text[max(0, box.start - 60) : match.start()].rstrip() if match else "="
    return "" if text_before.endswith(tuple("+-*/^=")) or match is None else f"{match[1]}="


def _last_tag(part: str) -> tuple[str, int] | None:
    """(content of the last complete <answer>...</answer>, where it ends)."""
    start = None
    best = None
    for match in _TAG.finditer(part):
        if match.group(1):
            if start is not None:
                best = (part[start : match.start()].strip(), match.start())
            start = None
        else:
            start = match.end()
    return best


def _after_phrase(part: str) -> str | None:
    """The text after the last "the answer is", up to the end of its sentence; None without it."""
    last = _last_match(_PHRASE, part)
    if last is None:
        return None
    tail = part[last.end() : last.end() + _TAIL_CHARS]
    end = _PHRASE_END.search(tail)
    answer = (
        (tail[: end.start()] if end else tail).replace(ALL_BOXES, " ").strip().strip("*").strip()
    )
    return answer or None


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)
