"""Cases of a test as lines of text."""


def rows(table: str) -> list[tuple[list[str], str]]:
    """(words, text) of every row "word word: text"; an indented line goes on with the row above."""
    lines = table.strip().replace("\n    ", " ").split("\n")
    return [(words.split(), text) for words, _, text in (line.partition(": ") for line in lines)]
