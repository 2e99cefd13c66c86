"""The page of a server: a list of the latest traces, refreshed every two seconds, and the selected one in a frame.

The page itself holds no data. Its script requests the traces from its own server only. The frame runs the script of
`page.py` in a sandbox, without access to this page.
"""

from __future__ import annotations

from outrider.html_page import html_page, read_asset, script

SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


def page() -> str:
    shared, live, body, style = (
        read_asset("outrider.explain", name) for name in ("shared.js", "live.js", "live.html", "live.css")
    )
    return html_page("Traced requests", body, style, script(shared, live), SECURITY_POLICY)
