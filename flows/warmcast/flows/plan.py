"""Plan: what a deploy would do, without doing it. Nothing is written, no weights are read.

Which files the origin has follows from what the upstream publishes of them, and from what the
origin remembers. Of a file of which neither tells enough (one in a folder), only a deploy finds
out: its bytes are counted as *perhaps*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmcast.flows.config import Job
from warmcast.flows.convert.options import ConvertOptions
from warmcast.flows.local import LocalFile
from warmcast.flows.progress import nbytes_text, printable
from warmcast.flows.runner import InProcess, Ticker
from warmcast.flows.steps.convert import (
    ConversionRecord,
    Request,
    conversion_key,
    needs_conversion,
    recorded_conversion,
)
from warmcast.flows.steps.known import Known, Recalling
from warmcast.flows.steps.meshes import MeshRequest
from warmcast.flows.steps.resolve import Plan, resolve
from warmcast.flows.steps.shards import FOLDER
from warmcast.flows.upstreams import UpstreamFile, open_upstream
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import NotFound
from warmcast.manifests.manifest import Manifest
from warmcast.manifests.origin import Origin, Ref

_NEW = "a new manifest"
_PERHAPS = "perhaps a new manifest"
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class RefPlan:
    """A ref: the digest that it names, None if it is new, and what would become of it."""

    ref: str
    now: str | None
    then: str

    def __str__(self) -> str:
        now = self.now[:12] if self.now else "nothing"
        if self.then == self.now:
            return f"{self.ref}: {now}, stays"
        then = self.then[:12] if len(self.then) == 64 else self.then
        return f"{self.ref}: {now} → {then}"


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What one deploy would do.

    ``known``, ``moving`` and ``perhaps`` are paths: of files that the origin has, of those that
    would be moved, and of those of which only a deploy can tell. ``converted`` tells of what
    becomes safetensors first.
    """

    source: str
    upstream: str
    revision: str
    known: tuple[str, ...]
    moving: tuple[str, ...]
    perhaps: tuple[str, ...]
    known_nbytes: int
    moving_nbytes: int
    perhaps_nbytes: int
    converted: str | None
    meshes: tuple[str, ...]
    notes: tuple[str, ...]
    refs: tuple[RefPlan, ...]

    @property
    def changes(self) -> bool:
        """Whether a ref would move, or might."""
        return any(ref.now != ref.then for ref in self.refs)

    def lines(self) -> list[str]:
        """The same for people."""
        files = [f"{len(self.known)} there ({nbytes_text(self.known_nbytes)})"]
        for verb, paths, nbytes in (
            ("to move", self.moving, self.moving_nbytes),
            ("to move perhaps", self.perhaps, self.perhaps_nbytes),
        ):
            if paths:
                more = f", … {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
                names = ", ".join(paths[:_SHOWN]) + more
                files.append(f"{len(paths)} {verb} ({nbytes_text(nbytes)}): {names}")
        rows = [
            ("upstream", self.source),
            ("revision", self.revision or "none told"),
            *(("files", line) for line in files),
            *([("convert", self.converted)] if self.converted else []),
            *(("mesh", line) for line in self.meshes),
            *(("note", line) for line in self.notes),
            *(("ref", str(ref)) for ref in self.refs),
        ]
        return [f"  {name:<9}{printable(value)}" for name, value in rows]

    def record(self) -> dict[str, Any]:
        """The same as a JSON value."""
        return {
            "source": self.source,
            "upstream": self.upstream,
            "revision": self.revision,
            "known": list(self.known),
            "moving": list(self.moving),
            "perhaps": list(self.perhaps),
            "known_bytes": self.known_nbytes,
            "moving_bytes": self.moving_nbytes,
            "perhaps_bytes": self.perhaps_nbytes,
            "convert": self.converted,
            "meshes": list(self.meshes),
            "notes": list(self.notes),
            "refs": [{"ref": r.ref, "now": r.now, "then": r.then} for r in self.refs],
            "changes": self.changes,
        }


def plan_job(job: Job, origin_url: str, deadline: Deadline) -> ModelPlan:
    """What :func:`warmcast.flows.jobs.run_job` would do. Raises what it would, so far as it shows.

    An origin that does not exist yet has nothing.
    """
    upstream = open_upstream(job.source, deadline)
    try:
        with Origin.open(origin_url) as origin:
            recalling = Recalling(upstream, Known(origin, upstream.name))
            plan = resolve(
                recalling, deadline, allow=job.allow, ignore=job.ignore,
                convert=job.convert.options(),
            )  # fmt: skip
            return _planned(job, recalling, plan, origin, deadline)
    finally:
        upstream.close()


