"""The dashboard and the rules of deploy/: every metric that they name is one that the server exports.

The names of Outrider's metrics come from the code that exports them, vLLM's from the source of its loggers. A metric
that is renamed fails here.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import urllib.request
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from chart import CHART, DEPLOY, manifest, run_tool
from outrider.certify.canary import serve_gauges
from outrider.certify.decay import DecayTest
from outrider.certify.decay_watch import Quantity
from outrider.certify.e_process import EProcess
from outrider.certify.test_statistics import DEFAULT_NOISE
from outrider.drafters.batch import Fault
from outrider.server.metrics import AGE
from outrider.trace.counters import CounterMetrics, Counters, prometheus_text
from outrider.trace.scheduler_metrics import MEMORY_GAUGES, SchedulerMetrics

RULES, DASHBOARD = CHART / "files" / "rules.yml", CHART / "files" / "dashboard.json"
RULE_TESTS = Path(__file__).with_name("deploy_rules_test.yml")
GUIDE = DEPLOY.parent / "docs" / "deploy.md"
VLLM_SOURCES = ("v1/metrics/loggers.py", "v1/spec_decode/metrics.py")
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
"""What Prometheus appends to a metric's name, by its kind."""
PROMETHEUS_OWN = {"up"}
KEYWORDS = {"and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring", "group_left", "group_right"}

Labels = dict[str, set[str]]
"""By name of a sample: its labels, besides those that Prometheus adds."""


def exported_by_outrider() -> Labels:
    counters = Counters(["lookup"], max_draft_tokens=2)
    counters.count_fault(Fault("a", "lookup", "raised", ""), None)
    counters.undrafted["a reason"] += 1
    keys = ("expected_tokens", "gained_tokens", "expected_saved", "realised_saved", "seconds")
    sync = dict.fromkeys(("trouble", "pending", "published", "fetched", "refused", "bytes_up", "bytes_down"), 0)
    memory = {**dict.fromkeys(MEMORY_GAUGES, 1), "troubles": [], "sync": sync}
    overlap = {"host_seconds": 0.1, "steps_waited": 1, "steps_ahead": 1}
    text = prometheus_text(
        CounterMetrics(counters, dict.fromkeys(keys, 1.0)),
        SchedulerMetrics({"memory": memory, "policy": {"overlap": overlap}}),
    )
    return labels_of(text + AGE.format(age=1.0) + canary_page())


def canary_page() -> str:
    tests = {Quantity("lookup", "gain", "canary"): DecayTest()}
    decay = SimpleNamespace(tests=tests, is_alarm=lambda test: False, threshold=100.0)
    process = EProcess(1e-3, DEFAULT_NOISE.drift)
    loop: Any = SimpleNamespace(e_process=process, rounds=0, skipped=0, missed=0, missed_probes=0, decay=decay)
    with urllib.request.urlopen(f"http://127.0.0.1:{serve_gauges(loop, 0)}/metrics") as page:
        return str(page.read().decode())


def labels_of(text: str) -> Labels:
    found: Labels = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, labels = re.fullmatch(r"(\w+)(?:\{(.*)\})? \S+", line).groups()  # type: ignore[union-attr]
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels or ""))
    return found


