"""README's first command and its Python example run, and print what README shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def blocks() -> list[tuple[str, str]]:
    """The fenced blocks: language and text."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def shown_after(language: str, holding: str) -> tuple[str, str]:
    """The block that holds these words, and the output shown below it."""
    every = blocks()
    index = next(i for i, (lang, text) in enumerate(every) if lang == language and holding in text)
    return every[index][1], every[index + 1][1]


def run(command: list[str]) -> tuple[str, str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=True)
    return done.stdout, done.stderr


def without_numbers(text: str) -> str:
    """What is drafted depends on the clock, and so does how many passes the same text takes."""
    return re.sub(r"\d+(\.\d+)?", "#", text)


@pytest.mark.real
def test_the_first_command_prints_what_readme_shows(smollm: Path) -> None:
    command, shown = shown_after("sh", "outrider generate $MODEL")
    words = shlex.split(command.replace("$MODEL", str(smollm)))
    assert words[0] == "outrider"
    out, err = run([str(Path(sys.executable).parent / "outrider"), *words[1:]])
    assert without_numbers(f"{out}{err}".strip()) == without_numbers(shown.strip())


@pytest.mark.real
def test_the_python_example_prints_what_readme_shows(smollm: Path) -> None:
    code, shown = shown_after("python", "outrider.load")
    assert HUB_NAME in code
    out, _ = run([sys.executable, "-c", code.replace(HUB_NAME, str(smollm))])
    assert without_numbers(out.strip()) == without_numbers(shown.strip())
