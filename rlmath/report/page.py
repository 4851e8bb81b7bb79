"""The page of a report: one HTML file that needs nothing else.

Text of others (names, settings, logs, what a model wrote) reaches the page in two ways: escaped in
HTML, or in a block of JSON in which `<`, `>` and `&` are written as escapes and that page.js sets
as text. A Content-Security-Policy lets no script run but the two of the page, by their hashes, and
nothing be loaded from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib import resources
from typing import Any

from rlmath.config.terminal import visible
from rlmath.report.accuracies import BEFORE, Accuracy, AccuracyRow, columns
from rlmath.report.metrics import Curve
from rlmath.report.panels import Section, sections
from rlmath.report.run_folder import Message, ShownRun
from rlmath.report.samples import number_of, text_of
from rlmath.report.settings import changed, differing, doc
from rlmath.telemetry.console import duration

SHOWN_WARNINGS = 3
"""Warnings that are no alerts and are not folded away."""
COMPARED = (
    "The same colour is the same run in all figures; several metrics of a run differ by "
    "their dashes."
)
ENDS = 10
"""First and last values are means of so many steps, or of as many as a third of the run has."""


def build_page(runs: Sequence[ShownRun], plotly_js: str, date: datetime) -> str:
    """The HTML.

    `plotly_js` is the library's source. Text is valid for UTF-8."""
    shown_sections = sections(runs)
    figures = [figure for section in shown_sections for figure in section.figures]
    page_js = _resource("page.js")
    title = f"{runs[0].label}: report of a run" if len(runs) == 1 else f"{len(runs)} runs compared"
    parts = [
        ("overview", "Overview", _overview(runs)),
        ("accuracies", "Before and after", _accuracies(runs)),
        *(
            (f"section-{number}", section.title, _section(section, figures))
            for number, section in enumerate(shown_sections)
        ),
        ("events", "Warnings and restarts", _events(runs)),
        ("settings", "Settings", _settings(runs)),
        ("samples", "Samples", _samples(runs)),
        ("notes", "Left out", _notes(runs)),
    ]
    parts = [part for part in parts if part[2]]
    menu = "".join(f'<li><a href="#{key}">{escape(name)}</a></li>' for key, name, _ in parts)
    body = "\n".join(
        f'<section id="{key}"><h2>{escape(name)}</h2>\n{content}\n</section>'
        for key, name, content in parts
    )
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_source_hash(plotly_js)} {_source_hash(page_js)}",
            "style-src 'unsafe-inline'",
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{escape(title)}</title>
<style>{_resource("page.css")}</style>
</head>
<body>
<header><h1>{escape(title)}</h1>
<p class="soft">{COMPARED if len(runs) > 1 else ""}</p></header>
<nav><ul>{menu}</ul></nav>
<main>
<noscript><p class="message alert">The figures and samples need JavaScript.</p></noscript>
{body}
</main>
<footer>Made by rlmath on {date:%Y-%m-%d %H:%M}. Curves of many points are thinned: of neighbouring steps their smallest
and largest value are drawn.</footer>
<script type="application/json" id="data">{_data(runs, figures)}</script>
<script>{plotly_js}</script>
<script>{page_js}</script>
</body>
</html>
"""


def json_for_html(value: Any) -> str:
    """JSON that can stand in a script element: no character in it can end the element.

    >>> json_for_html("</script><!--&")
    '"\\\\u003c/script\\\\u003e\\\\u003c!--\\\\u0026"'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def html_text(value: str) -> str:
    """Text of others, escaped for HTML.

    Control characters and those that turn the direction are visible.

    >>> html_text("<b>\\u202e")
    '&lt;b&gt;\\\\u202e'
    """
    return escape(visible(value))


def _resource(name: str) -> str:
    return resources.files("rlmath.report").joinpath(name).read_text(encoding="utf-8")


def _source_hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _data(runs: Sequence[ShownRun], figures: Sequence[dict[str, Any]]) -> str:
    """The data that page.js reads, as JSON."""
    return json_for_html(
        {
            "figures": figures,
            "markers": runs[0].events.markers if len(runs) == 1 else [],
            "samples": [{"label": run.label, "groups": run.samples} for run in runs],
        }
    )