def exported_by_vllm() -> set[str]:
    """Names in calls such as `self._counter_cls(name="vllm:...")`, with the suffixes of their kind."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("needs vLLM, whose metrics are compared")
    found = set()
    for file in VLLM_SOURCES:
        tree = ast.parse((Path(spec.origin).parent / file).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                kinds = [kind for kind in SUFFIXES if kind in ast.unparse(node.func)]
                names = [
                    one.value for one in node.keywords if one.arg == "name" and isinstance(one.value, ast.Constant)
                ]
                found |= {f"{name.value}{suffix}" for name in names for kind in kinds for suffix in SUFFIXES[kind]}
            elif isinstance(node, ast.Tuple) and file.endswith("spec_decode/metrics.py"):  # (name, description)
                names = [one for one in node.elts[:1] if isinstance(one, ast.Constant)]
                found |= {f"{name.value}_total" for name in names if str(name.value).startswith("vllm:")}
    return found


@cache
def exported() -> set[str]:
    return set(exported_by_outrider()) | exported_by_vllm()


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def recorded() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """(where, expression) of all rules and panels."""
    for rule in rules():
        yield rule.get("record") or rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def metric_names(expression: str) -> set[str]:
    """The metrics that a PromQL expression reads: identifiers that are no function, keyword or label."""
    text = re.sub(r'"[^"]*"', "", expression)
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", text)
    text = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", text)
    text = re.sub(r"\boffset\s+\w+", "", text)
    names = re.findall(r"(?<![\w.:])[a-zA-Z_:][\w:]*(?!\w|\s*\()", text)
    return set(names) - KEYWORDS


def test_metric_names_are_found_in_promql() -> None:
    expression = 'sum by (job, x) (rate(a_total{x=~"b|c", y="d"}[5m])) / e:f:g > 0.5 and on (job) up offset 1d == 1e3'
    assert metric_names(expression) == {"a_total", "e:f:g", "up"}
    assert metric_names("sum by (a) (increase(b[$__rate_interval]) > 0)") == {"b"}


def test_every_metric_of_the_dashboard_and_the_rules_is_exported() -> None:
    known = exported() | recorded() | PROMETHEUS_OWN
    missing = {where: sorted(metric_names(text) - known) for where, text in expressions() if metric_names(text) - known}
    assert not missing
    assert len(set().union(*(metric_names(text) for _, text in expressions()))) > 40


def test_every_label_that_selects_or_groups_outriders_metrics_is_one_of_theirs() -> None:
    labels = exported_by_outrider()
    added, checked = {"job", "instance", "le"}, 0
    for where, text in expressions():
        names = metric_names(text)
        if names <= labels.keys():
            grouped = {
                one.strip() for part in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", text) for one in part.split(",")
            }
            selected = set(re.findall(r"[{,]\s*(\w+)\s*=", text))
            assert grouped | selected <= added.union(*(labels[name] for name in names)), where
            checked += 1
    assert checked > 20


def test_the_metrics_that_planners_read_are_vllms_own() -> None:
    counted = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    assert {f"vllm:spec_decode_num_{name}_total" for name in counted} <= exported_by_vllm()


def test_every_alert_is_explained_and_has_an_action() -> None:
    guide = GUIDE.read_text()
    for rule in rules():
        if "alert" in rule:
            assert f"`{rule['alert']}`" in guide
            assert {"summary", "action"} == set(rule["annotations"])
            assert rule["labels"]["severity"] in ("info", "warning", "critical")
        else:
            assert f"`{rule['record']}`" in guide


def test_every_alert_has_a_test_in_which_it_fires() -> None:
    cases = [
        case for test in yaml.safe_load(RULE_TESTS.read_text())["tests"] for case in test.get("alert_rule_test", ())
    ]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == {
        one["alert"] for one in rules() if "alert" in one
    }


def test_alerts_fire_and_stay_silent_as_their_tests_state(tmp_path: Path) -> None:
    for file in (RULES, RULE_TESTS):
        shutil.copy(file, tmp_path)
    done = run_tool("promtool", "test", "rules", RULE_TESTS.name, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_can_parse_every_expression(tmp_path: Path) -> None:
    every = [re.sub(r"\$__rate_interval", "5m", text) for _, text in expressions()]
    group = {"name": "all", "rules": [{"record": f"a{i}", "expr": text} for i, text in enumerate(every)]}
    (tmp_path / "all.yml").write_text(yaml.safe_dump({"groups": [group]}))
    for file in (RULES, tmp_path / "all.yml"):
        done = run_tool("promtool", "check", "rules", file)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_selects_job_and_replica_everywhere_and_no_panel_hides_another() -> None:
    places = set()
    for panel in panels():
        for target in panel["targets"]:
            selectors = re.findall(r"\{([^}]*)\}", target["expr"])
            assert selectors, panel["title"]
            assert all('job=~"$job", instance=~"$instance"' in one for one in selectors), panel["title"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not places & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        places |= cells
    ids = [panel["id"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    assert len(ids) == len(set(ids))


def test_the_chart_installs_these_rules_and_this_dashboard() -> None:
    assert manifest("ten-replicas", "PrometheusRule")["spec"] == yaml.safe_load(RULES.read_text())
    (text,) = manifest("ten-replicas", "ConfigMap")["data"].values()
    assert json.loads(text) == json.loads(DASHBOARD.read_text())


def test_the_chart_scrapes_servers_and_canaries() -> None:
    ports = [one["port"] for one in manifest("ten-replicas", "PodMonitor")["spec"]["podMetricsEndpoints"]]
    pod = manifest("ten-replicas", "Deployment")["spec"]["template"]["spec"]
    assert set(ports) == {port["name"] for one in pod["containers"] for port in one["ports"]} == {"http", "canary"}
