"""`report.html`: one self-contained page about a run, computed from its folder.

Invariant: the page loads nothing from anywhere (scripts, styles and data are in it) and is written whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from rollart.observe import report_html as html
from rollart.observe import report_outlook
from rollart.observe.jsonl import finite, write_whole
from rollart.observe.report_data import Report, gather
from rollart.observe.summary import as_json

SCRIPTS = ("charts.js", "timeline.js", "reader.js")


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run's folder and return its path. Raises StoreError."""
    return write_whole(run_dir / "report.html", render(gather(run_dir)))


def write_results(run_dir: Path) -> tuple[Path, Path]:
    """Write `summary.json` and `report.html` from one reading of the run. Raises StoreError."""
    report = gather(run_dir)
    return write_whole(run_dir / "summary.json", as_json(report.summary)), write_whole(
        run_dir / "report.html", render(report)
    )


def render(report: Report) -> str:
    """The page."""
    static = files("rollart.observe") / "static"
    page = (static / "page.html").read_text(encoding="utf-8")
    data = {"tasks": report.tasks, "charts": report.charts, "window": report.window, "readings": report.readings}
    parts = {
        "<!--TITLE-->": escape(f"{report.header.get('run')}{_kind(report)} · rollart"),
        "/*STYLE*/": (static / "page.css").read_text(encoding="utf-8"),
        "<!--BODY-->": _body(report),
        # "<" is escaped so that no text of a run can end the script element
        "<!--DATA-->": json.dumps(finite(data), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c"),
        "/*SCRIPT*/": "\n".join((static / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    for mark, text in parts.items():
        before, _, after = page.partition(mark)
        page = before + text + after
    return page


def _body(report: Report) -> str:
    figures = report.summary["figures"]
    curves = '<div id="charts"></div>' if report.charts else ""
    readings = '<div id="readings"></div>' if report.readings else ""
    return "\n".join(
        (
            html.opening(report),
            "<noscript><p>Curves, timeline and trajectories need JavaScript; the tables do not.</p></noscript>",
            html.results(report),
            report_outlook.outlook(report.outlook, report.summary["figures"]),
            html.advice(report),
            html.interruptions(report),
            html.section("curves", "Curves", f"{figures}; one point per step", curves),
            _timeline(report),
            html.waits(report),
            html.ledger(report),
            report_outlook.basis(report.outlook),
            html.section("reading", "Trajectories to read", "worst and best of early, middle and last steps", readings),
            _footer(report),
        )
    )


def _kind(report: Report) -> str:
    """For the page's title: a simulated figure is never to be taken for a measured one."""
    return " (simulated)" if report.summary["figures"] == "simulated" else ""


def _timeline(report: Report) -> str:
    note = f"{report.summary['figures']}; time in seconds since the run began"
    body = html.phases(report)
    if report.window is not None:
        body += (
            '<div class="card timeline"><div class="tools"><button type="button" data-zoom="0.5">zoom in</button>'
            '<button type="button" data-zoom="2">zoom out</button><button type="button" data-zoom="all">all</button>'
            f"<span>{_what(report.window)}; drag to move, Ctrl or Shift + wheel to zoom</span>"
            '<ul class="keys"><li><i class="dot k-step"></i>train</li><li><i class="dot k-publish"></i>publish</li>'
            '<li><i class="dot w-wait"></i>wait for batch</li><li><i class="dot k-versions"></i>version that sampled</li></ul>'
            '</div><div id="canvas"></div></div>'
        )
    return html.section("timeline", "Timeline", note, body)


def _what(window: Mapping[str, Any]) -> str:
    """What the timeline shows of the run."""
    shown, there = window["engines_shown"]
    engines = f", {shown} of {there} engines" if shown < there else ""
    return f"the last {len(window['steps'])} steps{engines}"


def _footer(report: Report) -> str:
    return (
        f"<footer>Computed from events.jsonl ({html.number(report.n_events)} events). Every figure on this page is "
        f"{report.summary['figures']}; the definitions are in docs/metrics.md.</footer>"
    )
