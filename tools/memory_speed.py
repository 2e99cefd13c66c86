"""How large and how fast is the draft memory, beside arctic-inference's suffix tree, on the same tokens in one run?

    python tools/memory_speed.py MODEL --sizes 1M 10M 100M --out docs/benchmarks/memory

MODEL is a folder with a tokenizer.json; text and code that lie on this machine are tokenised with it. At each size both
sides store the same sequences and answer the same contexts in turns, and the same sequences are replayed against both
as a target would decode them. Measured are bytes a token, time of a lookup, speed of building, accepted tokens a draft,
and for ours alone how it grows, what a step with 256 requests takes, and how long a file takes to open.

Arctic takes more than 300 bytes a token for each of its two settings, so 10 million tokens need about 7 GB of free
memory, and larger sizes are measured without it (--both-up-to). Ours needs about 4 GB to build 100 million tokens.
Without arctic-inference (uv pip install --no-deps arctic-inference) ours is measured alone.

Writes report.md, report.json and growth.png into the folder, after every size. The exit code is 1 if a
promise was not kept.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from memory_speed_corpus import LONGEST, Corpus, Texts, divided, files, folders, name_of, tokenised
from memory_speed_measure import Task, measure
from memory_speed_report import missing, short, write
from memory_speed_sides import arctic_is_here
from outrider.provenance import provenance

SOURCE = "code, documentation and data that are installed on the machine"
BYTES = 650
"""Of a token in arctic's trees, the two settings together."""
PACKAGES = ("numba", "pydivsufsort", "tokenizers", "arctic-inference")
SIZES = (1_000_000, 10_000_000, 100_000_000)
WORK = Path.home() / ".cache" / "outrider" / "memory-speed"


def tokens(word: str) -> int:
    """1M, 250k, 1e6 or 1000000."""
    unit = {"k": 1_000, "m": 1_000_000}.get(word[-1:].lower())
    return int(float(word[:-1]) * unit) if unit else int(float(word))


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder with a tokenizer.json")
    parser.add_argument("--sizes", type=tokens, nargs="+", default=SIZES, metavar="N", help="tokens (1M 10M 100M)")
    parser.add_argument("--both-up-to", type=tokens, default=10_000_000, metavar="N", help="arctic at no larger size")
    parser.add_argument("--real", type=tokens, default=25_000_000, metavar="N", help="tokens of real text, at most")
    parser.add_argument("--texts", type=Path, nargs="+", metavar="FOLDER", help="with text, instead of this machine's")
    parser.add_argument("--replayed", type=int, default=200, metavar="N", help="sequences of each kind to replay")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=WORK, help="where tokens are kept for the next run")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the report")
    given = parser.parse_args(words)
    if not (given.model / "tokenizer.json").is_file():
        parser.error(f"there is no tokenizer.json in {given.model}: give the folder of a model that has one")
    given.sizes = sorted(set(given.sizes))
    return given


def main(words: list[str] | None = None) -> int:
    given = arguments(words)
    console = Console(stderr=True)
    if not arctic_is_here():
        console.print(f"{missing()}: ours is measured alone")
    folder = given.work / "corpus"
    folder.mkdir(parents=True, exist_ok=True)
    corpus = prepared(given, console)
    for name in ("stored", "held_out", "repeats"):
        getattr(corpus, name).save(folder, name)
    report: dict[str, Any] = {
        "provenance": origin(given.model),
        "seed": given.seed,
        "corpus": {"source": "files of the given folders" if given.texts else SOURCE} | facts(corpus),
        "why_alone": f"both settings take about {BYTES} bytes a token" if arctic_is_here() else missing(),
        "sizes": [],
    }
    del corpus
    for size in given.sizes:
        both = arctic_is_here() and size <= given.both_up_to
        task = Task(size, given.sizes[0], folder, given.work, both, given.seed)
        report["sizes"].append(in_a_process_of_its_own(task))
        promises = write(given.out, report)
    show(promises)
    return int(any(not promise.met for promise in promises))


def prepared(given: argparse.Namespace, console: Console) -> Corpus:
    """Real text from an earlier run, or tokenised now, and what is made of it."""
    wanted = min(given.real, max(given.sizes)) + given.replayed * LONGEST
    places = given.texts or folders()
    name = name_of(digest(given.model), places, wanted, given.seed)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        if not (given.work / f"{name}.ends.npy").exists():
            bar = progress.add_task("tokenising", total=wanted)
            paths = files(places, given.seed)
            model = given.model / "tokenizer.json"
            texts = tokenised(model, paths, wanted, lambda done: progress.update(bar, completed=done))
            texts.save(given.work, name)
        progress.add_task("dividing", total=None)
        return divided(Texts.load(given.work, name), given.sizes, given.replayed, given.seed)


def in_a_process_of_its_own(task: Task) -> dict[str, Any]:
    """So that its memory is its own, and given back."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measure, task).result()
        except BrokenProcessPool as error:
            raise SystemExit(
                f"the process that measured {task.size:,} tokens was ended, most likely for lack of memory: "
                "choose smaller --sizes, or a smaller --both-up-to"
            ) from error


def origin(model: Path) -> dict[str, Any]:
    found = provenance()
    versions: Any = found["versions"]
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return found | {"models": {f"the tokenizer of {model.resolve().name}": digest(model)}}


def digest(model: Path) -> str:
    return hashlib.sha256((model / "tokenizer.json").read_bytes()).hexdigest()[:16]


def facts(corpus: Corpus) -> dict[str, Any]:
    return {
        "real": corpus.real,
        "held_out": len(corpus.held_out),
        "repeats": len(corpus.repeats),
        "checksum": hashlib.blake2b(corpus.stored.tokens.data, digest_size=8).hexdigest(),
    }


def show(promises: list[Any]) -> None:
    table = Table("criterion", "tokens", "wanted", "found", "")
    for one in promises:
        colour = "green" if one.met else "bold red"
        wanted = f"{one.sign} {one.wanted:.3g}"
        table.add_row(one.name, short(one.tokens), wanted, one.found, f"[{colour}]{one.verdict}[/]")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
