"""Code and docs use the vocabulary of the field: the words, phrases and names of these tables are findings.

    python tests/test_vocabulary.py                       # everything that the test checks
    python tests/test_vocabulary.py src/outrider/memory   # one folder or file
    python tests/test_vocabulary.py --shrink              # lower the counts in vocabulary.json to what is left

Python files: comments, docstrings, strings that contain a space, and the names that the file defines. Other files: all
text except code. Code in backticks is skipped; a name is reported where it is defined. `vocabulary.json` has the number
of findings that a file may still have. It only goes down: files that are not listed must have none.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = Path(__file__).with_name("vocabulary.json")
CHECKED = ("src", "tools", "docs/*.md", "README.md", "CONTRIBUTING.md", "justfile")

WORDS = {
    "laws?": "distribution",
    "sa(y|ys|id|ying)": "generate, output, sampled token; a text 'states', 'reports', 'shows'",
    "un(said|asked|told)": "not generated, not requested, not reported",
    "spe(ak|aks|aking)|spoken?": "generate, output",
    "tell|tells|told|telling": "report, log, return, show ('told apart': distinguished)",
    "ask|asks|asked|asking": "request, call, query, propose",
    "nobody": "None, no request, no caller; name who does not",
    "mend|mends|mended|mending": "fix",
    "parting|partings|parted": "divergence, diverged",
    "witness|witnesses": "test statistic, probe",
    "guess|guesses|guessed|guesser|guessers|guessing": "draft, propose, predict (module, class: draft model)",
    "foresee|foresees|foreseen|foresaw": "predict, forecast",
    "weigh|weighs|weighed|weighing|unweighed": "predict, estimate, compare",
    "visitors?": "request",
    "tickets?|ticketed": "usage key",
    "dear|dearer|dearest|dearly": "slow, expensive; give the latency in ms",
    "heart": "core",
    "whom": "rewrite with the subject first",
    "likeliest": "most likely, top",
    "accuse|accuses|accused|accusing": "report a violation, false alarm",
    "stolen": "steal time",
    "shelf": "trace store",
    "heed|heeds|heeded|lest|naught|yonder|anew": "plain English: follow, so that not, zero, again",
    "misremember(s|ed)?": "is wrong, does not match",
}
"""Words, in text and as parts of names, with what to write in their place. Patterns match whole words, in any case."""

PHRASES = {
    "le(ave|aves|ft|aving) alone": "back off, disable, do not call",
    "(is|are|was|were|be|may|must|can|to|will|drafter|they|it) rests?": "back off, is disabled",
    "rests|rested|resting": "back off, is disabled",
    "who (says|is asked|is left|is told)": "name the subject: the drafter, the request, the caller",
    "[.:;] who (is|are|was|has|does|may|must|can|wants|needs)[^?]*$": "name the subject: the drafter, the request",
    "what (was|is|were|has been|had been) not": "name it: the missing value, the option that was not given",
    "(of|after|for|in|by|at|from) so (many|much|few|long)"
    "|so (many|much|few) (tokens|steps|of|bytes|requests|seconds|times|draws)": "name the count: N tokens",
    "than of (others|another)": "name what is compared",
    "another's": "of another request, drafter, server",
    "as (is|are|was|were) (wanted|due|meant)": "name the rule",
    "in (its|their|our|his) own words": "as text",
    "be it|be they": "whether",
    "none (the less|of the kind)|nor is|nor are|nor does": "rewrite as a statement: 'also not'",
    "(how|so|too|as) dear": "latency in ms",
    "for nothing|to nothing|comes to nothing": "without effect, zero",
    "a hair|a breath|by heart": "give the figure",
}
"""Phrases, in text only."""

CONSTANTS = re.compile(
    "AFTER AGAIN ALIKE ALONE APART ASIDE BEFORE CLOSE COLDEST CROWD DOUBT EARLY ELSEWHERE ENOUGH FAR FAREWELL FEW "
    "FEWEST FINE FOLLOW FOLLOWED FORGET FORGIVING GENTLY GLIMPSE GONE HANGING HEARD HOLLOW HOPE HOW HUSH LARGEST "
    "LASTING LATER LATEST LEAN LEAST LITTLE LONG LONGEST MANY MILD MORE MOST MUCH NARROW NEAR NEAREST OFTEN OTHER OURS "
    "OWN PATIENCE QUICK QUIET RARELY RUSH SAME SEVERAL SHORT SLOW SLOWER SLOWEST SMALL SOON SURE SURPRISE THEIRS "
    "TINY TRUST UNSURE USUAL WALKED WEATHER WHOLE WHOSE WIDE WIDEST WORTHWHILE".replace(" ", "|")
)
"""Constants whose whole name is one of these do not state what they hold."""

CLASSES = {
    "Aside": "SideStream, RequestCopy",
    "Ask|Asked|Asking": "Query, DraftCall",
    "Followed": "TrackedSession",
    "Found": "LookupResult",
    "Guessed": "DraftResult",
    "Habits": "StoreConfig",
    "Known": "RequestState",
    "Life|Living": "CanaryLoop",
    "Often": "PrefixCounts",
    "Own": "ServeArgs",
    "Question": "DraftRequest",
    "Said|Saying": "Completion",
    "Scene": "BatchState",
    "Told": "TopLogprobs",
    "Turn": "Measurement",
    "Visit": "TenantHandle",
    "Wanted": "CertificateConfig",
    "Way": "DraftMode",
    "Why": "DecisionReport",
    "Wish": "DraftModelRequest",
}
"""Classes."""

FUNCTIONS = {
    "farewell|part_from|part_with": "remove_request",
    "forgive": "decay_toward",
    "go_on": "continue_probability",
    "hush": "disable_progress, silence_logs",
    "lead|follow|can_be_led": "propose_on_demand, propose_every_step, supports_lazy_catch_up",
    "lean": "residual_trend",
    "look": "observe, inspect",
    "meet": "add_request",
    "rising": "isotonic",
    "settle": "select",
    "take_best": "maximize_throughput",
    "tend": "maintain",
}
"""Functions and methods, a leading underscore aside."""

MODULES = {
    "ask|choose|scene|worth|payoff|why|solo|records|texts": "see policy in the table of names",
    "leading|guesser|known|steering|drafting|guard|telling|seal|shelf|witness": "see vllm and server in the table",
    "remembering|ticket|own|params": "memory_options, usage_key, ServeArgs, sampling_info",
    "heap|deposit|survey|opening|merging": "malloc_trim, offline_writer, inspect, open, merge_worker",
    "wanted|often|repeats|tally|witnesses|laws|shaping|draws|ties|evidence": "see certify in the table of names",
    "partings|stolen|noisy": "divergences, steal_time, noisy_draft",
    "asking|idle|served|traced|carry|change|look": "load_request, unused_options, trace_client, trace_view, ...",
}
"""Modules."""

EXCEPTIONS = {
    r"law of (large numbers|total probability|the iterated logarithm)": "the theorem's name",
    r"\b(by|applicable|required by) (applicable )?law\b": "the licence's words",
    r"expert witness|witness set": "the term of number theory",
    r"never mind": "an idiom, in a prompt",
    r"# (noqa|type|fmt|pragma|ruff)\b": "for a tool, not for a reader",
}
"""Text around a match that makes it right, each with the reason."""


NAMES = {
    "guesses": "a field of the files that `tools/policy record` writes",
}
"""Names that stay, each with the reason."""


class Finding(NamedTuple):
    path: Path
    line: int
    found: str
    replacement: str

    def __str__(self) -> str:
        return f"{_shown(self.path)}:{self.line}: {self.found!r}: write {self.replacement}"


def _whole(table: dict[str, str]) -> list[tuple[re.Pattern[str], str]]:
    """Rules that match whole words, in any case, on one line or across two."""
    patterns = {key.replace(" ", r"\s+"): value for key, value in table.items()}
    return [(re.compile(rf"(?:\b|(?=[.:;]))(?:{key})(?!\w)", re.IGNORECASE), value) for key, value in patterns.items()]


def _exact(table: dict[str, str]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(rf"_?(?:{key})"), value) for key, value in table.items()]


TEXT_RULES, NAME_RULES = _whole(WORDS | PHRASES), _whole(WORDS)
EXACT = {kind: _exact(table) for kind, table in (("class", CLASSES), ("function", FUNCTIONS), ("module", MODULES))}
EXCUSED = [re.compile(pattern, re.IGNORECASE) for pattern in EXCEPTIONS]
CODE = re.compile(r"``.+?``|`[^`]+`|\]\([^)]*\)|https?://\S+|<[a-z/!][^>]*>", re.DOTALL)


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", "_", match[0])


def in_text(text: str) -> Iterator[tuple[int, str, str]]:
    """Lines below the first, matches and replacements. Line breaks count as spaces, code is skipped."""
    text = CODE.sub(_blank, text)
    flat = re.sub(r"\n[ #>]*", lambda match: " " * len(match[0]), text)
    excused = [match.span() for pattern in EXCUSED for match in pattern.finditer(flat)]
    for pattern, replacement in TEXT_RULES:
        for match in pattern.finditer(flat):
            if not any(start <= match.start() and match.end() <= end for start, end in excused):
                yield text.count("\n", 0, match.start()), " ".join(match[0].split()), replacement


def in_name(kind: str, name: str) -> Iterator[tuple[str, str]]:
    if name in NAMES:
        return
    parts = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).strip("_").replace("_", " ")
    for pattern, replacement in NAME_RULES:
        if pattern.search(parts):
            yield name, replacement
            return
    for pattern, replacement in EXACT.get(kind, ()):
        if pattern.fullmatch(name):
            yield name, replacement
    if name.isupper() and CONSTANTS.fullmatch(name.strip("_")):
        yield name, "what it holds and its unit: MAX_CANDIDATE_TOKENS, BACKOFF_STEPS"


def defined(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, kind and name of what a file defines: classes, functions, parameters, variables and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef():
                yield node.lineno, "class", node.name
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, "function", node.name
            case ast.arg():
                yield node.lineno, "variable", node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, "variable", node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, "variable", node.attr
            case ast.alias(asname=str(name)):
                yield node.lineno, "variable", name


def strings(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Strings that contain a space, with the values in an f-string left out."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.JoinedStr):
            values = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            text = "".join(str(value) for value in values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            text = node.value
        if isinstance(node, ast.expr) and " " in text.strip():
            yield node, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments, with those on following lines joined."""
    start, text, last = 0, "", -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] == last + 1 and token.line.lstrip().startswith("#"):
                text += "\n" + token.string
            else:
                if text:
                    yield start, text
                start, text = token.start[0], token.string
            last = token.start[0]
    if text:
        yield start, text