# ---------------------------------------------------------------- figures at the beginning


@dataclass(frozen=True)
class Fact:
    name: str
    value: str
    note: str = ""
    is_bad: bool = False


def facts_of(run: ShownRun) -> Iterator[Fact]:
    """The facts that there are of status, steps, accuracy, reward, speed, time and layout."""
    message = text_of(run.exit_status.get("message"), 200) if run.has_failed else ""
    yield Fact("Status", run.status, message, is_bad=run.has_failed)
    planned = number_of(run.summary.get("steps"))
    planned_text = (
        f"of {planned:.0f}" if planned is not None and planned > run.metrics.last_step else ""
    )
    yield Fact("Steps", str(run.metrics.last_step), planned_text)
    yield from _from_to("Accuracy", run.metrics.curve("rollout/accuracy"), "completions")
    yield from _from_to(
        "Rewards above 0", run.metrics.curve("rollout/reward_positive"), "completions"
    )
    yield from _from_to("Reward", run.metrics.curve("task_reward"))
    yield from _from_to("Training loss", run.metrics.curve("train/loss"))
    validated = run.validation.curve("validation/accuracy")
    if validated.values:
        best = max(range(len(validated.values)), key=validated.values.__getitem__)
        last, first, best_value = (_percent(validated.values[place]) for place in (-1, 0, best))
        began = f"{first} before training" if validated.steps[0] == 0 else f"first {first}"
        details = f"of the answers; {began}, best {best_value} after step {validated.steps[best]}"
        yield Fact("Validation accuracy", last, details)
    held_out = run.metrics.curve("held_out/loss")
    if held_out.values:
        yield Fact("Held-out loss", f"{held_out.values[-1]:.4g}", f"first {held_out.values[0]:.4g}")
    speed = number_of(run.summary.get("tokens_per_second"))
    if speed is not None:
        yield Fact("Tokens per second", f"{speed:,.0f}", "over the whole training")
    steps = run.metrics.curve("seconds/step").values
    if steps:
        yield Fact("Seconds of a step", f"{statistics.median(steps):.3g}", "median")
    seconds = number_of(run.summary.get("seconds_total"))
    if seconds is None and steps:
        seconds = statistics.fmean(steps) * run.metrics.last_step
    if seconds:
        yield Fact("Time", duration(seconds), "all starts" if run.summary else "of the steps")
    layout = text_of(run.summary.get("layout"), 120)
    if layout:
        yield Fact("Layout", layout)


