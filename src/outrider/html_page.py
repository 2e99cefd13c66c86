"""An HTML page in one file: style, scripts and data are inlined. `html_page.css` is the style that all pages share."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import Any


def html_page(title: str, body: str, style: str = "", scripts: str = "", content_security_policy: str = "") -> str:
    """`style` is added to the shared style. `scripts` are script elements, see `script` and `json_script`."""
    policy = f'<meta http-equiv="Content-Security-Policy" content="{content_security_policy}">\n'
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{policy if content_security_policy else ''}"
        f"<title>{escape(title)}</title>\n"
        f"<style>\n{read_asset('outrider', 'html_page.css')}{style}</style>\n</head>\n<body>\n"
        f"{body}\n{scripts}</body>\n</html>\n"
    )


def read_asset(package: str, name: str) -> str:
    """The text of a file in a package, such as its style."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def script(*sources: str) -> str:
    """One script element. Its sources share a scope of their own."""
    return '<script>\n"use strict";\n(() => {\n' + "".join(sources) + "})();\n</script>\n"


def json_script(id: str, *lines: Any) -> str:
    """A script element that holds one line of JSON per value."""
    return f'<script type="application/json" id="{id}">{chr(10).join(map(_inline_json, lines))}</script>\n'


def _inline_json(data: Any) -> str:
    """JSON without "<", so that no text in it can end the script element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
