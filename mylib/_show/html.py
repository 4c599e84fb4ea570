"""Writes HTML and SVG for notebooks: escaped, without scripts, and with nothing from elsewhere."""

from collections.abc import Sequence
from html import escape


class Html(str):
    """HTML, not to be escaped again."""


def tag(name: str, *inside: str, **attributes: object) -> Html:
    """An element. Its content is escaped unless it is `Html`. In the names of attributes, a last
    `_` is dropped, and other underscores become dashes.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(str(value))}"'
        for key, value in attributes.items()
    )
    return Html(f"<{name}{written}>{joined(inside)}</{name}>")


def joined(parts: Sequence[str]) -> Html:
    return Html("".join(part if isinstance(part, Html) else _escaped(part) for part in parts))


def _escaped(text: str) -> str:
    # Neither XML nor HTML has control characters.
    return escape("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text))


def page(*inside: str) -> Html:
    """A page for notebooks."""
    return tag("div", tag("style", Html(_STYLE)), *inside, class_="mylib-show")


def table(
    header: Sequence[str],
    body: Sequence[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    hover: Sequence[str] = (),
) -> Html:
    """A table, which becomes a list where it is narrow. `numbers` are the columns that are aligned
    on the right; `hover` is shown over each row.
    """
    classes = ["number" if i in numbers else "text" for i in range(len(header))]
    head = tag("tr", *(tag("th", x, class_=c) for x, c in zip(header, classes, strict=True)))
    rows = [
        tag("tr", *_cells(header, cells, classes), **({"title": hover[i]} if hover else {}))
        for i, cells in enumerate(body)
    ]
    # With a class, as sites have rules for tables without one.
    return tag("table", tag("thead", head), tag("tbody", *rows), class_="rows")


def _cells(header: Sequence[str], cells: Sequence[str], classes: Sequence[str]) -> list[Html]:
    return [
        # The name of the column, for narrow pages, which have no columns.
        tag("td", cell, class_=class_ if cell else f"{class_} empty", data_name=name)
        for name, cell, class_ in zip(header, cells, classes, strict=True)
    ]


# Text and lines have the colours of the notebook, so that they suit any theme; what is coloured is
# light, with black text on it. Twice the class: notebooks have rules for tables of their own.
_STYLE = """
.mylib-show { container-type: inline-size; font: 13px/1.45 system-ui, sans-serif; color: inherit; }
.mylib-show p { margin: 0.2em 0; overflow-wrap: anywhere; white-space: pre-wrap; }
.mylib-show .strong { font-weight: 600; }
.mylib-show .faint { opacity: 0.75; font-size: 12px; }
.mylib-show .figures { display: flex; flex-wrap: wrap; gap: 1em 2em; margin: 0.8em 0; }
.mylib-show .figure { margin: 0; max-width: 100%; min-width: 0; }
.mylib-show .caption { margin-bottom: 0.4em; overflow-wrap: anywhere; }
.mylib-show .panels { display: flex; flex-wrap: wrap; gap: 0.6em 1em; }
.mylib-show svg { display: block; max-width: 100%; height: auto; font: 11px system-ui, sans-serif; }
.mylib-show svg .label { fill: currentColor; opacity: 0.75; }
.mylib-show svg .name { fill: #111; pointer-events: none; }
.mylib-show svg rect { stroke: rgb(17 17 17 / 0.35); stroke-width: 1; }
.mylib-show svg rect.track { fill: rgb(127 127 127 / 0.2); stroke: none; }
.mylib-show.mylib-show table { border-collapse: collapse; width: auto; max-width: 100%;
  margin: 0.8em 0; font: inherit; color: inherit; border: none; display: table; }
.mylib-show.mylib-show th, .mylib-show.mylib-show td { padding: 0.25em 1em 0.25em 0; border: none;
  border-bottom: 1px solid rgb(127 127 127 / 0.35); text-align: left; vertical-align: baseline;
  white-space: normal; overflow-wrap: anywhere; min-width: 0; font-weight: inherit; }
.mylib-show.mylib-show th { font-weight: 600; white-space: nowrap; overflow-wrap: normal; }
.mylib-show.mylib-show .number { text-align: right; font-variant-numeric: tabular-nums; }
.mylib-show.mylib-show td[data-name="array"] { font-family: ui-monospace, monospace;
  font-size: 12px; }
@container (max-width: 720px) {
  .mylib-show.mylib-show thead { display: none; }
  .mylib-show.mylib-show table, .mylib-show.mylib-show tbody { display: block; width: 100%; }
  .mylib-show.mylib-show tr { display: flex; flex-wrap: wrap; gap: 0 1.2em; padding: 0.4em 0;
    border-bottom: 1px solid rgb(127 127 127 / 0.35); }
  .mylib-show.mylib-show td { display: block; padding: 0; border: none; text-align: left; }
  .mylib-show.mylib-show td:first-child { flex-basis: 100%; font-weight: 600; }
  .mylib-show.mylib-show td.empty { display: none; }
  .mylib-show.mylib-show td.number::before, .mylib-show.mylib-show td[data-name="before"]::before,
  .mylib-show.mylib-show td[data-name="after"]::before { content: attr(data-name) " ";
    opacity: 0.75; }
}
"""
