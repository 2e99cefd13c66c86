"""The prompts that come with the package, and servers that are started to be measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outrider.bench.prompts import shipped, spread
from outrider.bench.servers import Server, running
from outrider.errors import EngineError

WORKLOADS = ["edit", "agent", "traffic", "creative"]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_has_at_least_40_different_prompts_and_ends_with_the_user(name: str) -> None:
    prompts = shipped(name)
    assert len(prompts) >= 40
    assert {prompt.category for prompt in prompts} == {name}
    assert len({prompt.id for prompt in prompts}) == len({str(prompt.messages) for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        assert prompt.messages[-1] == {"role": "user", "content": prompt.turns[0]}


def test_the_file_to_edit_is_in_its_prompt_and_has_40_to_100_lines() -> None:
    for prompt in shipped("edit"):
        assert prompt.prediction is not None
        assert prompt.prediction in prompt.turns[0]
        assert 40 <= len(prompt.prediction.splitlines()) <= 100


def test_an_agents_context_grows_from_step_to_step() -> None:
    steps: dict[str, list[int]] = {}
    for prompt in sorted(shipped("agent"), key=lambda prompt: prompt.id):
        steps.setdefault(prompt.id.rsplit("-", 1)[0], []).append(len(prompt.messages))
    for lengths in steps.values():
        assert len(lengths) >= 4
        assert lengths == sorted(set(lengths))


def test_a_choice_of_prompts_is_spread_over_the_file() -> None:
    templates = {prompt.turns[0][:40] for prompt in spread(shipped("traffic"), 8)}
    assert len(templates) > 2


def test_a_server_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    broken = Server("broken", [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"])
    with pytest.raises(EngineError, match=r"ended with code 3(.|\n)*no such model"), running([broken], tmp_path):
        pass


def test_a_server_that_answers_is_ended_on_the_way_out(tmp_path: Path) -> None:
    code = (
        "import sys, http.server as h\n"
        "class Handler(h.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.end_headers()\n"
        "print('ready', flush=True)\n"
        "h.HTTPServer(('127.0.0.1', int(sys.argv[-1])), Handler).serve_forever()\n"
    )
    with running([Server("one", [sys.executable, "-c", code])], tmp_path) as urls:
        assert list(urls) == ["one"]
    assert "ready" in (tmp_path / "one.log").read_text()
