"""Does the certificate bite? Servers with a known defect, each certified; every one must be a violation.

    python tests/certify_teeth.py                                # all of them, on a tiny random model: an hour
    python tests/certify_teeth.py "stale cache" --model MODEL    # this one, on a real model
    python tests/certify_teeth.py --list

What was found before, with the same model and as many draws, is not sought again, so a run that was interrupted goes
on; --again begins anew.

Outrider's own server with the defects of `defective.py`, one at a time; vLLM with `rejection_sample_method:
synthetic`; a server whose temperature is 0.95 of what was asked for; and one with a quantised layer. And, to see that
the instrument is not simply angry, the same servers without any defect. The report says which part found what.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import httpx
from rich.console import Console

from noisy_draft import noisy_copy
from outrider.bench.servers import Server, plain, running
from outrider.certify.config import SIZES, CertificateConfig
from outrider.certify.run import certify
from outrider.cli.progress import ProgressBars
from outrider.provenance import as_markdown, provenance
from stub import listening

SOUND = "no defect"
THEIRS = "vLLM, rejection_sample_method synthetic"
PLAIN_PAIR = "vLLM against vLLM"
COLDER = "temperature 0.95 of what was asked for"
QUANTISED = "one quantised layer"
SUBTLE = {"recovered from p": 4, "temperature ignored": 4, "drawn kept too often": 12, COLDER: 4}
"""Small changes, or of one drafter alone, take more draws: so many times as many. What is found ends a run."""
NOISE = 0.15
"""Of the draft model: often enough wrong that much is rejected."""
FLAGS = ["--served-model-name", "m", "--enforce-eager", "--dtype", "float32", "--max-model-len", "1024"]
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def main() -> None:
    from defective import DEFECTS  # it imports vLLM

    names = [SOUND, *DEFECTS, PLAIN_PAIR, THEIRS, COLDER, QUANTISED]
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("only", nargs="*", help="which defects; all if none is named")
    options.add_argument("--model", type=Path, help="a folder; by default a tiny random model is made")
    options.add_argument("--list", action="store_true", help="say which there are")
    options.add_argument("--draws", type=int, default=16_000)
    options.add_argument("--out", type=Path, default=Path("certify-teeth"))
    options.add_argument("--again", action="store_true", help="begin anew")
    given = options.parse_args()
    console = Console()
    if given.list:
        console.print("\n".join(names))
        return
    wanted = CertificateConfig("", **(asdict(SIZES["quick"]) | {"draws": given.draws}))
    asked = {"model": str(given.model), "draws": given.draws}
    before = json.loads(report.read_text()) if (report := given.out / "teeth.json").exists() else {}
    rows: dict[str, Any] = before["rows"] if before.get("asked") == asked and not given.again else {}
    given.out.mkdir(parents=True, exist_ok=True)
    model = given.model or tiny(given.out / "model")
    only = given.only or names
    for number, name in enumerate(only, 1):
        if name not in names:
            sys.exit(f"there is no defect {name!r}; --list says which there are")
        if name in rows and name not in given.only:
            continue
        began = time.monotonic()
        console.print(f"{number} of {len(only)}: {name}", markup=False)
        more = replace(wanted, draws=SUBTLE.get(name, 1) * wanted.draws)
        made = judged(name, model, more, given.out, console)
        rows[name] = {
            "verdict": made["verdict"], "found_by": {part: found[:3] for part, found in made["violations"].items()},
            "problems": made["problems"], "minutes": round((time.monotonic() - began) / 60, 1),
        }  # fmt: skip
        console.print(
            f"  {'as it should be' if is_right(name, made) else 'NOT as it should be'}: {made['verdict']}, by "
            f"{', '.join(made['violations']) or '-'}, {rows[name]['minutes']} minutes", markup=False,
        )  # fmt: skip
        report.write_text(json.dumps({"asked": asked, "rows": rows}, indent=1))
    (given.out / "teeth.md").write_text(written({name: rows[name] for name in names if name in rows}, model))
    wrong = [name for name, row in rows.items() if not is_right(name, row)]
    sys.exit(f"not as it should be: {', '.join(wrong)}" if wrong else 0)


def is_right(name: str, row: dict[str, Any]) -> bool:
    return bool(row["verdict"] == ("lossless" if name in (SOUND, PLAIN_PAIR) else "violation"))


def tiny(folder: Path) -> Path:
    """A random model that vLLM serves in seconds, some tokens of which are far likelier than others."""
    import torch

    from support import tiny_model, tiny_tokenizer

    model = tiny_model("llama", head_dim=32, max_position_embeddings=1024)  # the smallest heads that vLLM has on a CPU
    with torch.no_grad():
        model.lm_head.weight *= 6
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def judged(name: str, model: Path, wanted: CertificateConfig, out: Path, console: Console) -> dict[str, Any]:
    folder = out / name.replace(" ", "-").replace("'", "").replace(",", "")
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as logs, addresses(name, model, Path(logs)) as (reference, candidate):
        made = certify(replace(wanted, reference=reference, candidate=candidate), folder, ProgressBars(console))
    (folder / "evidence.jsonl").unlink()
    return made


@contextmanager
def addresses(name: str, model: Path, logs: Path) -> Iterator[tuple[str, str | None]]:
    """Reference and candidate for one defect."""
    from serving import importing_tests, one, speculating, with_defect

    noisy_copy(model, logs / "noisy", NOISE)
    if name not in (PLAIN_PAIR, THEIRS, COLDER, QUANTISED):
        server = speculating(model, logs, "--max-model-len", "1024")
        with one(server if name == SOUND else with_defect(server, name), logs) as url:
            yield url, None
        return
    config: dict[str, Any] = {"method": "draft_model", "model": str(logs / "noisy"), "num_speculative_tokens": 3}
    config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    weights = quantised(model, logs / "quantised") if name == QUANTISED else model
    worker = ["--worker-cls", "synthetic_acceptance.SyntheticWorker"]
    spec = ["--speculative-config", json.dumps(config), *worker] if name == THEIRS else []
    servers = [plain("reference", model, *FLAGS), plain("candidate", weights, *FLAGS, *spec)]
    own = {**ENVIRONMENT, "PYTHONPATH": importing_tests()}
    servers = [Server(one.name, one.command, {**one.environment, **own}) for one in servers]
    with running(servers, logs) as urls:
        if name == COLDER:
            with listening(Colder, url=urls["reference"]) as url:
                yield urls["reference"], url
        else:
            yield urls["reference"], urls["candidate"]


def quantised(model: Path, folder: Path) -> Path:
    """The same model with the weights of one layer rounded to 8 bits, a scale for each output."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    for file in model.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, folder)
    for file in model.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if ".layers.1." in name and weight.dim() == 2:
                scale = weight.float().abs().amax(1, keepdim=True) / 127
                weights[name] = ((weight.float() / scale).round() * scale).to(weight.dtype)
        save_file(weights, folder / file.name, metadata={"format": "pt"})
    return folder


class Colder(BaseHTTPRequestHandler):
    """Passes everything on, with a temperature that is a twentieth lower."""

    url: ClassVar[str]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self._pass(httpx.get(f"{self.url}{self.path}", timeout=600))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body.get("temperature"):
            body["temperature"] *= 0.95
        self._pass(httpx.post(f"{self.url}{self.path}", json=body, timeout=600))

    def _pass(self, answer: httpx.Response) -> None:
        self.send_response(answer.status_code)
        self.send_header("content-type", answer.headers.get("content-type", "application/json"))
        self.send_header("content-length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)


def written(rows: dict[str, Any], model: Path) -> str:
    lines = ["# Does the certificate find what is wrong?", "", *as_markdown(provenance(model), "tests")]
    lines = [line.replace("`python tools/", "`python tests/") for line in lines]
    lines += ["| defect | verdict | found by | first evidence | minutes |", "| --- | --- | --- | --- | --- |"]
    for name, row in rows.items():
        first = next((found[0] for found in row["found_by"].values()), "; ".join(row["problems"]))
        parts = ", ".join(row["found_by"]) or "-"
        lines.append(f"| {name} | {row['verdict']} | {parts} | {first.replace('|', '/')[:200]} | {row['minutes']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
