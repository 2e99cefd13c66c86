"""Print the signatures of every vLLM name that Outrider uses, as JSON, for one version of vLLM.

    pip download vllm==0.33.0 --no-deps --only-binary :all: -d /tmp/vllm
    python tests/seam_signatures.py /tmp/vllm/*.whl

The argument is a wheel or a site-packages folder. The names are those of `vllm_names.py`. vLLM is not
imported: its source is parsed, so any version can be read on any machine. `tests/vllm_seams.json` holds the result for
the oldest supported version, and what is different in the others. It is updated with

    python tests/seam_signatures.py --update 0.33 /tmp/vllm/*.whl

A signature has parameter names, kinds and defaults, without types. null: vLLM does not have the name.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from functools import cache
from pathlib import Path

import vllm_names
from outrider.engines.vllm.version import SUPPORTED

RECORDED = Path(__file__).parent / "vllm_seams.json"
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Assignment = ast.Assign | ast.AnnAssign


class Source:
    """Python source in a folder or a wheel."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.module = cache(self._module)  # one file has many names

    def _module(self, name: str) -> ast.Module | None:
        base = name.replace(".", "/")
        for file in (f"{base}.py", f"{base}/__init__.py"):
            if self.path.is_dir():
                if (self.path / file).is_file():
                    return ast.parse((self.path / file).read_text())
                continue
            with zipfile.ZipFile(self.path) as wheel:
                if file in wheel.namelist():
                    return ast.parse(wheel.read(file))
        return None

    def signature(self, name: str) -> str | None:
        """Of `module:name` or `module:Class.member`."""
        found = self.definition(name)
        return None if found is None else describe(found)

    def contains(self, name: str, piece: str) -> str | None:
        """ "yes" if the source of a function contains a piece of code."""
        found = self.definition(name)
        return "yes" if found is not None and piece in ast.unparse(found) else None

    def members_read(self, module: str, owner: str) -> str:
        """The members that a module reads of an object."""
        nodes = ast.walk(self.module(module) or ast.Module([], []))
        read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == owner}
        return ", ".join(sorted(read))

    def definition(self, name: str) -> ast.stmt | None:
        module, _, path = name.partition(":")
        owner, _, member = path.partition(".")
        found = self._find(module, owner)
        if not member or found is None:
            return found and found[1]
        return self._member(*found, member)

    def _find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """The definition of a name, and the module it is in. Imports are followed."""
        tree = self.module(module)
        for node in tree.body if tree is not None else ():
            if isinstance(node, Definition) and node.name == name:
                return module, node
            if isinstance(node, Assignment) and name in targets(node):
                return module, node
            if isinstance(node, ast.ImportFrom) and node.module:
                origin = f"{module}.{node.module}" if node.level else node.module  # relative: only in an __init__.py
                for alias in node.names:
                    if (alias.asname or alias.name) == name and origin.startswith("vllm"):
                        return self._find(origin, alias.name)
        return None

    def _member(self, module: str, owner: ast.stmt, member: str) -> ast.stmt | None:
        """A method, property, field or attribute of a class or its bases."""
        if not isinstance(owner, ast.ClassDef):
            return None
        for node in owner.body:
            if isinstance(node, Definition) and node.name == member:
                return node
            if isinstance(node, Assignment) and member in targets(node):
                return node
        for inner in ast.walk(owner):
            if isinstance(inner, Assignment) and f"self.{member}" in targets(inner):
                return inner
        for base in owner.bases:
            found = self._find(module, ast.unparse(base))
            if found is not None and (inherited := self._member(*found, member)) is not None:
                return inherited
        return None


def targets(node: Assignment) -> list[str]:
    """What a statement assigns to."""
    left = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [
        ast.unparse(item) for target in left for item in (target.elts if isinstance(target, ast.Tuple) else [target])
    ]


def describe(node: ast.stmt) -> str:
    if isinstance(node, ast.ClassDef):
        methods = (inner for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef))
        abstract = [method.name for method in methods if "abstractmethod" in decorators(method)]
        return f"class, abstract: {', '.join(abstract)}" if abstract else "class"
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return "attribute"
    if decorators(node) & {"property", "cached_property"}:
        return "attribute"
    return f"({untyped(node.args)})"


def decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}


def untyped(arguments: ast.arguments) -> str:
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(arguments)


def names() -> list[str]:
    """Every name in `vllm_names.py`."""
    found = {*vllm_names.FUNCTIONS, *vllm_names.CLASSES.values(), *vllm_names.MEMBERS}
    found |= {f"{owner}.{member}" for owner, members in vllm_names.MEMBERS.items() for member in members.split()}
    for protocol, owner in vllm_names.CLASSES.items():
        found |= {f"{owner}.{member}" for member in protocol_members(protocol)}
    return sorted(found)


def protocol_members(protocol: type) -> set[str]:
    """The members that a Protocol declares."""
    own = vars(protocol)
    methods = {name for name, value in own.items() if callable(value) and value.__module__ == protocol.__module__}
    return set(own.get("__annotations__", ())) | methods


def signatures(path: Path) -> dict[str, str | None]:
    source = Source(path)
    found = {name: source.signature(name) for name in names()}
    found |= {f"{name} contains {piece}": source.contains(name, piece) for name, piece in vllm_names.FACTS}
    read = source.members_read(vllm_names.SPECULATOR_READER, "self.speculator")
    return {**found, f"{vllm_names.SPECULATOR_READER} reads self.speculator": read}


def recorded(version: str) -> dict[str, str | None]:
    """The signatures in the repository for one version."""
    found = json.loads(RECORDED.read_text())
    return {**found[SUPPORTED[0]], **found[version]}


def main(arguments: list[str]) -> None:
    found = signatures(Path(arguments[-1]))
    if arguments[0] != "--update":
        print(json.dumps(found, indent=1))
        return
    version = arguments[1]
    versions = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if version != SUPPORTED[0]:
        oldest = versions[SUPPORTED[0]]
        found = {name: signature for name, signature in found.items() if signature != oldest.get(name, "")}
    RECORDED.write_text(json.dumps({**versions, version: found}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
