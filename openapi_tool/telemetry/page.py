"""Page of the health server: the state of this replica, as `top` shows it. Static HTML, filled by a short script.

Values are set as text, never as HTML, and the policy allows this script only: ids of calls are chosen by others.
"""

from __future__ import annotations

import base64
import hashlib

_STYLE = "body{font:14px sans-serif;margin:2em}table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;\
border:1px solid #ccc;text-align:left;vertical-align:top;white-space:pre-wrap;max-width:60em}.bad{color:#b00}"
_SCRIPT = """
const cell = (row, kind, text) => { const made = document.createElement(kind); made.textContent = text ?? "-";
  row.append(made); };
const table = (id, rows) => { const at = document.getElementById(id); at.replaceChildren();
  const head = at.insertRow(); if (!rows.length) { cell(head, "td", "none"); return; }
  const names = Object.keys(rows[0]);
  names.forEach(name => cell(head, "th", name));
  rows.forEach(row => { const line = at.insertRow(); names.forEach(name => cell(line, "td", row[name])); }); };
const shown = ({waiting_by_project: _, ...limit}) => limit;
const pairs = object => Object.entries(object).map(([name, value]) => ({name, value}));
async function load() {
  const note = document.getElementById("note");
  try {
    const found = await (await fetch("stats.json")).json();
    const numbers = Object.fromEntries(Object.entries(found).filter(([, value]) => typeof value != "object"));
    table("now", pairs(numbers)); table("kernels", found.kernels);
    table("settings", pairs(found.limits)); table("limits", found.upstream_limits.map(shown));
    table("keys", found.upstream_keys); table("tools", found.tools);
    table("errors", found.errors); table("warnings", found.warnings); table("last", found.last);
    table("dependencies", Object.entries(found.health.dependencies).map(([name, state]) =>
      ({name, available: state.ok, reason: state.reason ?? ""})));
    note.textContent = found.health.ready ? "ready" : "not ready"; note.className = found.health.ready ? "" : "bad";
  } catch (error) { note.textContent = "the replica does not answer"; note.className = "bad"; }
  setTimeout(load, 2000);
}
load();
"""
_TABLES = {
    "now": "Now",
    "kernels": "Commands at the durable of each kernel",
    "dependencies": "Dependencies",
    "tools": "Calls by project and tool, the last minute",
    "errors": "Errors, the last minute",
    "warnings": "Warnings, the last ten minutes",
    "last": "Last calls",
    "limits": "Rate limits",
    "keys": "Refused keys",
    "settings": "Settings",
}


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


PAGE = (
    f'<!doctype html><html lang="en"><meta charset="utf-8"><title>openapi-tool</title><style>{_STYLE}</style>'
    '<h1>openapi-tool</h1><p id="note">loading</p>'
    + "".join(f'<h2>{title}</h2><table id="{name}"></table>' for name, title in _TABLES.items())
    + f"<script>{_SCRIPT}</script></html>"
)
HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; connect-src 'self'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; "
        "frame-ancestors 'none'; base-uri 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
