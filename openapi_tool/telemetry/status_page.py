"""HTML page of a replica: what is wrong in plain words, then numbers.

What is wrong is written into the HTML, so that it shows without script. The script reads /stats.json every two seconds,
and keeps that and the tables up to date.

Models and clients choose the ids that the page shows. So HTML is escaped, the script sets values as text only, and the
Content-Security-Policy allows no other script.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from openapi_tool.telemetry.replica_problems import FoundProblems, but_noticed, found_problems

_STYLE = """
:root { color-scheme: light dark; --line: #c8ccd2; --quiet: #5a6472; --bad: #a80f1b; --bad-back: #fdecec;
  --good: #12692c; --good-back: #e8f5ec; --back: #fff; --text: #1a1f26; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3c434d; --quiet: #a4adb8; --bad: #ff9c9c; --bad-back: #3a1b1d; --good: #86d79c;
    --good-back: #16301e; --back: #14171b; --text: #e6e9ed; } }
body { font: 15px/1.4 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 75rem; background: var(--back);
  color: var(--text); }
h1 { font-size: 1.3rem; margin: 0 0 .6rem; } h2 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
#state { border-left: .4rem solid var(--good); background: var(--good-back); color: var(--good); padding: .6rem .8rem;
  font-weight: 600; }
#state.bad { border-color: var(--bad); background: var(--bad-back); color: var(--bad); }
ul { padding-left: 1.2rem; margin: .6rem 0; overflow-wrap: anywhere; }
#problems { color: var(--bad); font-weight: 600; } #earlier, #earlier-head, .none, noscript { color: var(--quiet); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
td, th { padding: .2rem .6rem; border: 1px solid var(--line); text-align: left; vertical-align: top;
  white-space: nowrap; } th { color: var(--quiet); font-weight: 600; }
.long { white-space: pre-wrap; width: max-content; max-width: min(40rem, 70vw); max-height: 9rem; overflow: auto;
  overflow-wrap: anywhere; }
tr.bad td { background: var(--bad-back); color: var(--bad); }
"""
_SCRIPT = """
const at = id => document.getElementById(id);
const add = (parent, kind, text) => { const made = document.createElement(kind); made.textContent = text ?? "-";
  parent.append(made); };
const list = (id, texts) => { at(id).replaceChildren(); texts.forEach(text => add(at(id), "li", text)); };
const row = (table, number, kind, values, className) => {
  const line = table.rows[number] ?? table.insertRow(); line.className = className;
  if (line.cells.length != values.length || line.cells[0].localName != kind) {
    line.replaceChildren(...values.map(() => { const made = document.createElement(kind);
      made.append(document.createElement("div")); return made; })); }
  values.forEach((value, column) => { const shown = line.cells[column].firstChild, text = String(value ?? "-");
    if (shown.textContent != text) shown.textContent = text;  // keeps scroll and selection of a text that stays
    shown.className = text.length > 40 ? "long" : ""; }); };
const table = (id, rows, isBad = () => false) => {
  const names = [...new Set(rows.flatMap(one => Object.keys(one)))], none = !rows.length;
  if (none) row(at(id), 0, "td", ["none"], "none");
  else row(at(id), 0, "th", names.map(name => name.replaceAll("_", " ")), "");
  rows.forEach((one, number) => row(at(id), number + 1, "td", names.map(name => one[name]), isBad(one) ? "bad" : ""));
  while (at(id).rows.length > rows.length + 1) at(id).deleteRow(-1); };
