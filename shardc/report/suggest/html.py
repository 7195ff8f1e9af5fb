"""Suggested plans as one page for a browser, which needs no network and runs no script.

It has a table, a picture of the candidates with the frontier of time and memory, and the Python, reasons and hints of
each plan. ``page/`` has the template and styles; colours and type are those of the report of a program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from shardc.language.text import bytes_text, printable, seconds_text
from shardc.report.dump.page_file import filled, hash_of, page_file
from shardc.report.suggest.picture import picture
from shardc.report.suggest.records import Suggested, SuggestionEntry, machine_text, mesh_text, options_text
from shardc.report.suggest.text import facts_of

HERE = "shardc.report.suggest"
POLICY = "default-src 'none'; img-src data:; style-src '{style}'; base-uri 'none'; form-action 'none'"
SHARED_STYLES = ("theme.css", "frame.css", "parts.css", "screen.css")
COLUMNS = ("rank", "mesh", "options", "step", "computing", "exposed", "bubble", "peak", "of memory", "sent")
MEMORY = ("parameters", "gradients", "optimizer", "saved", "gathered")
CAPTION = """\
Every dot is a plan that the search priced: the time of a step and the peak of a rank's memory; hover for its mesh and
options. On the line are the plans for which no other is both faster and smaller. Numbered are the suggestions."""


def suggested_page(suggested: Suggested) -> str:
    """The page of the suggestions."""
    style = "".join([*map(page_file, SHARED_STYLES), page_file("suggest.css", HERE)])
    plans = [_plan(number, each, suggested.memory) for number, each in enumerate(suggested.suggestions, 1)]
    contents = {
        "policy": POLICY.format(style=hash_of(style)),
        "title": _text(f"Plans for {suggested.model} on {machine_text(suggested).split(',')[0]}"),
        "style": style,
        "facts": "\n".join(_fact(each) for each in facts_of(suggested)),
        "table": _table(suggested),
        "caption": _text(CAPTION),
        "picture": picture(suggested),
        "plans": "\n".join(plans),
    }
    return filled(page_file("page.html", HERE), contents)


def _text(text: str) -> str:
    """The text with all markup escaped."""
    return escape(printable(text, keep="\n"))


def _fact(sentence: str) -> str:
    is_alarm = sentence.startswith("No plan fits")
    return f'<p class="fact{" alarm" * is_alarm}">{_text(sentence)}</p>'


def _table(suggested: Suggested) -> str:
    rows = (_row(number, each, suggested.memory) for number, each in enumerate(suggested.suggestions, 1))
    head = "".join(f'<th scope="col"{_class(name)}>{name}</th>' for name in COLUMNS)
    return (
        '<div class="scroll" tabindex="0" aria-label="suggestions, a table"><table id="suggestions-table">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(number: int, plan: SuggestionEntry, limit: int | None) -> str:
    times = (plan.seconds.step, plan.seconds.computing, plan.seconds.exposed, plan.seconds.bubble)
    cells = [
        f'<a href="#plan-{number}">{number}</a>', _text(mesh_text(plan)), _text(options_text(plan)),
        *map(seconds_text, times), bytes_text(plan.memory.peak), _of_limit(plan, limit), bytes_text(plan.wire_bytes),
    ]  # fmt: skip
    keyed = zip(COLUMNS, cells, strict=True)
    return "<tr>" + "".join(f'<td data-key="{name}"{_class(name)}>{cell}</td>' for name, cell in keyed) + "</tr>"


def _class(name: str) -> str:
    kind = {"mesh": "mesh", "options": ""}.get(name, "number")
    return f' class="{kind}"' if kind else ""


def _of_limit(plan: SuggestionEntry, limit: int | None) -> str:
    if limit is None:
        return "no limit"
    excess = f'; <b class="alarm">{bytes_text(plan.excess)} too much</b>' if plan.excess else ""
    return f"{plan.memory.peak / limit:.0%}{excess}"


def _plan(number: int, plan: SuggestionEntry, limit: int | None) -> str:
    """The card of a plan: its time and memory in parts, its Python, reasons and hints."""
    options = f", {_text(options_text(plan))}" if options_text(plan) else ""
    links = ", ".join(f"{name} over {link}" for name, link in plan.links.items())
    times = [(name, getattr(plan.seconds, name)) for name in ("computing", "exposed", "bubble")]
    classes = [(name, float(getattr(plan.memory, name))) for name in MEMORY]
    if plan.memory.offloaded is not None:  # of the first three, only copies of parameters are on the device
        stored = sum(nbytes for _, nbytes in classes[:3])
        classes = [("parameters", stored - plan.memory.offloaded), *classes[3:]]
    step = f"{seconds_text(plan.seconds.step)} a step: {_parts_text(times, seconds_text)}"
    of_peak = _parts_text(classes, bytes_of_class)
    peak = f"{bytes_text(plan.memory.peak)} at the peak ({_of_limit(plan, limit)}): {of_peak}"
    hints = f'<p class="hint">faster, with other numbers</p>{_list(plan.hints)}' if plan.hints else ""
    sent = f"{bytes_text(plan.wire_bytes)} sent in {plan.collectives} collectives; {_text(links)}"
    return (
        f'<article class="card plan" id="plan-{number}">'
        f'<h3><span class="number">{number}</span>{_text(mesh_text(plan))}{options}</h3>'
        f'<p class="hint">{step}</p>{_bar("time", times, "time of a step")}'
        f'<p class="hint">{peak}</p>{_bar("memory", classes, "memory by class")}'
        f'<p class="hint">{sent}</p>'
        f"<pre>{_text(plan.python)}</pre>{_list(plan.reasons)}{hints}</article>"
    )


def _list(sentences: Iterable[str]) -> str:
    return f"<ul class='reasons'>{''.join(f'<li>{_text(each)}</li>' for each in sentences)}</ul>"


def bytes_of_class(count: float) -> str:
    """Whole bytes as text."""
    return bytes_text(int(count))


def _parts_text(parts: Sequence[tuple[str, float]], text: Callable[[float], str]) -> str:
    return ", ".join(f"{name} {text(size)}" for name, size in parts if size)


def _bar(kind: str, parts: Iterable[tuple[str, float]], label: str) -> str:
    """A bar in parts, drawn as SVG: the page has no scripts and allows no styles in attributes."""
    parts = [each for each in parts if each[1]]
    whole, start, pieces = sum(size for _, size in parts) or 1, 0.0, []
    for name, size in parts:
        width = 100 * size / whole
        pieces.append(
            f'<rect class="{kind} {name}" x="{start:.2f}%" width="{width:.2f}%" height="8"><title>{name}</title></rect>'
        )
        start += width
    return f'<svg class="meter" role="img" aria-label="{label}" width="100%" height="8">{"".join(pieces)}</svg>'
