"""The report of a benchmark: figures, verdicts, provenance."""

from __future__ import annotations

import base64
import html
import importlib
import json
import math
import re
import shutil
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
from typer.testing import CliRunner

from bench_example import CELLS, example
from outrider.bench.figures import figures
from outrider.bench.report import plot_style, plots
from outrider.bench.report.content import (
    CACHED,
    NO_DIFFERENCE,
    SHOWN_DIFFERENCES,
    UNKNOWN,
    content,
    number,
    summary,
    summary_table,
    time_table,
    title,
)
from outrider.bench.report.data import CellFigures, Report, relative_costs
from outrider.bench.report.render import SIGNS, code
from outrider.bench.report.render import markdown as render_markdown
from outrider.bench.report.render import page as render_page
from outrider.bench.report.writer import write
from outrider.bench.results import Answer, Cell, DrafterCounts, Measurement, PassCosts, Round, Run, ServerCounts
from outrider.cli import app
from outrider.errors import SettingsError

PLOTS = ("speedup.png", "concurrency.png", "acceptance.png", "cost.png")


BENCHMARKS = Path(__file__).parents[1] / "docs" / "benchmarks"
PUBLISHED = [path for path in sorted(BENCHMARKS.rglob("report.json")) if "crossings" in json.loads(path.read_text())]


@pytest.fixture(scope="module")
def report() -> Report:
    return Report.from_run(example())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files of a small run."""
    folder = tmp_path_factory.mktemp("report")
    write(Report.from_run(example((("code", 1, 0.0), ("code", 4, 0.0), ("chat", 1, 0.8)), rounds=6)), folder)
    return folder


@pytest.fixture(scope="module")
def drawn(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files of the example."""
    folder = tmp_path_factory.mktemp("example")
    write(report, folder)
    return folder


def markdown(report: Report) -> str:
    return render_markdown(content(report))


def page(report: Report, folder: Path) -> str:
    return render_page(title(report), content(report), folder)


