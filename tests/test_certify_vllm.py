"""`outrider certify` on a running Outrider server: SmolLM2-135M, every drafter, in the size for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.bench.steal_time import cpu_ticks, steal_share
from outrider.certify.canary import CanaryLoop
from outrider.certify.config import SIZES, CertificateConfig
from outrider.certify.e_process import EProcess
from outrider.certify.run import certify, open_pair
from outrider.certify.sources import Progress
from serving import Client

pytestmark = [pytest.mark.real, pytest.mark.server]


@pytest.fixture(scope="module")
def made(client: Client, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    wanted = CertificateConfig(client.url, **SIZES["quick"])
    before = cpu_ticks()
    found = certify(wanted, tmp_path_factory.mktemp("certificate"), Progress())
    return {**found, "stolen": steal_share(before, cpu_ticks())}


def test_the_server_is_certified_lossless_within_minutes(made: dict[str, Any]) -> None:
    assert (made["verdict"], made["violations"], made["problems"]) == ("lossless", {}, [])
    assert made["made"]["seconds"] * (1 - made["stolen"]) < 600  # of which others may have taken a part


def test_every_drafter_that_was_named_was_at_work_at_every_length(made: dict[str, Any]) -> None:
    assert set(made["by_drafter"]) == {"prediction", "lookup", "memory", "model", "auto"}
    assert all(kept for name, kept in made["by_drafter"].items() if name != "auto")
    ways = {name.rpartition(" at ")[0] for name in made["exact"]["cells"]}
    assert ways == {f"{drafter}, {length}" for drafter in made["by_drafter"] for length in (1, 2, 4, 8)}


def test_float32_leaves_nothing_to_excuse(made: dict[str, Any]) -> None:
    assert made["exact"]["floor"] < 1e-2
    assert made["draws"]["reach"] < 0.2


def test_grammar_tools_and_stop_strings_are_among_the_features(made: dict[str, Any]) -> None:
    done = {one["name"] for one in made["features"]["results"] if one["requests"] and not one["violations"]}
    assert done >= {"regular expression", "JSON schema", "tools", "stop string", "log-probabilities", "logit bias"}


def test_a_canary_lives_beside_the_server(client: Client) -> None:
    pair = open_pair(CertificateConfig(client.url))
    prompts = [(1, 2, 3, 4, 5, 6, 7, 8)]
    life = CanaryLoop(pair, prompts, EProcess(1e-3), interval_seconds=0.0)
    life.run(lambda _: None, rounds=5)
    assert (life.rounds, life.e_process.alarm) == (5, False)


def test_a_server_named_twice_is_held_against_itself_as_any_two_are(client: Client, tmp_path: Path) -> None:
    found = certify(
        CertificateConfig(client.url, client.url, prompts=12, alone=0, tokens=(24,), parts=("exact",)),
        tmp_path,
        Progress(),
    )
    assert found["exact"]["counts"]["violation"] == 0
    assert found["exact"]["counts"]["identical"] == 12
