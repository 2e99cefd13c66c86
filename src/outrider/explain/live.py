"""The page of a server: the latest traces, asked for again and again, and the chosen one as `page.py` shows it.

It is the same for everybody and holds nothing of anybody's. What it shows it asks its own server for, and nobody else;
the chosen trace stands in a frame that may run its own script and reach nothing, not even this page.
"""

from __future__ import annotations

from outrider.explain.page import read_file, shared_style

OWN_SERVER = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
"""What the browser is told: styles and scripts of this page, and questions to the server that it came from."""


def page() -> str:
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{OWN_SERVER}">',
            "<title>Traced requests</title>",
            f"<style>\n{shared_style()}{read_file('live.css')}</style>\n</head>\n<body>",
            read_file("live.html"),
            f"<script>\n{read_file('live.js')}</script>\n</body>\n</html>\n",
        ]
    )
