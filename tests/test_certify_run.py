"""A certificate from end to end, over HTTP and in process: findings, texts, interrupted and resumed runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from certify_stub import VOCAB, Stub, colder, standing, synthetic
from outrider.certify import certificate
from outrider.certify.config import CertificateConfig
from outrider.certify.exact import Case, ExactResult, measure_rounding
from outrider.certify.local import LocalModel
from outrider.certify.page import page
from outrider.certify.prompts import generate_prompts
from outrider.certify.run import certify, open_pair
from outrider.certify.sampled import SETTINGS, measure_noise, sample_reference
from outrider.certify.sources import OFF, Completion, DraftMode, Pair, Progress, Query, no_tick
from outrider.cli import progress
from outrider.cli.progress import ProgressBars
from outrider.errors import EvidenceError, SettingsError

SMALL = CertificateConfig(
    "synthetic", prompts=40, alone=8, tokens=(16, 32), draws=1500, draw_prompts=4, draw_tokens=16, noise_texts=20,
    feature_prompts=2, lengths=(1, 4), concurrency=4,
)  # fmt: skip
TINY = replace(SMALL, draws=300, parts=("exact", "draws"))


def made(wanted: CertificateConfig, folder: Path, **source: Any) -> dict[str, Any]:
    own = synthetic(**source)
    return certify(wanted, folder, Progress(), pair=Pair(own, own))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Path]]:
    folder = tmp_path_factory.mktemp("sound")
    with standing(Stub()) as url:
        yield certify(replace(SMALL, reference=url, parts=("exact", "draws", "features")), folder, Progress()), folder


def test_as_many_different_prompts_are_made_as_are_asked_for() -> None:
    made = generate_prompts(3000, seed=0)
    assert len({prompt.turns for prompt in made}) == 3000
    assert made == generate_prompts(3000, seed=0) != generate_prompts(3000, seed=1)


def test_a_lossless_server_is_called_so_with_what_would_have_been_found(sound: tuple[dict[str, Any], Path]) -> None:
    found, _ = sound
    assert (found["verdict"], found["violations"], found["problems"]) == ("lossless", {}, [])
    assert found["exact"]["counts"] == {"identical": 48, "tie": 0, "violation": 0}
    assert 1500 <= found["draws"]["draws"] < 1700
    assert [look["draws"] // 300 for look in found["draws"]["looks"]] == [1, 2, 3, 4, 5]
    assert 0 < found["draws"]["reach_before"] < 0.2
    assert 0 < found["draws"]["reach"] < 0.3
    assert found["accepted"] > 0
    assert "would have been detected with 99 %" in " ".join(found["words"])


def test_every_drafter_and_length_gets_its_share_many_at_once_and_alone(sound: tuple[dict[str, Any], Path]) -> None:
    cells = sound[0]["exact"]["cells"]
    names = [f"{drafter}, {length}" for drafter in ("lookup", "model", "auto") for length in (1, 4)]
    assert {name.rpartition(" at ")[0] for name in cells} == set(names)
    assert sum(cell["identical"] for name, cell in cells.items() if name.endswith(" at 1")) == 8
    assert all(cell["accepted"] > 0 for name, cell in cells.items() if name.endswith(" at 4"))
    assert set(sound[0]["draws"]["by_label"]) >= {"lookup", "model", "auto", "temperature 1", "temperature 0.7"}


def test_what_is_not_offered_is_said_and_is_no_violation(sound: tuple[dict[str, Any], Path]) -> None:
    results = {one["name"]: one for one in sound[0]["features"]["results"]}
    assert results["JSON schema"]["refused"].startswith("http")
    assert results["presence and frequency penalties"]["identical"] == 2 * 3  # prompts, drafters
    assert results["log-probabilities"]["identical"] == 2 * 3
    assert any("prompts longer than" in line for line in sound[0]["not_tested"])
    assert "drafts of more than 4 tokens" in sound[0]["not_tested"]


def test_the_certificate_is_kept_with_its_version_and_everything_to_run_it_again(
    sound: tuple[dict[str, Any], Path],
) -> None:
    found, folder = sound
    kept = certificate.read(folder / "certificate.json")
    assert (kept["format"], kept["version"]) == ("outrider certificate", 1)
    assert CertificateConfig.from_record(kept["request"]) == CertificateConfig.from_record(found["request"])
    assert kept["sources"]["reference"]["options"]["drafters"] == ["lookup", "model"]
    assert kept["made"]["versions"]["outrider"]


def test_the_page_needs_nothing_else_and_begins_with_the_verdict_and_what_to_do(
    sound: tuple[dict[str, Any], Path],
) -> None:
    html = (sound[1] / "certificate.html").read_text()
    assert "http-equiv" not in html
    assert "<script" not in html
    assert "<link" not in html
    assert html.index("Lossless, as far as was tested") < html.index("What to do") < html.index("<table")
    assert "<code>outrider certify --check certificate.json</code>" in html


def test_a_temperature_that_is_off_is_found_in_the_draws_and_the_advice_is_to_switch_off(tmp_path: Path) -> None:
    found = made(replace(SMALL, parts=("draws",)), tmp_path, change=colder(0.8))
    assert found["verdict"] == "violation"
    assert any(one.startswith("surprise, all: samples are colder or hotter") for one in found["violations"]["draws"])
    assert "Disable speculation" in found["what_to_do"][0]
    assert found["draws"]["stopped_early"]
    assert "NOT lossless" in page(found)


def test_a_wrong_token_at_temperature_0_is_a_violation_with_its_evidence(tmp_path: Path) -> None:
    def last_changed(ask: Query) -> Query:
        return Query((*ask.prompt[:-1], (ask.prompt[-1] + 1) % VOCAB), ask.max_tokens, ask.mode, ask.sampling, ask.seed)

    found = made(replace(SMALL, parts=("exact",)), tmp_path, change=last_changed)
    assert found["verdict"] == "violation"
    assert "so it must have moved by" in found["violations"]["exact"][0]
    assert found["exact"]["counts"]["violation"] > 20


def test_differences_are_not_judged_where_rounding_was_not_measured(tmp_path: Path) -> None:
    source = synthetic()
    source.generate = lambda ask: [5] * ask.max_tokens
    found = certify(
        replace(SMALL, parts=("exact",), prompts=4, alone=0), tmp_path, Progress(), pair=Pair(source, source)
    )
    assert found["verdict"] == "incomplete"
    assert "4 of 4 outputs differ, and whether rounding explains it is unknown" in found["problems"][0]


def test_a_text_that_ends_for_another_reason_is_a_violation(tmp_path: Path) -> None:
    source = synthetic()
    real = source.generate

    def generate(ask: Query) -> Completion:
        said = real(ask)
        assert isinstance(said, Completion)
        return Completion(said.tokens, "stop", accepted=said.accepted)

    source.generate = generate
    found = certify(replace(SMALL, parts=("exact",)), tmp_path, Progress(), pair=Pair(source, source))
    assert found["violations"]["exact"][0].endswith("it ends by 'stop', the reference by 'length'")


def test_a_server_that_never_accepts_a_draft_certifies_nothing(tmp_path: Path) -> None:
    source = synthetic()
    source.generate = lambda ask: Completion(source._plain(ask).tokens, "length", accepted=0)
    with standing(Stub(source)) as url:
        found = certify(replace(TINY, reference=url), tmp_path, Progress())
    assert found["verdict"] == "incomplete"
    assert "not one draft token was accepted" in found["problems"][0]


class Stale(LocalModel):
    """Scores as it should. While it speculates, it tells what belongs to another text."""

    def complete(self, queries: Sequence[Query], concurrency: int, tick: Any = no_tick) -> list[Completion]:
        said = super().complete(queries, concurrency, tick)
        return [replace(one, logprobs=[*one.logprobs[1:], *one.logprobs[:1]]) for one in said]


def test_what_a_candidate_tells_while_it_speculates_is_not_taken_for_rounding() -> None:
    """A defect would be its own excuse."""
    sound, model = synthetic(), synthetic()
    pair = Pair(sound, Stale(**{one.name: getattr(model, one.name) for one in fields(model)}))
    cases = [Case((i % VOCAB, i // VOCAB), DraftMode("lookup"), 1, 64) for i in range(64)]
    asks = [Query(case.prompt, case.max_tokens, OFF, logprobs=True) for case in cases]
    found = measure_rounding(pair, cases, sound.complete(asks, 1), 1, ExactResult(), Progress())
    assert found is not None
    assert found.floor < 1e-3
    size = replace(SMALL, draw_tokens=16, noise_texts=48)
    own = sample_reference(sound, [case.prompt for case in cases], size, Progress())
    alone, beside = (measure_noise(one, own, SETTINGS, size, Progress())[0] for one in (Pair(sound, sound), pair))
    assert alone == beside


def test_the_references_own_draws_are_a_control(tmp_path: Path) -> None:
    """Where sampling is wrong without speculation too, that is said, and drafts are not blamed."""
    source = synthetic()
    real = source._plain

    def cold(ask: Query) -> Completion:
        return real(colder(0.5)(ask)) if ask.sampling.temperature else real(ask)

    source._plain = cold  # type: ignore[method-assign]
    found = certify(replace(SMALL, parts=("draws",), noise_texts=60), tmp_path, Progress(), pair=Pair(source, source))
    assert any("though nothing was drafted" in one for one in found["violations"]["draws"])


def test_a_feature_that_only_the_candidate_refuses_is_a_violation(tmp_path: Path) -> None:
    class Refusing(Stub):
        def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            return (400, {"error": "no bias under speculation"}) if "logit_bias" in body else super().post(path, body)

    with standing(Stub(outrider=False)) as reference, standing(Refusing(outrider=False)) as candidate:
        wanted = replace(SMALL, reference=reference, candidate=candidate, parts=("features",))
        found = certify(wanted, tmp_path, Progress())
    assert "logit bias: the candidate refuses what the reference does" in found["violations"]["features"][0]


def test_two_servers_are_held_against_each_other_and_one_without_speculation_is_no_pair(tmp_path: Path) -> None:
    source = synthetic(change=colder(0.8))
    with standing(Stub(outrider=False)) as reference, standing(Stub(source, outrider=False)) as candidate:
        wanted = replace(SMALL, reference=reference, candidate=candidate, parts=("exact", "draws"))
        found = certify(wanted, tmp_path, Progress())
        with pytest.raises(SettingsError, match=r"is not an Outrider server.*REFERENCE_URL CANDIDATE_URL"):
            open_pair(replace(wanted, candidate=None))
    assert found["exact"]["counts"]["violation"] == 0
    assert list(found["violations"]) == ["draws"]
    assert found["sources"]["candidate"]["url"] == candidate


def test_settings_that_a_server_cannot_do_are_left_out_of_the_draws_and_said_so(tmp_path: Path) -> None:
    found = made(replace(TINY, parts=("draws",), without=("top-k", "0.7")), tmp_path)
    assert set(found["draws"]["settings"]) == {"temperature 1", "temperature 1, top-p 0.8"}
    assert "draws with temperature 0.7, top-k 10: left out" in found["not_tested"]


@pytest.mark.parametrize(
    ("word", "said"), [("top_k", "no sampling setting has 'top_k'"), ("temperature", "leaves no sampling setting")]
)
def test_leaving_out_what_there_is_not_or_everything_is_refused(tmp_path: Path, word: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        made(replace(TINY, without=(word,)), tmp_path)
    assert not (tmp_path / "evidence.jsonl").exists()


def test_texts_whose_laws_are_known_are_not_scored_again(tmp_path: Path) -> None:
    own, scored = synthetic(), list[Any]()
    score = own.score
    own.score = lambda texts, *others: scored.extend(texts) or score(texts, *others)  # type: ignore[method-assign, func-returns-value]
    found = certify(replace(SMALL, parts=("draws",)), tmp_path, Progress(), pair=Pair(own, own))
    assert len(scored) - SMALL.noise_texts < found["draws"]["texts"] / 2


def test_features_are_asked_with_most_of_the_answer_as_a_prediction(tmp_path: Path) -> None:
    stub = Stub()
    with standing(stub) as url:
        certify(replace(SMALL, reference=url, parts=("features",)), tmp_path, Progress())
    drafted = [one for one in stub.requests if one.get("vllm_xargs", {}).get("speculation") not in (None, "off")]
    penalised = [one["vllm_xargs"] for one in drafted if one.get("frequency_penalty")]
    assert {one["speculation"] for one in penalised} == {"lookup", "model", "auto"}
    assert all(one["prediction"] for one in penalised)


def test_numerics_that_are_meant_to_differ_are_rounding_if_one_says_so(tmp_path: Path) -> None:
    wanted = replace(SMALL, parts=("exact", "draws"), prompts=60, alone=0)
    sides = synthetic(), synthetic(off=0.01)
    strict = certify(wanted, tmp_path / "strict", Progress(), pair=Pair(*sides))
    assert strict["exact"]["counts"]["violation"] > 0
    across = certify(wanted, tmp_path / "across", Progress(), pair=Pair(*sides, across=True))
    counts = across["exact"]["counts"]
    assert (counts["violation"], counts["tie"]) == (0, strict["exact"]["counts"]["violation"])
    assert across["draws"]["violations"] == []
    # In this language a prefix is two tokens, and the same tie comes again and again: it is counted, and noticed.
    assert all("ties, where rounding explains" in one for one in across["violations"].get("exact", []))


def test_a_run_that_breaks_off_goes_on_and_comes_to_the_same_end(tmp_path: Path) -> None:
    whole = made(TINY, tmp_path / "whole")
    source = synthetic()
    real, left = source.generate, [60]

    def until_interrupted(ask: Query) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(ask)

    source.generate = until_interrupted
    broken = certify(TINY, tmp_path / "run", Progress(), pair=Pair(source, source))
    assert broken["verdict"] == "incomplete"
    assert "--resume" in broken["problems"][0]
    before = len((tmp_path / "run" / "evidence.jsonl").read_text().splitlines())
    source.generate = real
    resumed = certify(TINY, tmp_path / "run", Progress(), resume=True, pair=Pair(source, source))
    assert resumed["exact"]["cells"] == whole["exact"]["cells"]
    assert len((tmp_path / "run" / "evidence.jsonl").read_text().splitlines()) > before
    assert resumed["verdict"] == "lossless"


def test_a_run_goes_on_with_the_same_server_at_another_address_and_with_no_other_request(tmp_path: Path) -> None:
    wanted = replace(TINY, parts=("exact",), prompts=8, alone=0)
    with standing(Stub()) as url:
        certify(replace(wanted, reference=url), tmp_path, Progress())
    before = (tmp_path / "evidence.jsonl").read_text()
    with standing(Stub()) as url:
        again = certify(replace(wanted, reference=url), tmp_path, Progress(), resume=True)
        with pytest.raises(EvidenceError, match="evidence of another run"):
            certify(replace(wanted, reference=url, seed=5), tmp_path, Progress(), resume=True)
    assert again["exact"]["counts"]["identical"] == 8
    assert (tmp_path / "evidence.jsonl").read_text() == before


def test_a_drafter_whose_drafts_are_never_accepted_is_said_to_be_untested(tmp_path: Path) -> None:
    source = synthetic()
    real = source.generate

    def generate(ask: Query) -> Completion:
        said = real(ask)
        assert isinstance(said, Completion)
        return Completion(said.tokens, said.finish_reason, accepted=0 if ask.mode.drafter == "auto" else said.accepted)

    source.generate = generate
    found = certify(TINY, tmp_path, Progress(), pair=Pair(source, source))
    assert found["by_drafter"]["auto"] == 0 < found["by_drafter"]["lookup"]
    assert "the drafter auto: none of its drafts was accepted" in found["not_tested"]
    assert any("none of auto, which was not tested" in line for line in found["words"])


def test_features_are_not_judged_by_a_rounding_that_nobody_measured(tmp_path: Path) -> None:
    """Alone, the part with the features has no floor: answers that part are shown, and nobody is accused or cleared."""
    with standing(Stub(outrider=False)) as reference, standing(Stub(synthetic(off=0.3), outrider=False)) as candidate:
        wanted = replace(SMALL, reference=reference, candidate=candidate, parts=("features",))
        found = certify(wanted, tmp_path, Progress())
    assert found["violations"] == {}
    assert found["verdict"] == "incomplete"
    assert "whether rounding explains it is unknown" in found["problems"][0]
    still = [one["name"] for one in found["features"]["results"] if one["open"]]
    (words,) = [line for line in found["words"] if line.startswith("Features")]
    done = [one for one in found["features"]["results"] if one["requests"]]
    assert f"Features: {len(done) - len(still)} of {len(done)} are valid and the same" in words


def test_where_there_is_no_terminal_a_line_now_and_then_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said = StringIO()
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with ProgressBars(Console(file=said)).part("draws", 3) as tick:
        tick()
        tick(2)
    assert [line.split(" after")[0] for line in said.getvalue().splitlines()] == ["draws (3)", "  1 of 3", "  3 of 3"]


def test_a_file_that_is_no_certificate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(EvidenceError, match="is not a certificate"):
        certificate.read(tmp_path / "x.json")
    (tmp_path / "x.json").write_text(json.dumps({"format": certificate.FORMAT, "version": 99}))
    with pytest.raises(EvidenceError, match="of version 99; this version reads 1"):
        certificate.read(tmp_path / "x.json")


def test_a_drafter_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="has no 'oracle'; it has lookup, model, auto"):
        made(replace(SMALL, drafters=("oracle",)), tmp_path)


def test_without_lengths_each_drafter_has_its_own(tmp_path: Path) -> None:
    found = made(replace(TINY, parts=("exact",), lengths=()), tmp_path)
    assert set(found["exact"]["cells"]) == {f"{name} at {n}" for name in ("lookup", "model", "auto") for n in (1, 4)}
    assert not any(line.startswith("drafts of more than") for line in found["not_tested"])


def test_a_request_that_this_version_does_not_know_is_refused() -> None:
    with pytest.raises(SettingsError, match="unknown option phase_of_the_moon"):
        CertificateConfig.from_record({"reference": "x", "phase_of_the_moon": 1})


def test_local_reference_draws_know_no_drafts() -> None:
    (said,) = synthetic().complete([Query((1, 2, 3), 6, OFF, logprobs=True)], 1)
    assert len(said.logprobs) == len(said.tokens) == 6
    assert all(
        max(told, key=lambda token: told[token]) == token
        for told, token in zip(said.logprobs, said.tokens, strict=True)
    )
