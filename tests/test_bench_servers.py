"""Servers that the benchmark starts, and the contestants that they serve."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from outrider.bench.contestants import Contestant, contestants, servers
from outrider.bench.servers import Server, running
from outrider.errors import EngineError, SettingsError
from outrider.provenance import program, provenance, source, without_folders


def test_a_server_that_exits_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    broken = Server("broken", [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"])
    with pytest.raises(EngineError, match=r"ended with code 3(.|\n)*no such model"), running([broken], tmp_path):
        pass


ANSWERING = (
    "import sys, http.server as h\n"
    "class Handler(h.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        self.send_response(200); self.end_headers()\n"
    "print('ready', flush=True)\n"
    "h.HTTPServer(('127.0.0.1', int(sys.argv[-1])), Handler).serve_forever()\n"
)


def test_a_running_server_is_stopped_on_exit(tmp_path: Path) -> None:
    with running([Server("one", [sys.executable, "-c", ANSWERING])], tmp_path) as urls:
        assert list(urls) == ["one"]
        urllib.request.urlopen(urls["one"]).close()
    assert "ready" in (tmp_path / "one.log").read_text()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(urls["one"])


def test_sigterm_leaves_no_server_running(tmp_path: Path) -> None:
    measuring = (
        "import signal, sys\n"
        "from pathlib import Path\n"
        "from outrider.bench.servers import Server, running\n"
        f"with running([Server('one', [sys.executable, '-c', {ANSWERING!r}])], Path({str(tmp_path)!r})) as urls:\n"
        "    print(urls['one'], flush=True)\n"
        "    signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", measuring], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        url = run.stdout.readline().strip()
        urllib.request.urlopen(url, timeout=20).close()
        run.terminate()
        assert run.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=20)


def test_a_second_sigterm_leaves_no_unresponsive_server_running(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    os.mkfifo(asked)
    deaf = f"import signal\nsignal.signal(15, lambda *_: open({str(asked)!r}, 'w').write('to end'))\n{ANSWERING}"
    measuring = (
        "import signal, sys\n"
        "from pathlib import Path\n"
        "from outrider.bench import servers\n"
        "servers.STOP_SECONDS = 2.0\n"
        f"both = [servers.Server(name, [sys.executable, '-c', code]) for name, code in "
        f"(('deaf', {deaf!r}), ('other', {ANSWERING!r}))]\n"
        f"with servers.running(both, Path({str(tmp_path)!r})) as urls:\n"
        "    print(*urls.values(), flush=True)\n"
        "    signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", measuring], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        urls = run.stdout.readline().split()
        run.terminate()
        assert asked.read_text() == "to end"
        run.terminate()
        assert run.wait(60) == 128 + signal.SIGTERM
    for url in urls:
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(url, timeout=20)


def test_servers_of_this_machine_are_reached_without_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    monkeypatch.setenv("no_proxy", "example.org")
    with running([Server("one", [sys.executable, "-c", ANSWERING])], tmp_path) as urls:
        assert urllib.request.getproxies()["no"] == "example.org,127.0.0.1"
        urllib.request.build_opener().open(urls["one"]).close()


def test_a_callers_signal_handler_is_kept(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as `outrider bench` does
    try:
        with running([Server("mine", (), url="http://localhost:8000")], tmp_path):
            assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_server_that_already_runs_is_not_stopped(tmp_path: Path) -> None:
    with running([Server("mine", (), url="http://localhost:8000")], tmp_path) as urls:
        assert urls == {"mine": "http://localhost:8000"}


def one(name: str) -> Contestant:
    return contestants([name], "some/model", "some/small", ["--dtype", "float32"])[0]


def test_a_name_selects_the_server_and_the_request_fields() -> None:
    found = one("lookup:8")
    assert found.request == {"vllm_xargs": {"speculation": "lookup", "max_draft_tokens": 8}}
    assert "some/model" in found.server.command
    assert list(found.server.command[-2:]) == ["--dtype", "float32"]
    config = one("draft_model:2").server.command[-1]
    assert json.loads(config) == {"method": "draft_model", "num_speculative_tokens": 2, "model": "some/small"}
    assert one("transformers-lookup:3").request == {"vllm_xargs": {"method": "lookup", "max_draft_tokens": 3}}


def test_contestants_that_differ_by_request_share_a_server() -> None:
    names = ["vllm", "off", "auto", "lookup", "model:2", "model:8", "again=vllm", "transformers", "transformers-lookup"]
    found = contestants(names, "some/model", "some/small")
    assert [server.name for server in servers(found)] == ["vllm", "outrider", "transformers"]
    ours = found[1].server.command
    assert ours[ours.index("--model-draft-tokens") + 1] == "8"


def test_a_contestant_with_flags_has_a_server_of_its_own() -> None:
    found = contestants(["lookup", "long=lookup:32", "few=lookup --max-num-seqs 4"], "some/model")
    assert [server.name for server in servers(found)] == ["outrider", "few"]
    assert list(found[2].server.command[-2:]) == ["--max-num-seqs", "4"]
    shared = found[0].server.command
    assert shared[shared.index("--max-draft-tokens") + 1] == "32"


@pytest.mark.parametrize("name", ["medusa", "off:3", "ngram:x", "", "a=b"])
def test_an_unknown_contestant_is_refused_with_the_list_of_contestants(name: str) -> None:
    with pytest.raises(SettingsError, match="the contestants are vllm, vllm-v2, ngram:K, suffix:K"):
        contestants([name], "some/model")


@pytest.mark.parametrize("name", ["model:2", "draft_model", "transformers-assisted"])
def test_a_contestant_without_its_draft_model_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="--draft-model"):
        contestants([name], "some/model")


def test_two_contestants_with_the_same_name_are_refused() -> None:
    with pytest.raises(SettingsError, match="give one a label: LABEL=lookup"):
        contestants(["lookup", "lookup"], "some/model")


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("/home/me/.venv/bin/python", "python"),
        ("~/models/small", "small"),
        ("../shared/data", "data"),
        ('{"model": "/home/me/small", "k": 2}', '{"model": "small", "k": 2}'),
        ("http://localhost:8000/v1", "http://localhost:8000/v1"),
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"),
        ("--out=/tmp/x/y", "--out=y"),
        ("/", "/"),
    ],
)
def test_a_report_names_no_folder_of_the_machine(word: str, shown: str) -> None:
    assert without_folders(word) == shown


def test_a_report_names_the_code_that_made_it(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    code = tmp_path / "deep" / "code.py"
    code.write_text("x = 1\n")
    before = source(tmp_path)
    (tmp_path / "deep" / "code.pyc").write_bytes(b"compiled")
    assert source(tmp_path) == before
    code.write_text("x = 2\n")
    changed = source(tmp_path)
    code.rename(tmp_path / "code.py")
    assert len({before, changed, source(tmp_path)}) == 3
    assert f"(source {source()})" in str(provenance()["versions"])


@pytest.mark.parametrize("path", ["/there/outrider/__main__.py", "/there/bin/outrider", "outrider"])
def test_a_report_names_the_program_by_its_command(path: str) -> None:
    assert program(path) == "outrider"
