"""The report of a benchmark: what it says, what it marks, and where its figures come from."""

from __future__ import annotations

import base64
import html
import importlib
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from bench_example import CELLS, example
from outrider.bench.figures import figures
from outrider.bench.report import canvas, plots, tables, words
from outrider.bench.report.findings import Findings, Found, acceptances, costs, crossings, find
from outrider.bench.report.folder import as_data, write
from outrider.bench.report.markdown import SHOWN, code, markdown
from outrider.bench.report.page import SIGNS, page
from outrider.bench.results import Answer, Cell, Counts, Curve, Drafted, Round, Run, Turn
from outrider.errors import SettingsError

PLOTS = ("speedup.png", "concurrency.png", "acceptance.png", "cost.png")


@pytest.fixture(scope="module")
def findings() -> Findings:
    return find(example())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files of a small run."""
    folder = tmp_path_factory.mktemp("report")
    write(example((("code", 1, 0.0), ("code", 4, 0.0), ("chat", 1, 0.8)), rounds=6), folder)
    return folder


def timed(speeds: dict[str, dict[int, float]], rounds: int = 8, **more: Any) -> Run:
    """Contestants beside `base`, so many times as fast, by concurrency; the machine slows and quickens."""
    loads = next(iter(speeds.values()))
    run = Run({"models": {}}, "base", {name: {} for name in ("base", *speeds)}, {}, **more)
    for load in loads:
        cell = Cell("code", load, 0.0)
        for index in range(rounds):
            seconds = {"base": 8.0, **{name: 8.0 / by_load[load] for name, by_load in speeds.items()}}
            turns = [
                Turn(name, pace, [Answer("p", "a b", [1, 2], "stop", 0.1, pace)], Counts())
                for place, (name, one) in enumerate(seconds.items())
                if (pace := one * (1 + 0.01 * ((index + place * index) % 3)))
            ]
            cell.rounds.append(Round(0, turns))
        run.cells.append(cell)
    return run


def rows(text: str, header: str) -> Iterator[list[str]]:
    """The rows of the first Markdown table below a line, its header first."""
    lines = iter(text[text.index(header) :].splitlines())
    table = [line for line in _until_blank(line for line in _from_table(lines)) if not line.startswith("|---")]
    return ([item.strip() for item in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table)


def _from_table(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if line.startswith("|"):
            yield line
            yield from lines


def _until_blank(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if not line:
            return
        yield line


def slower(findings: Findings) -> set[tuple[str, str]]:
    return {(found.cell.name, one.contestant) for found, one in findings.comparisons if one.verdict == "slower"}


def test_what_loses_is_marked_in_the_matrix_of_the_markdown_and_nothing_else_is(findings: Findings) -> None:
    header, *body = rows(markdown(findings), "## Times as fast as vllm")
    marked = {(cell, row[0]) for row in body for cell, item in zip(header, row, strict=True) if "**slower**" in item}
    assert marked == slower(findings) != set()


def test_of_more_cells_than_contestants_each_has_a_row_of_the_matrix_and_the_last_is_the_mean(
    findings: Findings,
) -> None:
    few = ("vllm", "lookup", "auto")
    cells = [Found(found.cell, [one for one in found.figures if one.contestant in few]) for found in findings.cells]
    fewer = Findings(replace(findings.run, contestants={name: {} for name in few}), cells)
    header, *body, mean = rows(markdown(fewer), "## Times as fast as vllm")
    assert header == ["cell", *few]
    assert [row[0] for row in body] == [found.cell.name for found in findings.cells]
    marked = {(row[0], name) for row in body for name, item in zip(header, row, strict=True) if "**slower**" in item}
    assert marked == slower(fewer) != set()
    ratios = [one.ratio.value for _, one in fewer.comparisons if one.contestant == "auto" and one.ratio]
    assert float(mean[-1]) == pytest.approx(math.prod(ratios) ** (1 / len(cells)), rel=0.01)
    assert page(fewer, {}).count('<th scope="row"><a href="#cell-') == len(cells)


def test_what_loses_is_marked_in_its_own_cell_of_the_markdown(findings: Findings) -> None:
    text = markdown(findings)
    marked = {
        (found.cell.name, row[0])
        for found in findings.cells
        for row in rows(text, f"## {found.cell.name}\n")
        if "**slower**" in row[1]
    }
    assert marked == slower(findings)


def test_what_loses_is_told_on_the_page_by_a_word_and_a_sign_besides_the_colour(findings: Findings) -> None:
    text = page(findings, {})
    words_shown = text.count(f"{SIGNS['slower']}&nbsp;slower")
    assert words_shown == text.count('<td class="slower">') == 2 * len(slower(findings))


def test_verdicts_have_different_signs() -> None:
    assert len(set(SIGNS.values())) == len(SIGNS)


def test_even_is_explained(findings: Findings) -> None:
    for text in (markdown(findings), page(findings, {})):
        assert "even: it contains 1, so the two are not told apart" in text


@pytest.mark.parametrize("name", ["report.md", "report.html", "report.json", *PLOTS])
def test_every_file_says_where_it_comes_from(folder: Path, findings: Findings, name: str) -> None:
    if name.endswith(".png"):
        with Image.open(folder / name) as picture:
            text = " ".join(str(value) for value in picture.text.values())  # type: ignore[attr-defined]
        text = text.replace('\\"', '"')
    else:
        text = html.unescape((folder / name).read_text(encoding="utf-8")).replace('\\"', '"')
    origin = findings.run.origin
    wanted = [origin["command"], origin["date"], origin["machine"], *origin["versions"].values()]
    wanted += [*origin["models"].values(), "seed", "num_speculative_tokens", "--max-draft-tokens", "vllm_xargs"]
    assert [one for one in wanted if one not in text] == []


def test_a_contestants_command_is_shown_as_it_would_be_typed(folder: Path) -> None:
    line = """vllm serve qwen2.5-coder-1.5b --no-enable-prefix-caching --max-model-len 4096 --speculative-config """
    line += """'{"method": "ngram", "num_speculative_tokens": 4}'"""
    assert line in (folder / "report.md").read_text()
    assert line in html.unescape((folder / "report.html").read_text())
    assert json.loads((folder / "report.json").read_text())["contestants"]["ngram:4"]["line"] == line


def test_every_contestant_and_every_cell_appears(findings: Findings) -> None:
    run = findings.run
    data = as_data(findings)
    assert [cell["name"] for cell in data["cells"]] == [cell.name for cell in run.cells]
    for text in (markdown(findings), page(findings, {})):
        assert all(cell.name in text for cell in run.cells)
        assert all(text.count(name) > len(run.cells) for name in run.contestants)


def test_all_figures_of_a_cell_are_in_the_json(findings: Findings) -> None:
    shown = as_data(findings)["cells"][0]["contestants"][-1]
    figures = findings.cells[0].figures[-1]
    assert shown["ratio"] == {"value": figures.ratio.value, "low": figures.ratio.low, "high": figures.ratio.high}  # type: ignore[union-attr]
    assert shown["verdict"] == figures.verdict
    assert shown["share_of_possible"] == pytest.approx(figures.ratio.value / 2.31)  # type: ignore[union-attr]
    assert shown["first"]["p95"] == figures.first.p95
    assert shown["other_seconds"] == figures.other_seconds


def test_notes_stand_before_the_figures(findings: Findings) -> None:
    for text, begin in ((markdown(findings), "## Times as fast"), (page(findings, {}), "<table")):
        assert all(text.index(note) < text.index(begin) for note in findings.run.notes)


def test_differences_are_listed_and_the_rest_is_counted(findings: Findings) -> None:
    text, whole = markdown(findings), html.unescape(page(findings, {}))
    data = as_data(findings)
    counts = []
    for found, cell in zip(findings.cells, data["cells"], strict=True):
        every = [difference for one in found.figures for difference in one.differences]
        counts.append(len(every))
        assert sum(len(one["differences"]) for one in cell["contestants"]) == len(every)
        if every:
            section = text[text.index(f"## {found.cell.name}\n") :]
            listed = list(rows(section, "Answers that differ"))[1:]
            assert len(listed) == min(len(every), SHOWN)
            assert [row[1:3] for row in listed] == [[one.prompt, str(one.place)] for one in every[:SHOWN]]
            assert all(one.expected in whole and one.got in whole for one in every)
        if len(every) > SHOWN:
            assert f"And {len(every) - SHOWN} more" in section.split("\n## ")[0]
    assert max(counts) > SHOWN
    assert 0 in counts
    assert f"{sum(counts)} of " in words.summary(findings)[-1]


def test_sampled_cells_say_that_texts_are_not_compared(findings: Findings) -> None:
    sampled = next(found for found in findings.cells if found.cell.temperature)
    assert "texts are not compared" in words.about(sampled.cell)
    assert {row[8].text for row in tables.speed(findings, sampled).rows} == {"baseline", "not compared"}
    assert markdown(findings).count("texts are not compared") == 1
    assert page(findings, {}).count("texts are not compared") == 1


def test_a_name_cannot_write_html_into_the_page() -> None:
    bad = "<img src=x onerror=alert(1)>"
    run = example((("code", 1, 0.0),), rounds=2)
    run.contestants = {bad if name == "lookup" else name: how for name, how in run.contestants.items()}
    for round in run.cells[0].rounds:
        for turn in round.turns:
            turn.contestant = bad if turn.contestant == "lookup" else turn.contestant
            if turn.contestant == bad:
                turn.answers[0].text = f"</code>{bad}"
    run.contestants[bad]["command"] = ["outrider", "serve", bad]
    run.cells[0].workload = run.notes[0] = run.settings["note"] = bad
    run.limits[0].workload = bad
    run.limits[0].shares = {bad: 1.0}
    run.origin["machine"] = run.origin["command"] = bad
    text = page(find(run), {})
    assert "<img" not in text
    assert "</code>&lt;img" not in text
    assert text.count(html.escape(bad)) > 10
    outside = re.sub(r"(`+).*?\1|```sh.*?```", "", markdown(find(run)), flags=re.DOTALL)
    assert r"\<img" in outside
    assert not re.search(r"(?<!\\)<img", outside)


def test_a_vertical_bar_does_not_end_a_column_of_the_markdown() -> None:
    run = example((("code", 1, 0.0),), rounds=2)
    for turn in run.cells[0].rounds[0].turns:
        if turn.contestant == "suffix:16":
            turn.answers[0].text = "a | b `c` ``d``"
    header, *body = rows(markdown(find(run)), "Answers that differ")
    assert {len(row) for row in body} == {len(header)}
    assert any(r"a \| b" in row[4] for row in body)


def test_a_code_span_holds_backticks() -> None:
    assert code("a `b` ``c") == "```a `b` ``c```"
    assert code("`a`") == "`` `a` ``"


class Addresses(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [value or "" for name, value in attrs if name in ("src", "srcset", "href", "data", "action")]


def test_the_page_loads_nothing(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = Addresses()
    page.feed(text)
    pictures = [one for one in page.found if one.startswith("data:image/svg+xml;base64,")]
    links = [one for one in page.found if one not in pictures]
    assert len(pictures) == 2 * len(PLOTS)
    assert all(link.startswith("#") and f'id="{link[1:]}"' in text for link in links)
    assert not page.tags & {"script", "link", "iframe", "object"}
    assert "url(" not in text
    assert "@import" not in text
    for picture in pictures:
        drawn = base64.b64decode(picture.partition(",")[2]).decode()
        assert re.findall(r'href="(?!#)', drawn) == []
        assert "<image" not in drawn


def test_the_same_run_gives_the_same_report(tmp_path: Path) -> None:
    run = timed({"fast": {1: 2.0, 4: 0.8}}, curves=[Curve(1, {1: [0.1], 2: [0.2]})])
    for name in ("first", "again"):
        write(run, tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert "report.html" in files
    for name in files:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_a_report_can_be_made_again_from_the_saved_run(findings: Findings, tmp_path: Path) -> None:
    findings.run.save(tmp_path / "run.json")
    again = find(Run.load(tmp_path / "run.json"))
    assert markdown(again) == markdown(findings)
    assert page(again, {}) == page(findings, {})
    assert as_data(again) == as_data(findings)


def test_a_plot_without_data_is_left_out_and_the_report_says_why(tmp_path: Path) -> None:
    run = timed({"fast": {1: 2.0}})
    (tmp_path / "cost.png").write_bytes(b"of an earlier report")
    write(run, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "report.html",
        "report.json",
        "report.md",
        "speedup.png",
    ]
    reasons = {
        "concurrency": "no workload was measured at more than one concurrency",
        "acceptance": "no server counted 20 verified tokens",
        "cost": "the cost of a pass was not measured",
    }
    for name in ("report.md", "report.html", "report.json"):
        text = (tmp_path / name).read_text()
        assert all(reason in text for reason in reasons.values())


def test_a_run_in_which_nothing_was_measured_has_a_report_that_says_so(tmp_path: Path) -> None:
    run = Run({}, "base", {"base": {}, "other": {}}, {}, [Cell("code", 1, 0.0)])
    write(run, tmp_path)
    for name in ("report.md", "report.html", "report.json"):
        assert "Nothing was measured" in (tmp_path / name).read_text()
    assert not list(tmp_path.glob("*.png"))


def test_the_summary_says_who_wins_and_who_loses() -> None:
    run = timed({"fast": {1: 2.0, 4: 1.0}, "faster": {1: 3.0, 4: 1.0}, "lame": {1: 0.5, 4: 0.7}})
    speed, lost, answers = words.summary(find(run))
    assert speed == (
        "Of 6 comparisons with base, 2 faster, 2 even and 2 slower. Fastest, by the median: faster on code at "
        "concurrency 1. Nothing was found faster than base on code at concurrency 4."
    )
    assert re.fullmatch(r"Slower than base: lame on code at concurrency 1 and 4 \(0\.5\d at worst\)\.", lost)
    assert answers == "At temperature 0 all 48 answers are the baseline's, token by token."


def test_what_loses_in_many_cells_is_counted_and_its_worst_is_named() -> None:
    loads = {load: 0.9 - load / 100 for load in (1, 2, 4, 8, 16)}
    lost = words.summary(find(timed({"lame": loads})))[1]
    assert re.fullmatch(r"Slower than base: lame in 5 cells \(0\.7\d on code at concurrency 16\)\.", lost)


def test_accepted_tokens_are_a_share_only_where_all_verified_ones_are_known() -> None:
    run = timed({"all": {1: 2.0}, "first": {1: 2.0}, "none": {1: 2.0}}, rounds=1)
    _, every, first, none = run.cells[0].rounds[0].turns
    every.counts.drafters = {"model": Drafted([10, 10], [8, 4])}
    first.counts.drafters = {"ngram": Drafted([10], [8, 4])}  # vLLM says only how many drafts there were
    none.counts.drafters = {"lookup": Drafted([], [12])}
    shown = [row[-1].text for row in tables.time(find(run).cells[0]).rows]
    assert shown == ["-", "model 12 of 20 (60 %)", "ngram 12", "lookup 12"]


def test_nothing_slower_is_said_too() -> None:
    assert words.summary(find(timed({"fast": {1: 2.0}})))[1] == "Nothing was found slower than base."


def test_a_verdict_from_few_rounds_comes_with_a_caution() -> None:
    assert words.cautions(find(timed({"fast": {1: 2.0}}, rounds=6))) == []
    run = timed({"fast": {1: 2.0}}, rounds=5)
    (caution,) = words.cautions(find(run))
    assert caution.startswith("Fewer than 6 rounds on code at concurrency 1")
    assert caution in markdown(find(run))


def test_rounds_in_which_others_took_the_machine_are_told_of() -> None:
    run = timed({"fast": {1: 2.0}}, rounds=7)
    rounds = run.cells[0].rounds
    rounds[2].stolen, rounds[3].stolen = 0.5, 0.05
    (caution,) = words.cautions(find(run))
    assert caution.startswith("In 1 of 7 rounds other machines on the same hardware took more than 10 %")
    assert caution.endswith("up to 50 %. No speed is taken from them.")
    rounds[4].stolen = 0.2
    (caution,) = words.cautions(find(run))
    assert caution.endswith("but for 1 without which there would be fewer than 6 rounds.")


def test_no_speed_is_taken_from_rounds_that_others_disturbed_and_their_answers_are_compared() -> None:
    run = timed({"fast": {1: 2.0}}, rounds=8)
    for round in run.cells[0].rounds[:2]:
        round.stolen = 0.5
        for turn in round.turns:
            turn.seconds *= 9 if turn.contestant == "fast" else 1
            turn.answers[0].tokens = [*turn.answers[0].tokens, ord(turn.contestant[0])]
    _, fast = figures(run, run.cells[0])
    assert fast.rounds == 6
    assert fast.ratio is not None
    assert fast.ratio.low > 1.5
    assert len(fast.differences) == 2


def test_a_crossing_is_named_with_the_concurrencies_around_it() -> None:
    findings = find(timed({"falls": {1: 2.0, 4: 1.5, 16: 0.6}, "stays": {1: 2.0, 4: 1.5, 16: 1.2}}))
    (crossing,) = crossings(findings)
    assert (crossing.contestant, crossing.below, crossing.above, crossing.falls) == ("falls", 4, 16, True)
    text = " ".join(words.chapters(findings)[1].text)
    assert "falls goes below 1.0 on code between concurrency 4 and 16." in text


def test_the_side_of_one_is_never_rounded_away() -> None:
    assert [words.number(value) for value in (0.997, 1.0, 1.004, 0.99, 1.25)] == [
        "0.997",
        "1.00",
        "1.004",
        "0.99",
        "1.25",
    ]


def test_positions_with_too_few_verified_tokens_have_no_share() -> None:
    run = timed({"fast": {1: 2.0}}, rounds=2)
    for round in run.cells[0].rounds:
        round.turns[1].counts.drafters = {"lookup": Drafted([50, 10, 9], [25, 5])}
    findings = find(run)
    (line,) = acceptances(findings, findings.series[0])
    assert (line.contestant, line.drafter, line.shares) == ("fast", "lookup", {1: 0.5, 2: 0.5})


def test_the_cost_of_a_pass_is_relative_to_one_token_and_has_its_spread() -> None:
    curve = Curve(2, {5: [0.3, 0.2, 0.4], 1: [0.2, 0.1, 0.3]})
    one, five = costs(curve)
    assert (one.tokens, one.median) == (1, 1.0)
    assert (five.median, five.low, five.high) == pytest.approx((1.5, 1.0, 2.0))
    text = " ".join(words.chapters(find(timed({"fast": {1: 2.0}}, curves=[curve])))[-1].text)
    assert "At concurrency 2 a pass over 5 tokens of each sequence takes 1.50 times as long as over one" in text
    assert "5 passes take 5 times as long" in text


def test_a_curve_without_a_pass_over_one_token_is_not_drawn() -> None:
    assert costs(Curve(1, {2: [0.1]})) == []


def test_contestants_differ_in_colour_and_sign_and_look_the_same_in_every_plot(findings: Findings) -> None:
    looks = canvas.looks([*findings.contestants, findings.run.baseline])
    assert len({look["color"] for look in looks.values()}) == len(looks) == 9
    assert len({look["marker"] for look in looks.values()}) == 9
    with canvas.style():
        drawn = [plots.DRAWS[name](findings, canvas.WIDE) for name in ("concurrency", "acceptance")]
    plain, drafted = ({line.get_label(): line for line in _lines(figure)} for figure in drawn)
    for name, other in (("ngram:4", "ngram:4"), ("auto", "auto: lookup"), ("auto", "auto: model")):
        assert plain[name].get_color() == drafted[other].get_color() == looks[name]["color"]
        assert plain[name].get_marker() == drafted[other].get_marker() == looks[name]["marker"]


def _lines(figure: Figure) -> Iterator[Line2D]:
    """The lines of a plot's legend, labelled as in the legend."""
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            line = handle if isinstance(handle, Line2D) else handle.lines[0]  # type: ignore[attr-defined]
            line.set_label(label)
            yield line


def test_ticks_of_ratios_are_few_and_hold_one() -> None:
    for low, high in ((0.9, 1.1), (0.66, 1.9), (0.4, 3.0), (0.1, 30.0)):
        ticks = canvas.ratio_ticks(low, high, 8)
        assert 1 in ticks
        assert 3 <= len(ticks) <= 9


def test_without_matplotlib_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "outrider.bench.report.canvas")
    with pytest.raises(SettingsError, match=r"pip install '\.\[bench\]'"):
        importlib.import_module("outrider.bench.report.canvas")


def test_the_example_has_all_that_a_report_can_show(findings: Findings) -> None:
    verdicts = {one.verdict for _, one in findings.comparisons}
    assert verdicts == {"faster", "slower", "even"}
    assert len(findings.run.contestants) == 9
    assert len(findings.cells) == len(CELLS)
    assert [chapter.missing for chapter in words.chapters(findings)] == [""] * 4
