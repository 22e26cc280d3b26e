"""Check these manifests as the API server would: ``python infra/kubernetes/check.py [FOLDER...]``.

Every resource that a kustomization brings is held against the JSON schemas of the oldest and of
the newest Kubernetes that the manifests are for, strictly: an unknown field, kind or API version
is an error, and so is a key that stands twice. Every YAML file of a folder has to be listed in
its kustomization. Needs no cluster, no kustomize and no network. Exit code 1, and a line for
each error.

Of a kustomization's fields only those in ``_FIELDS`` may be used: rendering then is gathering the
resources and naming the images.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import kubernetes_validate
import yaml

HERE = Path(__file__).parent
FOLDERS = (HERE / "base", HERE / "example")
VERSIONS = ("1.29", "1.37")

_NAME = "kustomization.yaml"
_FIELDS = {"apiVersion", "kind", "resources", "images"}

Document: TypeAlias = dict[str, Any]


class Invalid(Exception):
    """Manifests that cannot be read or rendered; says where."""


class _Loader(yaml.SafeLoader):
    """Refuses a mapping with a key that stands twice, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise yaml.MarkedYAMLError(
                problem=f"expected each key once, found again {sorted(twice)}",
                problem_mark=node.start_mark,
            )
        return super().construct_mapping(node, deep)


def render(folder: Path) -> list[Document]:
    """The resources of a kustomization and of those it builds on. Raises :class:`Invalid`."""
    kustomization = _kustomization(folder)
    documents: list[Document] = []
    for name in kustomization.get("resources", ()):
        path = folder / name
        documents += render(path) if path.is_dir() else read(path)
    for image in kustomization.get("images", ()):
        for container in containers(documents):
            if container["image"].partition(":")[0] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    return documents


def read(path: Path) -> list[Document]:
    """The documents of a YAML file. Raises :class:`Invalid`."""
    try:
        documents = list(yaml.load_all(path.read_text(), _Loader))
    except (OSError, yaml.YAMLError) as cause:
        raise Invalid(f"{path}: {cause}") from None
    for document in documents:
        if not isinstance(document, dict) or not {"apiVersion", "kind"} <= document.keys():
            raise Invalid(f"{path}: expected an object with apiVersion and kind, found {document}")
    return documents


def containers(documents: list[Document]) -> Iterator[Document]:
    """The containers, init containers first, of all pods."""
    for document in documents:
        pod = document.get("spec", {}).get("template", {}).get("spec", {})
        yield from pod.get("initContainers", ())
        yield from pod.get("containers", ())


def errors(folder: Path) -> list[str]:
    """What is wrong with a kustomization, a line each."""
    try:
        documents = render(folder)
        listed = set(_kustomization(folder)["resources"])
    except Invalid as cause:
        return [str(cause)]
    found = [
        f"{path}: expected to be listed in {_NAME}"
        for path in sorted(folder.rglob("*.y*ml"))
        if path.name != _NAME and str(path.relative_to(folder)) not in listed
    ]
    for document in documents:
        for version in VERSIONS:
            found += _schema_errors(folder, document, version)
    return found


def _schema_errors(folder: Path, document: Document, version: str) -> list[str]:
    name = f"{folder.name}: {document['kind']} {document.get('metadata', {}).get('name')}"
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as cause:
        where = ".".join(str(step) for step in cause.path)
        return [f"{name}: {where}: {cause.message} (Kubernetes {version})"]
    except kubernetes_validate.SchemaNotFoundError as cause:
        return [f"{name}: {cause.message}"]
    return []


def _kustomization(folder: Path) -> Document:
    path = folder / _NAME
    (kustomization,) = read(path)
    if unknown := kustomization.keys() - _FIELDS:
        raise Invalid(f"{path}: expected only {sorted(_FIELDS)}, found {sorted(unknown)}")
    return kustomization


def main(arguments: list[str]) -> int:
    """Check the folders, or all that are here; the exit code."""
    found = [line for folder in map(Path, arguments or FOLDERS) for line in errors(folder)]
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
