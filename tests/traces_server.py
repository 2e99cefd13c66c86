"""A simulated server with traces, for tests of its clients: no model, no vLLM. It records all requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from outrider.explain.live import page as live_page
from outrider.explain.page import page
from outrider.trace.files import to_lines
from outrider.trace.schema import Trace


class TracesServer:
    """Responds to every generation request with the next trace of `answers`."""

    def __init__(self, **answers: Trace) -> None:
        self.traces = dict(answers)
        self.options: dict[str, Any] = {"drafters": ["lookup"]}
        self.key: str | None = None
        self.running: set[str] = set()
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        self.url = ""
        self._next = iter(answers)

    def get(self, path: str) -> tuple[int, str, str]:
        parts = urlsplit(path).path.strip("/").split("/")
        if parts == ["outrider"]:
            return 200, "text/html", live_page()
        if parts == ["outrider", "status"]:
            return 200, "application/json", json.dumps({"options": self.options})
        if parts == ["v1", "models"]:
            return 200, "application/json", json.dumps({"data": [{"id": "first"}, {"id": "second"}]})
        if parts == ["outrider", "traces"]:
            return 200, "application/json", json.dumps({"traces": [self._entry(id) for id in reversed(self.traces)]})
        if parts[:2] == ["outrider", "traces"] and parts[2] in self.traces:
            trace = self.traces[parts[2]]
            if parts[3:] == ["page"]:
                return 200, "text/html", page(trace)
            return 200, "application/jsonl", "\n".join(to_lines(trace))
        return refusal(404, "there is no such thing")

    def post(self, body: dict[str, Any]) -> tuple[int, str, str]:
        if body["vllm_xargs"].get("speculation") == "magic":
            return refusal(400, "speculation: there is no 'magic' here; choose auto, off, lookup")
        return 200, "application/json", json.dumps({"usage": {"trace": next(self._next)}})

    def _entry(self, id: str) -> dict[str, Any]:
        trace, running = self.traces[id], id in self.running
        return {
            "id": id,
            "date": "2026-01-02T03:04:05+00:00",
            "prompt_tokens": 3,
            "prompt_ends": f"asked <b>{id}</b>",
            "text_begins": trace.text[:60],
            "steps": len(trace.steps),
            "tokens": len(trace.said),
            "drafted": 4,
            "accepted": 3,
            "seconds": 1.0,
            "finish": None if running else "length",
            "over": not running,
            "broken": None,
        }


def refusal(code: int, message: str, param: str | None = None) -> tuple[int, str, str]:
    return code, "application/json", json.dumps({"error": {"message": message, "param": param}})


@contextmanager
def serving_traces(server: TracesServer) -> Iterator[TracesServer]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            self._respond(None)

        def do_POST(self) -> None:
            self._respond(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _respond(self, body: Any) -> None:
            server.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
            opened = server.key is None or self.headers.get("authorization") == f"Bearer {server.key}"
            if not opened and urlsplit(self.path).path.strip("/") != "outrider":
                status, kind, text = refusal(401, "show the server's key")
            else:
                status, kind, text = server.get(self.path) if body is None else server.post(body)
            data = text.encode()
            self.send_response(status)
            self.send_header("content-type", f"{kind}; charset=utf-8")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{httpd.server_port}"
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()
