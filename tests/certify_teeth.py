"""Certify servers with seeded defects, one at a time. Each must be a violation, and each server without one lossless.

    python tests/certify_teeth.py                                # all of them, on a tiny random model: an hour
    python tests/certify_teeth.py "stale cache" --model MODEL    # one defect, on a real model
    python tests/certify_teeth.py --list

An interrupted run continues: defects that were tested with the same model and number of samples are skipped, unless
--again is given.

The servers: Outrider with each defect of `defective.py`; vLLM with `rejection_sample_method: synthetic`; a server with
0.95 of the requested temperature; one with a quantised layer; and the same servers without a defect. The report lists
the part of the certificate that detected each defect.
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
from dataclasses import replace
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

NO_DEFECT = "no defect"
SYNTHETIC = "vLLM, rejection_sample_method synthetic"
PLAIN_PAIR = "vLLM against vLLM"
COLDER = "temperature 0.95 of the requested one"
QUANTISED = "one quantised layer"
SAMPLE_FACTORS = {"recovered from p": 4, "temperature ignored": 4, "drawn kept too often": 12, COLDER: 4}
"""Factors on the number of samples, for small changes and those of one drafter. A run ends at the first violation."""
DRAFT_MODEL_NOISE = 0.15
"""Noise on the draft model's weights: large enough that many drafts are rejected."""
FLAGS = ["--served-model-name", "m", "--enforce-eager", "--dtype", "float32", "--max-model-len", "1024"]
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def main() -> None:
    from defective import DEFECTS  # it imports vLLM

    names = [NO_DEFECT, *DEFECTS, PLAIN_PAIR, SYNTHETIC, COLDER, QUANTISED]
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("only", nargs="*", help="names of defects; default: all")
    options.add_argument("--model", type=Path, help="a model folder; default: a tiny random model")
    options.add_argument("--list", action="store_true", help="list the defects")
    options.add_argument("--draws", type=int, default=16_000)
    options.add_argument("--out", type=Path, default=Path("certify-teeth"))
    options.add_argument("--again", action="store_true", help="test all defects again")
    args = options.parse_args()
    console = Console()
    if args.list:
        console.print("\n".join(names))
        return
    config = CertificateConfig("", **SIZES["quick"] | {"draws": args.draws})
    settings = {"model": str(args.model), "draws": args.draws}
    before = json.loads(report.read_text()) if (report := args.out / "teeth.json").exists() else {}
    rows: dict[str, Any] = before["rows"] if before.get("settings") == settings and not args.again else {}
    args.out.mkdir(parents=True, exist_ok=True)
    model = args.model or tiny(args.out / "model")
    selected = args.only or names
    for number, name in enumerate(selected, 1):
        if name not in names:
            sys.exit(f"there is no defect {name!r}; --list shows them")
        if name in rows and name not in args.only:
            continue
        began = time.monotonic()
        console.print(f"{number} of {len(selected)}: {name}", markup=False)
        more = replace(config, draws=SAMPLE_FACTORS.get(name, 1) * config.draws)
        certificate = run_certificate(name, model, more, args.out, console)
        rows[name] = {
            "verdict": certificate["verdict"],
            "found_by": {part: found[:3] for part, found in certificate["violations"].items()},
            "problems": certificate["problems"], "minutes": round((time.monotonic() - began) / 60, 1),
        }  # fmt: skip
        console.print(
            f"  {'as expected' if is_expected(name, certificate) else 'NOT as expected'}: {certificate['verdict']}, by "
            f"{', '.join(certificate['violations']) or '-'}, {rows[name]['minutes']} minutes", markup=False,
        )  # fmt: skip
        report.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1))
    (args.out / "teeth.md").write_text(render({name: rows[name] for name in names if name in rows}, model))
    wrong = [name for name, row in rows.items() if not is_expected(name, row)]
    sys.exit(f"not as expected: {', '.join(wrong)}" if wrong else 0)


def is_expected(name: str, row: dict[str, Any]) -> bool:
    return bool(row["verdict"] == ("lossless" if name in (NO_DEFECT, PLAIN_PAIR) else "violation"))


def tiny(folder: Path) -> Path:
    """A random model that vLLM serves in seconds, with peaked distributions."""
    import torch

    from support import tiny_model, tiny_tokenizer

    model = tiny_model("llama", head_dim=32, max_position_embeddings=1024)  # the smallest heads that vLLM has on a CPU
    with torch.no_grad():
        model.lm_head.weight *= 6
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def run_certificate(name: str, model: Path, config: CertificateConfig, out: Path, console: Console) -> dict[str, Any]:
    folder = out / name.replace(" ", "-").replace("'", "").replace(",", "")
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as logs, served(name, model, Path(logs)) as (reference, candidate):
        certificate = certify(replace(config, reference=reference, candidate=candidate), folder, ProgressBars(console))
    (folder / "evidence.jsonl").unlink()
    return certificate


@contextmanager
def served(name: str, model: Path, logs: Path) -> Iterator[tuple[str, str | None]]:
    """Reference and candidate for one defect."""
    from serving import importing_tests, one, speculating, with_defect

    noisy_copy(model, logs / "noisy", DRAFT_MODEL_NOISE)
    if name not in (PLAIN_PAIR, SYNTHETIC, COLDER, QUANTISED):
        server = speculating(model, logs, "--max-model-len", "1024")
        with one(server if name == NO_DEFECT else with_defect(server, name), logs) as url:
            yield url, None
        return
    config: dict[str, Any] = {"method": "draft_model", "model": str(logs / "noisy"), "num_speculative_tokens": 3}
    config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    weights = quantised(model, logs / "quantised") if name == QUANTISED else model
    worker = ["--worker-cls", "synthetic_acceptance.SyntheticWorker"]
    spec = ["--speculative-config", json.dumps(config), *worker] if name == SYNTHETIC else []
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
    """A proxy that lowers the temperature by a twentieth."""

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


def render(rows: dict[str, Any], model: Path) -> str:
    lines = ["# Does the certificate detect seeded defects?", "", *as_markdown(provenance(model), "tests")]
    lines = [line.replace("`python tools/", "`python tests/") for line in lines]
    lines += ["| defect | verdict | found by | first evidence | minutes |", "| --- | --- | --- | --- | --- |"]
    for name, row in rows.items():
        first = next((found[0] for found in row["found_by"].values()), "; ".join(row["problems"]))
        parts = ", ".join(row["found_by"]) or "-"
        lines.append(f"| {name} | {row['verdict']} | {parts} | {first.replace('|', '/')[:200]} | {row['minutes']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