const pairs = object => Object.entries(object).map(([name, value]) => ({name: name.replaceAll("_", " "), value}));
const state = (text, isBad) => { at("state").textContent = text; at("state").className = isBad ? "bad" : ""; };
async function load() {
  try {
    const found = await (await fetch("stats.json")).json();
    state(found.state, !found.health?.ready || found.silent || found.problems.length);
    list("problems", found.problems); list("earlier", found.earlier);
    at("earlier-head").hidden = !found.earlier.length;
    if (found.health) show(found);
  } catch (error) { state("The replica does not answer. What follows is what it said last.", true); }
  setTimeout(load, 2000);
}
function show(found) {
  const {problems, earlier, state, silent, answers, ...rest} = found;
  at("tables").hidden = false;
  table("now", pairs(Object.fromEntries(Object.entries(rest).filter(([, value]) => typeof value != "object"))));
  table("errors", found.errors, () => true);
  table("last", found.last, call => call.error_code);
  ["tools", "warnings"].forEach(name => table(name, found[name]));
  table("keys", found.upstream_keys, () => true); table("settings", pairs(found.limits));
  table("limits", found.upstream_limits.map(({waiting_by_project: _, ...limit}) => limit),
    limit => limit.paused_s || limit.offline);
  table("dependencies", Object.entries(found.health.dependencies).map(([name, dependency]) =>
    ({name, available: dependency.ok ? "yes" : "no", reason: dependency.reason ?? "",
      since: dependency.since.replace("T", " ").replace("+00:00", " UTC")})),
    row => row.available == "no");
}
load();
"""
# Title of each table, by the id of its element.
_TABLES = {
    "errors": "Failed calls, the last minute",
    "dependencies": "Dependencies",
    "keys": "Keys that the upstream refuses",
    "limits": "Rate limits",
    "warnings": "Warnings, the last ten minutes",
    "tools": "Calls by project and tool, the last minute",
    "last": "Last calls",
    "now": "Load now, and rates of the last minute",
    "settings": "Settings",
}


def _hash(text: str) -> str:
    """Return the hash by which a Content-Security-Policy allows a script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; connect-src 'self'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; "
        "frame-ancestors 'none'; base-uri 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page(stats: Mapping[str, Any]) -> str:
    """Return the page; its tables are empty until the script has loaded /stats.json."""
    shown = with_problems(stats)
    is_ready = (stats.get("health") or {}).get("ready")
    is_bad = bool(shown["problems"]) or bool(stats.get("silent")) or not is_ready
    tables = "".join(
        f'<h2>{title}</h2><div class="wide"><table id="{name}"></table></div>' for name, title in _TABLES.items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>openapi-tool</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>openapi-tool</h1>"
        f'<p id="state" role="status"{" class=bad" if is_bad else ""}>{escape(shown["state"])}</p>'
        f'<ul id="problems">{_items(shown["problems"])}</ul>'
        "<noscript>Without script this page shows the state at which it was loaded, and no tables. /stats.json has all "
        "numbers, and /readyz and /metrics of the health server have the state and the metrics.</noscript>"
        f'<h2 id="earlier-head"{"" if shown["earlier"] else " hidden"}>Earlier, within ten minutes</h2>'
        f'<ul id="earlier">{_items(shown["earlier"])}</ul>'
        f'<div id="tables" hidden>{tables}</div><script>{_SCRIPT}</script></body></html>'
    )


def _items(texts: Sequence[str]) -> str:
    return "".join(f"<li>{escape(text)}</li>" for text in texts)


def with_problems(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return a replica's statistics with its `state` in a sentence, its `problems`, and those of `earlier`."""
    found = found_problems([{**stats, "instance": ""}])  # all of them are this replica's
    return {**stats, "state": _state(stats, found), "problems": found.now, "earlier": found.earlier}


def _state(stats: Mapping[str, Any], found: FoundProblems) -> str:
    """Return the state of a replica as a sentence; `silent` is set by whoever asks it over NATS in vain."""
    health = stats.get("health")
    if not health:
        return "The replica has not answered yet."
    if stats.get("silent"):
        return "The replica does not answer over NATS. What follows is what it said last."
    if health.get("draining"):
        return "Stopping: the replica finishes its calls and fetches no commands."
    if not health.get("ready"):
        return "Not ready: calls may wait until what follows is solved."
    if found.now:
        return "Ready, with problems."
    return f"Ready. No problem is known{but_noticed([stats])}."