def _planned(
    job: Job,
    upstream: Recalling,
    plan: Plan,
    origin: Origin,
    deadline: Deadline,
) -> ModelPlan:
    options = job.convert.options()
    converting = needs_conversion(plan.format, options)
    weights = {file.path for file in plan.weights}
    ticker = Ticker(deadline, lambda _: None)

    def recall(file: UpstreamFile) -> str | None:
        found = upstream.recall(file, deadline, weights=file.path in weights)
        return found.file.sha256 if found is not None else None

    converted, record = None, None
    files = plan.others if converting else (*plan.weights, *plan.others)
    found = InProcess(ticker).map("plan", recall, files, lambda file: file.path)
    there = {f.path: sha for f, sha in zip(files, found, strict=True) if sha is not None}
    moving = [f for f in files if f.path not in there and _is_told(f)]
    perhaps = [f for f in files if f.path not in there and not _is_told(f)]
    known_nbytes = sum(file.size for file in files if file.path in there)
    if converting:
        record = _conversion(options, plan, origin, deadline)
        nbytes = sum(file.size for file in plan.weights)
        what = f"{len(plan.weights)} files of {plan.format}, {nbytes_text(nbytes)}"
        if record is not None:
            there |= {file.path: file.sha256 for file in record.files}
            known_nbytes += sum(file.size for file in record.files)
            converted = f"{what}: what they became is there"
        else:
            converted = f"{what}: become safetensors"
            perhaps += plan.weights
    revision = upstream.revision if job.revision is None else job.revision
    then = there if not (moving or perhaps) else None
    new = _PERHAPS if perhaps and not moving else _NEW
    return ModelPlan(
        source=job.source,
        upstream=upstream.name,
        revision=revision,
        known=tuple(there),
        moving=tuple(file.path for file in moving),
        perhaps=tuple(file.path for file in perhaps),
        known_nbytes=known_nbytes,
        moving_nbytes=sum(file.size for file in moving),
        perhaps_nbytes=sum(file.size for file in perhaps),
        converted=converted,
        meshes=tuple(map(_mesh, job.requests())),
        notes=plan.left_out,
        refs=tuple(
            _ref(origin, ref, then, new, (upstream.name, revision), job.requests(), deadline)
            for ref in job.refs
        ),
    )


def _is_told(file: UpstreamFile) -> bool:
    """Whether the upstream tells enough of a file for it to be known."""
    return file.sha256 is not None or bool(file.version) or file.crc32c is not None


def _conversion(
    options: ConvertOptions, plan: Plan, origin: Origin, deadline: Deadline
) -> ConversionRecord | None:
    """What the weights became when they were converted before, if that can be known."""
    published = {f.path: f.sha256 for f in plan.weights if f.sha256 is not None}
    if len(published) < len(plan.weights) or options.base is not None:
        return None
    files = tuple(LocalFile(f.path, Path(f.path), f.size, 0, 0) for f in plan.weights)
    request = Request(plan.format, files, options, plan.index)
    key = conversion_key(request, lambda _: None, published)
    return recorded_conversion(origin, key, deadline)


def _ref(
    origin: Origin,
    ref: str,
    then: dict[str, str] | None,
    new: str,
    made_of: tuple[str, str],
    meshes: Sequence[MeshRequest],
    deadline: Deadline,
) -> RefPlan:
    state = origin.ref(Ref.parse(ref), deadline)
    if state is None:
        return RefPlan(ref, None, _NEW)
    now = state.record.manifest
    try:
        manifest = origin.manifest(now, deadline)
    except NotFound:
        return RefPlan(ref, now, _NEW)
    same = (
        then is not None
        and made_of == (manifest.upstream, manifest.revision)
        and then == {f.path: f.sha256 for f in manifest.files if not f.path.startswith(FOLDER)}
        and _laid_out(manifest) == [(dict(m.dimensions), m.presharded) for m in meshes]
    )
    return RefPlan(ref, now, now if same else new)


def _laid_out(manifest: Manifest) -> list[tuple[dict[str, int], bool]]:
    return [(dict(entry.mesh.dimensions), bool(entry.shards)) for entry in manifest.layouts]


def _mesh(mesh: MeshRequest) -> str:
    dimensions = " × ".join(f"{name} {size}" for name, size in mesh.dimensions.items())
    plan = "transformers' plan" if mesh.plan == "transformers" else f"{len(mesh.plan)} rules"
    return f"{dimensions}, {plan}" + (", rank files" if mesh.presharded else "")