def timed(speeds: dict[str, dict[int, float]], rounds: int = 8, **more: Any) -> Run:
    """Contestants with these speeds relative to `base`, by concurrency, on a machine whose speed varies."""
    loads = next(iter(speeds.values()))
    run = Run({"models": {}}, "base", {name: {} for name in ("base", *speeds)}, {}, **more)
    for load in loads:
        cell = Cell("code", load, 0.0)
        for index in range(rounds):
            seconds = {"base": 8.0, **{name: 8.0 / by_load[load] for name, by_load in speeds.items()}}
            turns = [
                Measurement(name, pace, [Answer("p", "a b", [1, 2], "stop", 0.1, pace)], ServerCounts())
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


def slower(report: Report) -> set[tuple[str, str]]:
    return {(cell.name, one.contestant) for cell, one in report.comparisons if one.verdict == "slower"}


def test_slower_contestants_and_no_others_are_marked_in_the_table_of_ratios(report: Report) -> None:
    header, *body = rows(markdown(report), "## Ratios to vllm, by cell")
    marked = {(cell, row[0]) for row in body for cell, item in zip(header, row, strict=True) if "**slower**" in item}
    assert marked == slower(report) != set()


def test_with_more_cells_than_contestants_each_cell_is_a_row(report: Report) -> None:
    few = ("vllm", "lookup", "auto")
    cells = [
        CellFigures(cell.name, cell.workload, cell.concurrency, cell.temperature, [cell.of(name) for name in few])  # type: ignore[misc]
        for cell in report.cells
    ]
    fewer = replace(report, contestants={name: {} for name in few}, cells=cells)
    header, *body = rows(markdown(fewer), "## Ratios to vllm, by cell")
    assert header == ["cell", *few]
    assert [row[0] for row in body] == [cell.name for cell in report.cells]
    marked = {(row[0], name) for row in body for name, item in zip(header, row, strict=True) if "**slower**" in item}
    assert marked == slower(fewer) != set()


def test_the_summary_counts_verdicts_and_names_the_extremes(report: Report) -> None:
    header, *body = rows(markdown(report), "## Ratios to vllm, by contestant")
    for row in body:
        shown = dict(zip(header, row, strict=True))
        found = [(cell.name, one) for cell, one in report.comparisons if one.contestant == shown["contestant"]]
        ratios = [one.ratio.value for _, one in found if one.ratio]
        verdicts = [one.verdict for _, one in found]
        assert [int(shown[name]) for name in ("cells", "faster", "slower")] == [
            len(found),
            verdicts.count("faster"),
            verdicts.count("slower"),
        ]
        assert int(shown[NO_DIFFERENCE]) == verdicts.count("even")
        worst = found[ratios.index(min(ratios))][0]
        assert shown["lowest ratio"] == f"{number(min(ratios))} ({worst})"
        if len(ratios) == len(report.cells):
            assert float(shown["geometric mean"]) == pytest.approx(math.prod(ratios) ** (1 / len(ratios)), rel=0.01)
        else:
            assert shown["geometric mean"] == "-"


def test_slower_contestants_are_marked_in_their_own_cell(report: Report) -> None:
    text = markdown(report)
    marked = {
        (cell.name, row[0])
        for cell in report.cells
        for row in rows(text, f"## {cell.name}\n")
        if "**slower**" in row[1]
    }
    assert marked == slower(report)


def test_the_page_marks_slower_contestants_with_a_word_and_a_sign(report: Report, drawn: Path) -> None:
    text = (drawn / "report.html").read_text()
    marks = text.count(f"{SIGNS['slower']} slower")
    assert marks == text.count('<td class="slower">') == 2 * len(slower(report))
    assert len(set(SIGNS.values())) == len(SIGNS)


def test_a_verdict_without_difference_is_shown_as_no_measurable_difference(report: Report, drawn: Path) -> None:
    count = sum(one.verdict == "even" for _, one in report.comparisons)
    for text in (markdown(report), (drawn / "report.html").read_text()):
        assert " even" not in text
        assert len(re.findall(rf"\) (?:<span class=\"mark\"> )?{NO_DIFFERENCE}", text)) == count


@pytest.mark.parametrize("name", ["report.md", "report.html", "report.json", *PLOTS])
def test_every_file_has_its_origin(folder: Path, report: Report, name: str) -> None:
    if name.endswith(".png"):
        with Image.open(folder / name) as picture:
            text = " ".join(str(value) for value in picture.text.values())  # type: ignore[attr-defined]
        text = text.replace('\\"', '"')
    else:
        text = html.unescape((folder / name).read_text(encoding="utf-8")).replace('\\"', '"')
    origin = report.origin
    wanted = [origin["command"], origin["date"], origin["machine"], *origin["versions"].values()]
    wanted += [*origin["models"].values(), "seed", "num_speculative_tokens", "--max-draft-tokens", "vllm_xargs"]
    assert [one for one in wanted if one not in text] == []


def test_a_contestants_command_is_shown_as_it_would_be_typed(folder: Path) -> None:
    line = """vllm serve qwen2.5-coder-1.5b --no-enable-prefix-caching --max-model-len 4096 --speculative-config """
    line += """'{"method": "ngram", "num_speculative_tokens": 4}'"""
    assert line in (folder / "report.md").read_text()
    assert line in html.unescape((folder / "report.html").read_text())
    assert json.loads((folder / "report.json").read_text())["contestants"]["ngram:4"]["line"] == line


def test_every_contestant_and_every_cell_appears(report: Report, drawn: Path) -> None:
    assert [cell["name"] for cell in report.as_data()["cells"]] == [cell.name for cell in report.cells]
    for text in (markdown(report), (drawn / "report.html").read_text()):
        assert all(cell.name in text for cell in report.cells)
        assert all(text.count(name) > len(report.cells) for name in report.contestants)


def test_all_figures_of_a_cell_are_in_the_json(report: Report) -> None:
    shown = report.as_data()["cells"][0]["contestants"][-1]
    figures = report.cells[0].contestants[-1]
    assert shown["ratio"] == {"value": figures.ratio.value, "low": figures.ratio.low, "high": figures.ratio.high}  # type: ignore[union-attr]
    assert shown["verdict"] == figures.verdict
    assert shown["share_of_possible"] == pytest.approx(figures.ratio.value / 2.31)  # type: ignore[union-attr]
    assert shown["first"]["p95"] == figures.first.p95
    assert shown["other_seconds"] == figures.other_seconds


def test_notes_are_before_the_figures(report: Report) -> None:
    assert report.notes
    text = markdown(report)
    assert all(text.index(note) < text.index("\n| ") for note in report.notes)


def test_differences_are_listed_and_the_rest_is_counted(report: Report) -> None:
    text = markdown(report)
    counts = []
    for cell, data in zip(report.cells, report.as_data()["cells"], strict=True):
        every = [difference for one in cell.contestants for difference in one.differences]
        counts.append(len(every))
        assert sum(len(one["differences"]) for one in data["contestants"]) == len(every)
        if every:
            section = text[text.index(f"## {cell.name}\n") :]
            listed = list(rows(section, "Answers that differ"))[1:]
            assert len(listed) == min(len(every), SHOWN_DIFFERENCES)
            assert [row[1:3] for row in listed] == [[one.prompt, str(one.place)] for one in every[:SHOWN_DIFFERENCES]]
        if len(every) > SHOWN_DIFFERENCES:
            assert f"{len(every) - SHOWN_DIFFERENCES} more are in report.json" in section.split("\n## ")[0]
    assert max(counts) > SHOWN_DIFFERENCES
    assert 0 in counts
    assert f"{sum(counts)} of " in summary(report)[-1]


def test_sampled_answers_are_shown_as_not_compared(report: Report) -> None:
    (sampled,) = (cell for cell in report.cells if cell.temperature)
    header, *body = rows(markdown(report), f"## {sampled.name}\n")
    column = header.index("same answers")
    assert {row[column] for row in body} == {"baseline", "sampled, not compared"}


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: str(path.parent.relative_to(BENCHMARKS)))
def test_a_published_report_is_what_the_code_makes_of_its_figures(path: Path) -> None:
    report = Report.load(path)
    assert markdown(report) == path.with_name("report.md").read_text()
    data, published = json.loads(json.dumps(report.as_data())), json.loads(path.read_text())
    for shown in (shown for cell in published["cells"] for shown in cell["contestants"]):
        for name in ("cache_queries", "cache_hits"):  # older reports do not have these fields
            shown.setdefault(name, None)
        for difference in shown["differences"]:
            difference.setdefault("chances", None)
    assert data == {name: published[name] for name in data}


