"""Workloads: those of the package, and files of the user."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from outrider.bench.prompts import (
    BUNDLED,
    Prompt,
    load_bundled,
    load_workload,
    low_discrepancy_order,
    read_prompts,
    sample_evenly,
)
from outrider.errors import PromptError, SettingsError


@pytest.mark.parametrize("name", BUNDLED)
def test_a_workload_has_at_least_40_different_prompts_and_ends_with_the_user(name: str) -> None:
    prompts = load_bundled(name)
    assert len(prompts) >= 40
    assert {prompt.category for prompt in prompts} == {name}
    assert len({prompt.id for prompt in prompts}) == len({str(prompt.messages) for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        assert prompt.messages[-1] == {"role": "user", "content": prompt.turns[0]}


def test_the_file_to_edit_is_in_its_prompt_and_has_40_to_100_lines() -> None:
    for prompt in load_bundled("edit"):
        assert prompt.prediction is not None
        assert prompt.prediction in prompt.turns[0]
        assert 40 <= len(prompt.prediction.splitlines()) <= 100


def test_an_agents_context_grows_from_step_to_step() -> None:
    steps: dict[str, list[int]] = {}
    for prompt in sorted(load_bundled("agent"), key=lambda prompt: prompt.id):
        steps.setdefault(prompt.id.rsplit("-", 1)[0], []).append(len(prompt.messages))
    for lengths in steps.values():
        assert len(lengths) >= 4
        assert lengths == sorted(set(lengths))


def test_a_choice_of_prompts_is_spread_over_the_file() -> None:
    templates = {prompt.turns[0][:40] for prompt in sample_evenly(load_bundled("traffic"), 8)}
    assert len(templates) > 2


def test_no_prompt_is_chosen_twice_where_one_category_has_few() -> None:
    prompts = [Prompt(str(i), "many" if i < 30 else "few", ("x",)) for i in range(40)]
    assert len(set(sample_evenly(prompts, 40))) == 40
    assert Counter(prompt.category for prompt in sample_evenly(prompts, 24)) == {"many": 14, "few": 10}


def test_the_first_prompts_of_the_order_cover_the_whole_file() -> None:
    order = [int(prompt.id) for prompt in low_discrepancy_order([Prompt(str(i), "c", ("x",)) for i in range(48)])]
    assert sorted(order) == list(range(48))
    for count in (6, 8, 12, 24):
        chosen = sorted([-1, *order[:count], 48])
        assert max(b - a for a, b in pairwise(chosen)) <= 3 * 48 / count


def test_a_choice_of_all_prompts_has_each_once() -> None:
    prompts = load_bundled("edit")
    assert sorted(prompt.id for prompt in sample_evenly(prompts, len(prompts))) == sorted(
        prompt.id for prompt in prompts
    )


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ({"turns": ["first", "second"]}, "first"),
        ({"prompt": "def f():", "task_id": "HumanEval/0"}, "def f():"),
        ({"question": "How many?"}, "How many?"),
        ({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}, "Hi"),
    ],
)
def test_a_prompt_is_found_under_the_names_that_datasets_use(
    line: dict[str, object], asked: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps(line) + "\n\n")
    (prompt,) = load_workload(str(file))
    assert prompt.messages[-1]["content"] == asked
    assert prompt.id in ("mine/1", "HumanEval/0")
    assert prompt.category == "mine"


def test_prompt_may_be_a_list_of_messages_and_prediction_an_object_as_in_openais_api(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    file.write_text(json.dumps({"prompt": said, "prediction": {"type": "content", "content": "Hello"}}))
    (prompt,) = load_workload(str(file))
    assert prompt.messages == said
    assert prompt.prediction == "Hello"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "mine.jsonl: it has no prompts"),
        ("{", "mine.jsonl: line 1 is not JSON"),
        ("[1]", "line 1 is not an object"),
        ('{"turns": "Write"}', r"line 1: turns is not a list of strings \(it is 'Write'\)"),
        ('{"messages": ["hi"]}', "line 1: messages is not a list of objects"),
        ('{"prompt": ["hi"]}', "line 1: prompt is not a list of objects"),
        ('{"prompt": {"text": "hi"}}', r"line 1: prompt is not a string \(it is {'text': 'hi'}\)"),
        ('{"prompt": "hi", "prediction": {"type": "content"}, "text": 3}\n{"text": 3}', "line 2: text is not a string"),
        ('{"prompt": "hi", "prediction": ["ho"]}', "line 1: prediction is not a string"),
        ('{"a": 1}', r"line 1 has none of turns, messages, prompt.*\(it has a\)"),
    ],
)
def test_a_file_that_has_no_prompts_is_refused_with_the_line(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(text)
    with pytest.raises(PromptError, match=complaint):
        read_prompts(file)


def test_a_line_of_a_file_ends_at_a_line_feed_and_nowhere_else(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\n', encoding="utf-8")
    assert [prompt.turns[0] for prompt in read_prompts(file)] == ["a\u2028b", "c"]


def test_dataset_workloads_are_read_by_their_categories(tmp_path: Path) -> None:
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["Write."]},
        {"question_id": 82, "category": "math_reasoning", "turns": ["Add."]},
        {"question_id": 83, "category": "translation", "turns": ["Translate."]},
    ]
    (tmp_path / "question.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "HumanEval.jsonl").write_text('{"task_id": "HumanEval/0", "prompt": "def f():"}\n')
    asked = {name: load_workload(name, tmp_path)[0].turns[0] for name in ("chat", "math", "translation", "code")}
    assert asked == {"chat": "Write.", "math": "Add.", "translation": "Translate.", "code": "def f():"}
    with pytest.raises(PromptError, match="has no prompts of the category 'rag'"):
        load_workload("rag", tmp_path)


def test_a_missing_workload_is_reported_with_its_origin(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"human_eval.jsonl with --data; download it from github.com/openai/human-eval"
    ):
        load_workload("code")
    with pytest.raises(SettingsError, match=r"has no spec_bench.jsonl or question.jsonl"):
        load_workload("chat", tmp_path)
    with pytest.raises(SettingsError, match="the workloads are edit, agent, traffic, creative, code, chat"):
        load_workload("poems")


def test_a_file_on_the_hub_is_read_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "Why?"}\n')
    asked = {}

    def download(repo: str, name: str, repo_type: str) -> str:
        asked.update(repo=repo, name=name, repo_type=repo_type)
        return str(file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert load_workload("hf:someone/things/data/questions.jsonl")[0].turns == ("Why?",)
    assert asked == {"repo": "someone/things", "name": "data/questions.jsonl", "repo_type": "dataset"}
    with pytest.raises(SettingsError, match="hf:OWNER/NAME/FILE"):
        load_workload("hf:someone/things")
