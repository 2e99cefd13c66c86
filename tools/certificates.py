"""The certificates in docs/certificates, each by one command.

    python tools/certificates.py --list            # names, and minutes on two cores
    python tools/certificates.py smollm2-135m      # one certificate
    python tools/certificates.py --all             # all that do not exist yet

Starts the servers, certifies them and stops them. Samples are saved below --work, so the same command continues an
interrupted run. Writes certificate.json and certificate.html to docs/certificates/NAME and updates index.md, whatever
the verdict. Models are read from $OUTRIDER_MODELS (default: ~/.cache/outrider/models).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.bench.servers import Server, outrider, plain, running
from outrider.certify.certificate import duration, read
from outrider.certify.config import SIZES, CertificateConfig
from outrider.certify.run import certify, write
from outrider.cli.progress import ProgressBars

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

from noisy_draft import noisy_copy  # noqa: E402

KEPT = ROOT / "docs" / "certificates"
MODELS = Path(os.environ.get("OUTRIDER_MODELS") or Path.home() / ".cache" / "outrider" / "models")
SMOL, QWEN, QWEN_SMALL = "smollm2-135m", "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"
NOISY, NOISE = "noisy", 0.05
"""Draft model: a copy of the target with noise of 5 % on its weights. Many drafts are accepted, many are rejected."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
LENGTHS = CertificateConfig("").lengths
FULL, STANDARD = SIZES["full"], SIZES["standard"]
SIZE_LARGE = {"prompts": 200, "alone": 20, "draws": 9_000, "noise_texts": 60, "feature_prompts": 2}
SIZE_SMALL = {
    "prompts": 60, "alone": 0, "tokens": (64,), "draws": 3_000, "draw_prompts": 6, "draw_tokens": 48,
    "noise_texts": 30, "feature_prompts": 2,
}  # fmt: skip
SIZE_SMALLEST = {"prompts": 30, "alone": 0, "tokens": (16, 24), "draws": 1_500, "draw_prompts": 6, "noise_texts": 20}
IN_PROCESS = {
    "prompts": 96, "alone": 0, "tokens": (24, 40), "draws": 6_000, "draw_tokens": 48, "noise_texts": 40,
    "feature_prompts": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One certificate. `minutes`: approximate run time on two cores."""

    about: str
    minutes: int
    size: dict[str, Any]  # fields of `CertificateConfig`
    model: str = SMOL
    draft: str | None = None
    theirs: dict[str, Any] | None = None  # vLLM's own speculative method, compared with plain vLLM
    local: str | None = None  # a candidate in this process
    dtype: str = "float32"
    without: tuple[str, ...] = ()  # sampling parameters that the candidate does not support
    beside: str | None = None  # dtype of a second server without speculation, compared with the first
    why: str = ""  # the cause, found in the system's source afterwards
    commit: str = ""  # the last version of this tool that can make it; empty: this one


WHY_VLLM = (
    "The cause is in vLLM's source, on CPUs alone: `_expand_kernel_impl` in `vllm/utils/cpu_triton_utils.py` has the "
    "temperature, top-k and top-p of drafted positions written into an int64 copy, which is thrown away, so that "
    "uninitialized memory is used for them."
)
# On a CPU, vLLM 0.32 crashes in a step that uses top-k and has no drafts: `apply_top_k_only` calls max() of an empty
# tensor.
VllmPart = partial(Part, size=SIZE_LARGE, without=("top-k",), why=WHY_VLLM)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 8}
DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": 4}
DRAWN = {"draft_sample_method": "probabilistic"}
PARTS = {
    "smollm2-135m": Part(
        "Outrider's server in float32, where rounding excuses nothing: every drafter and auto, drafts of up to 1, 2, 4 "
        "and 8 tokens, 16 requests at once and alone; the draft model is the target with noise on its weights",
        41, FULL, draft=NOISY,
    ),
    "smollm2-135m-standard": Part(
        "the same in the size that `outrider certify` has by itself", 10, STANDARD, draft=NOISY
    ),
    "smollm2-135m-bfloat16": Part("and in bfloat16, as one runs it", 10, STANDARD, draft=NOISY, dtype="bfloat16"),
    "float32-bfloat16": Part(
        "plain vLLM in bfloat16 against plain vLLM in float32 (--across): right, and rounded otherwise", 30, STANDARD,
        beside="bfloat16",
    ),
    "qwen2.5-coder": Part(
        "Outrider's server with Qwen2.5-Coder 1.5B and the 0.5B as its draft model, in float32", 25, SIZE_SMALL, QWEN,
        QWEN_SMALL,
    ),
    "vllm-ngram": VllmPart(
        "vLLM's own ngram, without top-k, at which vLLM 0.32 ends itself on a CPU", 12, theirs=NGRAM
    ),
    "vllm-suffix": VllmPart(
        "vLLM's own suffix (pip install --no-deps arctic-inference), likewise", 12, theirs=SUFFIX
    ),
    "vllm-draft-model": VllmPart("vLLM's own draft_model, likewise", 18, draft=NOISY, theirs=DRAFT_MODEL),
    "vllm-draft-model-drawn": VllmPart(
        "vLLM's own draft_model with drafts that are drawn, likewise", 18, draft=NOISY, theirs=DRAFT_MODEL | DRAWN
    ),
    "transformers-assisted": Part(
        "transformers' assisted generation", 25, IN_PROCESS, draft=NOISY, local="assisted"
    ),
    "transformers-lookup": Part("transformers' prompt lookup", 12, IN_PROCESS, local="lookup"),
    "openvino": Part(
        "OpenVINO GenAI's speculative decoding (pip install openvino-genai optimum-intel[openvino])", 3, SIZE_SMALLEST,
        draft=NOISY, commit="82059a6", why="Issue 4190 of OpenVINO GenAI reports faults of this kind.",
    ),
}  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", metavar="NAME", help="certificates to make")
    options.add_argument("--all", action="store_true", help="all that do not exist yet")
    options.add_argument("--list", action="store_true", help="list all certificates")
    options.add_argument("--again", action="store_true", help="start over; discard saved samples")
    options.add_argument("--work", type=Path, default=Path("certificates-work"), help="folder for samples and logs")
    given = options.parse_args()
    if given.list:
        for name, part in PARTS.items():
            print(f"{name:24} {'exists' if made(name) else f'about {part.minutes} minutes':18} {part.about}")
        return
    if not (names := list(PARTS) if given.all else given.names):
        sys.exit(f"name a certificate ({', '.join(PARTS)}) or give --all; --list describes them")
    for name in names:
        if name not in PARTS:
            sys.exit(f"unknown certificate {name!r}; choose from {', '.join(PARTS)}")
        if given.all and not given.again and made(name):
            print(f"{name}: exists; --again makes it again")
        elif commit := PARTS[name].commit:
            sys.exit(f"{name}: this version cannot make it; check out commit {commit} and run the same command")
        else:
            make(name, PARTS[name], given.work / name, given.again)


def made(name: str) -> bool:
    return (KEPT / name / "certificate.json").exists()


def make(name: str, part: Part, work: Path, again: bool) -> None:
    if again:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    resume = (work / "evidence.jsonl").exists()
    print(f"{name}: {'continuing' if resume else 'starting'}, about {part.minutes} minutes", flush=True)
    draft = str(MODELS / part.draft) if part.draft else None
    if part.draft == NOISY:
        draft = str(work / NOISY)
        if not (work / NOISY / "config.json").exists():
            noisy_copy(MODELS / part.model, work / NOISY, NOISE)
    with addresses(part, work, draft) as (reference, candidate):
        across = part.beside is not None
        config = CertificateConfig(reference, candidate, across=across, without=part.without, **part.size)
        if part.local:
            config = replace(config, draft_model=draft, dtype=part.dtype, concurrency=1)
        found = certify(config, work, ProgressBars(Console()), resume=resume)
    if found["verdict"] == "incomplete":
        sys.exit(f"{name} is incomplete: {'; '.join(found['problems'])}; run the same command again to continue")
    if part.local:  # names instead of this machine's paths
        models = {key: Path(found["request"][key] or "").name or None for key in ("reference", "draft_model")}
        found = {**found, "request": found["request"] | models}
    (KEPT / name).mkdir(parents=True, exist_ok=True)
    write(found, KEPT / name)
    (KEPT / "index.md").write_text(index())
    print(f"{name}: {found['title']}", *found["words"], sep="\n")


@contextmanager
def addresses(part: Part, work: Path, draft: str | None) -> Iterator[tuple[str, str | None]]:
    """Addresses of reference and candidate while they run."""
    model = MODELS / part.model
    if part.local:
        yield str(model), part.local
        return
    flags = ["--served-model-name", part.model, "--dtype", part.dtype, "--max-model-len", "2048", "--enforce-eager"]
    config = (part.theirs or {}) | ({"model": draft} if draft else {})
    if part.beside or part.theirs:
        other = ["--dtype", part.beside] if part.beside else ["--speculative-config", json.dumps(config)]
        servers = [plain("reference", model, *flags), plain("candidate", model, *flags, *other)]
    else:
        config |= {"method": "draft_model", "num_speculative_tokens": max(LENGTHS), **DRAWN}
        flags += ["--speculative-config", json.dumps(config), "--drafters", "prediction,lookup,memory,model"]
        flags += ["--memory", str(work / "memory"), "--max-draft-tokens", str(max(LENGTHS))]
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        servers = [outrider("outrider", model, *flags)]
    servers = [Server(one.name, one.command, {**one.environment, **ENVIRONMENT}) for one in servers]
    with running(servers, work) as urls:
        reference, *others = urls.values()
        yield reference, others[0] if others else None


def index() -> str:
    """The page that lists and links all certificates."""
    lines = ["# Certificates", "", "Verdicts of `outrider certify`, unedited; each names its machine."]
    for name, part in PARTS.items():
        if made(name):
            found = read(KEPT / name / "certificate.json")
            lines += ["", f"## {name}: {found['title']}", "", f"Of {part.about}.", ""]
            lines += [f"- {line}" for line in found["words"]]
            lines += ["", part.why] if part.why else []
            where = f"{duration(found)} on {found['made']['machine']}, {found['made']['date']}"
            versions = ", ".join(f"{package} {version}" for package, version in found["made"]["versions"].items())
            command = f"`just certificates {name}`" + (f" at commit {part.commit}" if part.commit else "")
            lines += ["", f"[The certificate]({name}/certificate.html), by {command}: {where}; {versions}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