def _from_to(name: str, curve: Curve, shares_of: str = "") -> Iterator[Fact]:
    """The mean of the last steps, beside that of the first ones.

    `shares_of`: what the values are shares of."""
    if not curve.values:
        return
    count = max(1, min(ENDS, len(curve.values) // 3))
    form = _percent if shares_of else lambda value: f"{value:.4g}"
    last_mean = statistics.fmean(curve.values[-count:])
    first_mean = statistics.fmean(curve.values[:count])
    kind = f"of the {shares_of} " if shares_of else "mean " if count > 1 else ""
    details = f"{kind}in {_steps_text(curve.steps[-count:])}"
    if len(curve.values) > 1:
        details += f"; {form(first_mean)} in {_steps_text(curve.steps[:count])}"
    yield Fact(name, form(last_mean), details)


def _steps_text(steps: Sequence[int]) -> str:
    """The first and the last of steps.

    >>> _steps_text([51, 52, 60]), _steps_text([3])
    ('steps 51 to 60', 'step 3')
    """
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


# ---------------------------------------------------------------- parts of the page


def _overview(runs: Sequence[ShownRun]) -> str:
    """The facts of a run as cards, or those of several runs as a table."""
    if len(runs) == 1:
        card = '<div class="card"><dt>{}</dt><dd>{}</dd></div>'
        cards = "".join(card.format(escape(fact.name), _fact(fact)) for fact in facts_of(runs[0]))
        return f'<dl class="cards">{cards}</dl>'
    by_run = [{fact.name: fact for fact in facts_of(run)} for run in runs]
    names = dict.fromkeys(name for facts in by_run for name in facts)
    head = ["Run", *map(escape, names)]
    rows = [
        [_named(number, run), *(_fact(facts[name]) if name in facts else "" for name in names)]
        for number, (run, facts) in enumerate(zip(runs, by_run, strict=True))
    ]
    return _table(head, rows)


def _fact(fact: Fact) -> str:
    details = f' <span class="more soft small">{html_text(fact.note)}</span>' if fact.note else ""
    style = ' class="error-text"' if fact.is_bad else ""
    return f"<span{style}>{html_text(fact.value)}</span>{details}"


def _accuracies(runs: Sequence[ShownRun]) -> str:
    """Validations and evaluations of the model before training and of the run's models."""
    parts = [
        *_accuracy_table(
            "Validation",
            "Answers to the run's validation files.",
            runs,
            rows_by_run=[run.validated for run in runs],
        ),
        *_accuracy_table(
            "Evaluations", "By rlmath eval.", runs, rows_by_run=[run.evaluated for run in runs]
        ),
    ]
    without = [
        run
        for run in runs
        if run.metrics.curve("rollout/accuracy").values
        and not any(BEFORE in row.by_model for row in (*run.validated, *run.evaluated))
    ]
    if without:
        names = "" if len(runs) == 1 else f" of {', '.join(run.label for run in without)}"
        parts.append(
            f'<p class="soft small">No accuracy{html_text(names)} before training is known: '
            "validation.before_training measures it, or rlmath eval of the model that the run "
            "begins with.</p>"
        )
    return "\n".join(parts)


def _accuracy_table(
    title: str, about: str, runs: Sequence[ShownRun], rows_by_run: Sequence[Sequence[AccuracyRow]]
) -> Iterator[str]:
    """The table of accuracies; nothing where nothing was measured."""
    models = columns([row for rows in rows_by_run for row in rows])
    if not models:
        return
    yield (
        f"<h3>{title}</h3>"
        f'<p class="soft small">{about} Share of right ones, and its 95% interval over problems '
        "like these "
        "(Wilson).</p>"
    )
    with_changes = any(row.change for rows in rows_by_run for row in rows)
    named_run = ["Run"] if len(runs) > 1 else []
    head = [*named_run, "Problems", *(escape(visible(name).capitalize()) for name in models)]
    table = []
    for number, (run, rows) in enumerate(zip(runs, rows_by_run, strict=True)):
        for row in rows:
            how = (
                f'<span class="more soft small">{html_text(row.measure)}</span>'
                if row.measure
                else ""
            )
            cells = [_named(number, run)] if len(runs) > 1 else []
            cells.append(html_text(row.problems) + how)
            cells += [_accuracy(row.by_model.get(name)) for name in models]
            table.append([*cells, *([_change(row.change)] if with_changes else [])])
    yield _table([*head, *(["Change"] if with_changes else [])], table)


def _accuracy(accuracy: Accuracy | None) -> str:
    if accuracy is None:
        return ""
    step_text = f"after step {accuracy.step}" if accuracy.step else ""
    ends = "" if accuracy.interval is None else " to ".join(map(_percent, accuracy.interval))
    details = "; ".join(filter(None, (ends, step_text)))
    return f'{_percent(accuracy.value)} <span class="more soft small">{details}</span>'


def _change(change: Accuracy | None) -> str:
    """A change in percentage points, as HTML."""
    if change is None:
        return ""
    ends = (
        ""
        if change.interval is None
        else " to ".join(f"{100 * end:+.1f}" for end in change.interval)
    )
    return f'{100 * change.value:+.1f} <span class="more soft small">{ends}</span>'


def _section(section: Section, figures: Sequence[dict[str, Any]]) -> str:
    """The figures of a section as HTML; page.js draws them."""
    figure_parts = []
    for figure in section.figures:
        number = next(place for place, candidate in enumerate(figures) if candidate is figure)
        note = (
            f'<div class="soft small">{html_text(figure["note"])}</div>' if figure["note"] else ""
        )
        figure_parts.append(
            f"<figure><figcaption><h3>{html_text(figure['title'])}</h3>{note}</figcaption>"
            f'<div class="plot" data-figure="{number}"></div></figure>'
        )
    zero = f'<p class="soft small">0 in every step: {escape(", ".join(section.zero))}.</p>'
    return f'<div class="grid">{"".join(figure_parts)}</div>{zero if section.zero else ""}'


def _events(runs: Sequence[ShownRun]) -> str:
    """Messages of the runs as HTML, under a run's label where there are several."""
    parts = []
    for run in runs:
        messages = [*_messages(run.events.messages)]
        if messages and len(runs) > 1:
            parts.append(f"<h3>{html_text(run.label)}</h3>")
        parts += messages
    return "\n".join(parts)


def _messages(messages: Sequence[Message]) -> Iterable[str]:
    """Messages as HTML: errors, alerts, rollbacks and restarts, then warnings.

    Warnings are folded away where they are many."""
    grave = [message for message in messages if message.kind != "warning"]
    warnings = [message for message in messages if message.kind == "warning"]
    yield from map(_message, grave)
    if len(warnings) <= SHOWN_WARNINGS:
        yield from map(_message, warnings)
    else:
        inside = "".join(map(_message, warnings))
        yield f"<details><summary>{len(warnings)} different warnings</summary>{inside}</details>"


def _message(message: Message) -> str:
    """A message as HTML."""
    places = ", ".join(message.steps) + (", ..." if message.count > len(message.steps) == 8 else "")
    often = f", {message.count} times" if message.count > 1 else ""
    return (
        f'<div class="message {message.kind}"><div class="where">{message.kind.capitalize()}, '
        f"{html_text(places)}{often}, "
        f"first at {html_text(message.time)}</div><p>{html_text(message.text)}</p></div>"
    )


def _settings(runs: Sequence[ShownRun]) -> str:
    """The table of a run's changed settings, or of those in which runs differ."""
    if len(runs) == 1:
        values_by_key: Mapping[str, Sequence[str]] = changed(runs[0].settings)
        heads = ["Value", "Default"]
        caption = "Settings that are not at their defaults."
        nothing = ""
    else:
        values_by_key = differing([run.settings for run in runs])
        heads = [_named(number, run) for number, run in enumerate(runs)]
        caption = "Settings in which the runs differ."
        nothing = "<p>The runs have the same settings, as far as they can be read.</p>"
    rows = [
        [f'<span title="{html_text(doc(key))}">{html_text(key)}</span>', *map(html_text, values)]
        for key, values in values_by_key.items()
    ]
    table = f'<p class="soft">{caption}</p>{_table(["Setting", *heads], rows, keys=True)}'
    return table if rows else nothing


def _named(number: int, run: ShownRun) -> str:
    """A run's name beside its colour."""
    return f'<span class="swatch" data-color="{number}"></span>{html_text(run.label)}'


def _samples(runs: Sequence[ShownRun]) -> str:
    """The place in which page.js shows samples; nothing where there are none."""
    if not any(run.samples for run in runs):
        return ""
    return (
        '<p class="soft">Groups that the run kept: the prompt, and what the model wrote, with '
        "rewards and advantages. "
        "Characters that show nothing or turn the direction are written as escapes.</p>"
        '<div id="browser"></div>'
    )


def _notes(runs: Sequence[ShownRun]) -> str:
    items = [
        f"<li>{html_text(run.label + ': ' if len(runs) > 1 else '')}{html_text(note)}</li>"
        for run in runs
        for note in run.notes
    ]
    return f'<ul class="small">{"".join(items)}</ul>' if items else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], keys: bool = False) -> str:
    """A table of cells in HTML.

    With `keys` the first column holds settings."""
    heads = "".join(f"<th>{title}</th>" for title in head)
    first_attribute = ' class="key"' if keys else ""
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{first_attribute if not place else ''}>{cell}</td>"
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="box"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