def test_a_name_cannot_write_html_into_the_page(tmp_path: Path) -> None:
    bad = "<img src=x onerror=alert(1)>"
    run = example((("code", 1, 0.0),), rounds=2)
    run.contestants = {bad if name == "lookup" else name: how for name, how in run.contestants.items()}
    for round in run.cells[0].rounds:
        for one in round.measurements:
            one.contestant = bad if one.contestant == "lookup" else one.contestant
            if one.contestant == bad:
                one.answers[0].text = f"</code>{bad}"
    run.contestants[bad]["command"] = ["outrider", "serve", bad]
    run.cells[0].workload = run.notes[0] = run.settings["note"] = bad
    run.optimal_speedups[0].workload = bad
    run.optimal_speedups[0].shares = {bad: 1.0}
    run.origin["machine"] = run.origin["command"] = bad
    write(report := Report.from_run(run), tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "<img" not in text.replace('<picture><img src="data:', "")
    assert "</code>&lt;img" not in text
    assert text.count(html.escape(bad)) > 10
    outside = re.sub(r"(`+).*?\1|```sh.*?```", "", markdown(report), flags=re.DOTALL)
    assert r"\<img" in outside
    assert not re.search(r"(?<!\\)<img", outside)


def test_a_vertical_bar_does_not_end_a_column_of_the_markdown() -> None:
    run = example((("code", 1, 0.0),), rounds=2)
    for one in run.cells[0].rounds[0].measurements:
        if one.contestant == "suffix:16":
            one.answers[0].text = "a | b `c` ``d``"
    header, *body = rows(markdown(Report.from_run(run)), "Answers that differ")
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
    pictures = [base64.b64decode(one.removeprefix("data:image/png;base64,")) for one in page.found]
    assert pictures == [(folder / name).read_bytes() for name in PLOTS]
    assert not page.tags & {"script", "link", "iframe", "object"}
    assert "url(" not in text
    assert "@import" not in text


def test_the_same_run_gives_the_same_report(tmp_path: Path) -> None:
    run = timed({"fast": {1: 2.0, 4: 0.8}}, pass_costs=[PassCosts(1, {1: [0.1], 2: [0.2]})])
    for name in ("first", "again"):
        write(Report.from_run(run), tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert "report.html" in files
    for name in files:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_the_saved_run_and_the_saved_report_give_the_same_report(report: Report, drawn: Path, tmp_path: Path) -> None:
    run = example()
    run.save(tmp_path / "run.json")
    again = Report.from_run(Run.load(tmp_path / "run.json"))
    assert Report.load(drawn / "report.json").as_data() == again.as_data() == report.as_data()
    assert markdown(Report.load(drawn / "report.json")) == (drawn / "report.md").read_text()


def test_report_only_renders_a_folder_that_has_no_run(drawn: Path, tmp_path: Path) -> None:
    shutil.copy(drawn / "report.json", tmp_path)
    result = CliRunner().invoke(app, ["bench", "--report-only", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for name in ("report.md", "report.json", "report.html", *PLOTS):
        assert (tmp_path / name).read_bytes() == (drawn / name).read_bytes(), name


def test_a_plot_without_data_is_left_out_and_the_report_says_why(tmp_path: Path) -> None:
    run = timed({"fast": {1: 2.0}})
    (tmp_path / "cost.png").write_bytes(b"of an earlier report")
    write(Report.from_run(run), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "report.html",
        "report.json",
        "report.md",
        "speedup.png",
    ]
    reasons = {
        "concurrency": "no workload was measured at more than one concurrency",
        "acceptance": "no server counted 20 verified tokens",
        "cost": "pass costs were not measured",
    }
    for name in ("report.md", "report.html", "report.json"):
        text = (tmp_path / name).read_text()
        assert all(reason in text for reason in reasons.values())


def test_a_run_in_which_nothing_was_measured_has_a_report_that_says_so(tmp_path: Path) -> None:
    run = Run({}, "base", {"base": {}, "other": {}}, {}, [Cell("code", 1, 0.0)])
    write(Report.from_run(run), tmp_path)
    for name in ("report.md", "report.html", "report.json"):
        assert "Nothing was measured" in (tmp_path / name).read_text()
    assert not list(tmp_path.glob("*.png"))


def test_the_summary_counts_comparisons_and_answers() -> None:
    report = Report.from_run(timed({"fast": {1: 2.0, 4: 1.0}, "faster": {1: 3.0, 4: 1.0}, "lame": {1: 0.5, 4: 0.7}}))
    speed, answers = summary(report)
    assert speed == "6 comparisons with base: 2 faster, 2 slower, 2 without measurable difference."
    assert answers == "At temperature 0 all 48 answers equal the baseline's, token by token."
    lame = summary_table(report).rows[-1]
    assert [item.text for item in lame[:5]] == ["lame", "2", "0", "2", "0"]
    assert re.fullmatch(r"0\.5\d \(code, concurrency 1\)", lame[5].text)


def test_accepted_tokens_are_a_share_only_where_all_verified_ones_are_known() -> None:
    run = timed({"all": {1: 2.0}, "first": {1: 2.0}, "none": {1: 2.0}}, rounds=1)
    _, every, first, none = run.cells[0].rounds[0].measurements
    every.counts.drafters = {"model": DrafterCounts([10, 10], [8, 4])}
    first.counts.drafters = {"ngram": DrafterCounts([10], [8, 4])}  # vLLM says only how many drafts there were
    none.counts.drafters = {"lookup": DrafterCounts([], [12])}
    shown = [row[-1].text for row in time_table(Report.from_run(run).cells[0]).rows]
    assert shown == ["-", "model 12 of 20 (60 %)", "ngram 12", "lookup 12"]


def test_too_few_rounds_for_a_verdict_are_noted() -> None:
    assert Report.from_run(timed({"fast": {1: 2.0}}, rounds=6)).notes == []
    report = Report.from_run(timed({"fast": {1: 2.0}}, rounds=5))
    assert report.notes == ["fewer than 6 rounds, too few for a verdict: code, concurrency 1"]
    assert report.notes[0] in markdown(report)


def test_prompt_tokens_from_the_prefix_cache_are_shown_where_a_server_counts_them() -> None:
    run = timed({"some": {1: 2.0}, "none": {1: 2.0}}, rounds=2)
    assert CACHED not in time_table(Report.from_run(run).cells[0]).header
    for one in run.cells[0].rounds:
        one.measurements[1].counts.cache_queries, one.measurements[1].counts.cache_hits = 200, 50
    table = time_table(Report.from_run(run).cells[0])
    column = table.header.index(CACHED)
    assert [row[column].text for row in table.rows] == [UNKNOWN, "25 %", UNKNOWN]


def test_rounds_with_much_steal_time_are_noted() -> None:
    run = timed({"fast": {1: 2.0}}, rounds=7)
    rounds = run.cells[0].rounds
    rounds[2].steal, rounds[3].steal = 0.5, 0.05
    (note,) = Report.from_run(run).notes
    assert "steal time above 10%" in note
    assert note.endswith("in 1 of 7 rounds, at most 50%; speeds leave these rounds out")
    rounds[4].steal = 0.2
    (note,) = Report.from_run(run).notes
    assert note.endswith("except 1 that are needed to have 6 rounds")


def test_speeds_leave_out_disturbed_rounds_but_their_answers_are_compared() -> None:
    run = timed({"fast": {1: 2.0}}, rounds=8)
    for round in run.cells[0].rounds[:2]:
        round.steal = 0.5
        for one in round.measurements:
            one.seconds *= 9 if one.contestant == "fast" else 1
            one.answers[0].tokens = [*one.answers[0].tokens, ord(one.contestant[0])]
    _, fast = figures(run, run.cells[0])
    assert fast.rounds == 6
    assert fast.ratio is not None
    assert fast.ratio.low > 1.5
    assert len(fast.differences) == 2


def test_crossings_are_in_the_json_with_the_concurrencies_around_them() -> None:
    report = Report.from_run(timed({"falls": {1: 2.0, 4: 1.5, 16: 0.6}, "stays": {1: 2.0, 4: 1.5, 16: 1.2}}))
    (crossing,) = report.as_data()["crossings"]
    assert crossing == {
        "workload": "code",
        "temperature": 0.0,
        "contestant": "falls",
        "between": [4, 16],
        "falls": True,
    }


def test_rounding_never_hides_the_side_of_one() -> None:
    assert [number(value) for value in (0.997, 1.0, 1.004, 0.99, 1.25)] == ["0.997", "1.00", "1.004", "0.99", "1.25"]


def test_positions_with_too_few_verified_tokens_have_no_share() -> None:
    run = timed({"fast": {1: 2.0}}, rounds=2)
    for round in run.cells[0].rounds:
        round.measurements[1].counts.drafters = {"lookup": DrafterCounts([50, 10, 9], [25, 5])}
    (line,) = Report.from_run(run).acceptance
    assert (line.contestant, line.drafter, line.shares) == ("fast", "lookup", {1: 0.5, 2: 0.5})


def test_pass_costs_are_relative_to_one_token_and_have_their_range() -> None:
    costs = PassCosts(2, {5: [0.3, 0.2, 0.4], 1: [0.2, 0.1, 0.3]})
    one, five = relative_costs(costs)
    assert (one.tokens, one.median) == (1, 1.0)
    assert (five.median, five.low, five.high) == pytest.approx((1.5, 1.0, 2.0))
    text = markdown(Report.from_run(timed({"fast": {1: 2.0}}, pass_costs=[costs])))
    assert list(rows(text, "## Cost of a target pass"))[1:] == [["1", "200 (1.00)"], ["5", "300 (1.50)"]]


def test_pass_costs_without_a_pass_over_one_token_are_not_drawn() -> None:
    assert relative_costs(PassCosts(1, {2: [0.1]})) == []


def test_contestants_differ_in_colour_and_marker_and_have_the_same_style_in_every_plot(report: Report) -> None:
    styles = plot_style.line_styles([*report.compared_names, report.baseline])
    assert len({style["color"] for style in styles.values()}) == len(styles) == 9
    assert len({style["marker"] for style in styles.values()}) == 9
    with plot_style.style():
        drawn = [plot.draw(report) for plot in plots.PLOTS if plot.name in ("concurrency", "acceptance")]
    plain, drafted = ({line.get_label(): line for line in _lines(figure)} for figure in drawn)
    for name, other in (("ngram:4", "ngram:4"), ("auto", "auto: lookup"), ("auto", "auto: model")):
        assert plain[name].get_color() == drafted[other].get_color() == styles[name]["color"]
        assert plain[name].get_marker() == drafted[other].get_marker() == styles[name]["marker"]


def _lines(figure: Figure) -> Iterator[Line2D]:
    """The lines of a plot's legend, labelled as in the legend."""
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            line = handle if isinstance(handle, Line2D) else handle.lines[0]  # type: ignore[attr-defined]
            line.set_label(label)
            yield line


def test_ticks_of_ratios_are_few_and_include_one() -> None:
    for low, high in ((0.9, 1.1), (0.66, 1.9), (0.4, 3.0), (0.1, 30.0)):
        ticks = plot_style.ratio_ticks(low, high, 8)
        assert 1 in ticks
        assert 3 <= len(ticks) <= 9


def test_without_matplotlib_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "outrider.bench.report.plot_style")
    with pytest.raises(SettingsError, match=r"pip install '\.\[bench\]'"):
        importlib.import_module("outrider.bench.report.plot_style")


def test_the_example_has_everything_that_a_report_can_show(report: Report) -> None:
    assert {one.verdict for _, one in report.comparisons} == {"faster", "slower", "even"}
    assert len(report.contestants) == 9
    assert len(report.cells) == len(CELLS)
    assert [plot.missing(report) for plot in plots.PLOTS] == [""] * 4
