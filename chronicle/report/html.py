"""`report.html`: one self-contained page. Plotly's library is taken from the installed `plotly` package, nothing from the net.

A content security policy inside the page forbids every request, so what is inside is all there is.
"""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.report.markup import html_text
from chronicle.report.page_data import build_page_data, drawn
from chronicle.report.page_words import page_body, page_header
from chronicle.story.assemble import Story
from chronicle.story.series import LaunchSeries

__all__ = ["plotly_script", "render_html"]

SCRIPTS = ("page_axis.js", "page_draw.js", "page_plots.js", "page_study.js", "page.js")  # one module, in this order


def plotly_script() -> str:
    """The library's text, without importing plotly; raises `ChronicleError` where it is not installed."""
    spec = find_spec("plotly")
    if spec is None or not spec.submodule_search_locations:
        raise ChronicleError("plotly is not installed: the page needs its script", "pip install 'chronicle-ml[report]'")
    path = Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as problem:
        raise ChronicleError(f"cannot read plotly's script `{path}`: {problem.strerror}", "reinstall plotly") from problem


def render_html(
    story: Story,
    series: Sequence[LaunchSeries],
    *,
    script: str,
    lost_seconds: Mapping[str, float] | None = None,
    panels: Sequence[Mapping[str, Any]] = (),
    live: bool = False,
) -> str:
    """The page. `panels` are the curves of studies; `live` adds what listens for changes: a page in a mail has none."""
    data = build_page_data(story, series, lost_seconds or {}, panels)
    parts = {
        "TITLE": html_text(f"{story.run}: chronicle"),
        "CSS": _own("page.css"),
        "HEADER": page_header(story),
        "BODY": page_body(story, data),
        "DATA": _inline(drawn(data)),
        "PLOTLY": script.replace("</script", "<\\/script"),
        "SCRIPT": "\n".join(_own(name) for name in SCRIPTS),
        "LIVE": f'<script type="module">{_own("page_live.js")}</script>' if live else "",
    }
    pieces = _own("page.html").split("@@")  # one pass: what is filled in is never looked at again
    return "".join(piece if index % 2 == 0 else parts[piece] for index, piece in enumerate(pieces))


def _own(name: str) -> str:
    return files("chronicle.report").joinpath(name).read_text(encoding="utf-8")


def _inline(data: Mapping[str, Any]) -> str:
    """JSON inside a script element: `<` as an escape, so that no text of anyone can close the element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