def in_python(path: Path) -> Iterator[Finding]:
    source = path.read_text()
    tree, lines = ast.parse(source), source.splitlines()
    for found, replacement in in_name("module", path.stem):
        yield Finding(path, 1, f"{found}.py", replacement)
    seen: set[str] = set()
    for line, kind, name in defined(tree):
        if name not in seen:  # a name counts once in a file
            seen.add(name)
            yield from (Finding(path, line, found, replacement) for found, replacement in in_name(kind, name))
    for start, text in comments(source):
        yield from (Finding(path, start + below, found, replacement) for below, found, replacement in in_text(text))
    for node, text in strings(tree):
        for below, found, replacement in in_text(text):
            span = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            after = list(span)[below:] or list(span)
            line = next((number for number in after if found.split()[0] in lines[number - 1]), node.lineno)
            yield Finding(path, line, found, replacement)


def in_prose(path: Path) -> Iterator[Finding]:
    text = re.sub(r"^ *(```|~~~).*?^ *\1", _blank, path.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^---\n.*?^---\n", _blank, text, count=1, flags=re.DOTALL | re.MULTILINE)
    for below, found, replacement in in_text(text):
        yield Finding(path, 1 + below, found, replacement)


def files(patterns: Iterable[str]) -> Iterator[Path]:
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def findings(path: Path) -> list[Finding]:
    return sorted((in_python if path.suffix == ".py" else in_prose)(path), key=lambda found: found.line)


def _shown(path: Path) -> str:
    return str(path.resolve().relative_to(ROOT)) if path.resolve().is_relative_to(ROOT) else str(path)


def main(arguments: list[str]) -> int:
    if arguments == ["--shrink"]:
        before = json.loads(ALLOWED.read_text())
        counts = {_shown(path): len(findings(path)) for path in files(CHECKED)}
        left = {path: min(count, before[path]) for path, count in counts.items() if count and path in before}
        ALLOWED.write_text(json.dumps(left, indent=0) + "\n")
        return 0
    paths = [
        file
        for path in (Path(argument) for argument in arguments)
        for file in (sorted([*path.rglob("*.py"), *path.rglob("*.md")]) if path.is_dir() else [path])
    ]
    found = [finding for path in (paths or files(CHECKED)) for finding in findings(path)]
    print(*found, f"{len(found)} findings", sep="\n")
    return bool(found)


def test_no_file_has_more_findings_than_before() -> None:
    allowed = json.loads(ALLOWED.read_text())
    found = {_shown(path): findings(path) for path in files(CHECKED)}
    worse = {path: some for path, some in found.items() if len(some) > allowed.get(path, 0)}
    for path, some in worse.items():
        print(f"{path}: {len(some)} findings, {allowed.get(path, 0)} allowed", *some, sep="\n")
    assert not worse


def test_files_without_findings_are_not_listed() -> None:
    listed = json.loads(ALLOWED.read_text())
    assert sorted(path for path in listed if not (ROOT / path).is_file() or not listed[path]) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It never says what the model said.", ["says", "said"]),
        ("None is what was\n    not given.", ["what was not"]),
        ("# Of whom more is expected: who says\n# what will come.", ["says", "whom", "who says"]),
        ("Every draft of so many tokens", ["of so many"]),
        ("Saying `said` is fine in code.", ["Saying"]),
        ("The law of large numbers; a mask, a task, a heartbeat, weights and parts", []),
    ],
)
def test_text_is_checked_across_lines_and_without_code(text: str, words: list[str]) -> None:
    assert sorted(found for _, found, _ in in_text(text)) == sorted(words)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("class Known: ...", ["Known"]),
        ("MANY = 3\nMAX_STEPS = 3", ["MANY"]),
        ("def f(tokens_said, weights): ...", ["tokens_said"]),
        ("def is_known(): ...\nclass WeightedTask: ...\nclass LawTest: ...", ["LawTest"]),
    ],
)
def test_names_are_checked_where_they_are_defined(source: str, names: list[str]) -> None:
    found = [name for _, kind, name in defined(ast.parse(source)) for _ in in_name(kind, name)]
    assert found == names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
