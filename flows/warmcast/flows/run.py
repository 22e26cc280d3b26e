"""``deploy``: the steps of a deployment, composed; for the command, for flows and for other code.

Resolve the source; convert pickles; measure and mirror each file; publish. Nothing that the origin
has is moved twice, so a deploy that was killed is resumed by running it again. Until the last step
no ref is touched.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from warmcast.flows.convert.options import ConvertOptions
from warmcast.flows.errors import SourceError
from warmcast.flows.local import LocalFile
from warmcast.flows.progress import Progress, Silent, nbytes_text
from warmcast.flows.runner import InProcess, Runner, Ticker
from warmcast.flows.steps.convert import (
    ConversionRecord,
    Request,
    conversion_key,
    convert_weights,
    needs_conversion,
    record_conversion,
    recorded_conversion,
)
from warmcast.flows.steps.lay_out import LaidOut, Model, lay_out
from warmcast.flows.steps.meshes import MeshRequest
from warmcast.flows.steps.mirror import Mirrored, mirror_file
from warmcast.flows.steps.order import load_order
from warmcast.flows.steps.publish import Collected, Signing, publish
from warmcast.flows.steps.resolve import Plan, resolve
from warmcast.flows.steps.weights import check_index, metadata_ties, read_headers
from warmcast.flows.upstreams import Upstream, UpstreamFile, open_upstream, read_small
from warmcast.flows.workfolder import WorkFolder
from warmcast.manifests.checksum import crc32c, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import IntegrityError, InvalidData
from warmcast.manifests.header import Header
from warmcast.manifests.identity import Mesh
from warmcast.manifests.manifest import (
    FileEntry,
    Manifest,
    TensorEntry,
    TiedEntry,
    build_manifest,
)
from warmcast.manifests.origin import Origin, Ref, now

_NEVER = Deadline.never()
_AS_IT_IS = ConvertOptions()
_CONFIG = "config.json"
_CONFIG_LIMIT = 1 << 24
_READ = 1 << 24


@dataclass(frozen=True, slots=True)
class DeployResult:
    """What a deploy did. ``changed``: the ref was moved. ``moved``: paths whose bytes were sent."""

    ref: str
    manifest: Manifest
    changed: bool
    moved: tuple[str, ...]
    left_out: tuple[str, ...]
    seconds: float

    @property
    def moved_nbytes(self) -> int:
        """Bytes that were sent to the origin."""
        return sum(self.manifest.file[path].size for path in self.moved)

    @property
    def kept_nbytes(self) -> int:
        """Bytes that the origin had already."""
        return self.manifest.nbytes - self.moved_nbytes

    def summary(self) -> str:
        """One line for people."""
        what = "published" if self.changed else "nothing changed"
        return (
            f"{self.ref}: {what}: manifest {self.manifest.digest[:12]}, "
            f"{len(self.moved)} of {len(self.manifest.files)} files moved "
            f"({nbytes_text(self.moved_nbytes)}), {nbytes_text(self.kept_nbytes)} already there, "
            f"{self.seconds:.1f} s"
        )

    def record(self) -> dict[str, Any]:
        """The same as a JSON value, for programs."""
        moved = set(self.moved)
        return {
            "ref": self.ref,
            "manifest": self.manifest.digest,
            "model_key": self.manifest.model_key,
            "changed": self.changed,
            "files": [
                {"path": f.path, "size": f.size, "sha256": f.sha256, "moved": f.path in moved}
                for f in self.manifest.files
            ],
            "moved_files": len(self.moved),
            "moved_bytes": self.moved_nbytes,
            "kept_bytes": self.kept_nbytes,
            "left_out": list(self.left_out),
            "seconds": round(self.seconds, 3),
            "summary": self.summary(),
        }


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights as they will be deployed: files here, or a record of those in the origin."""

    files: tuple[LocalFile, ...] = ()
    headers: Mapping[str, Header] = field(default_factory=dict)
    tied: tuple[TiedEntry, ...] = ()
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    recorded: ConversionRecord | None = None


def deploy(
    source: str | Path,
    origin_url: str,
    ref: str,
    *,
    revision: str | None = None,
    meshes: Sequence[Mesh | MeshRequest] = (),
    convert: ConvertOptions = _AS_IT_IS,
    work: Path | None = None,
    repair: bool = False,
    signing: Signing | None = None,
    deadline: Deadline = _NEVER,
    progress: Progress | None = None,
    runner: Callable[[Ticker], Runner] = InProcess,
) -> DeployResult:
    """Deploy ``source`` (a folder) into the origin at ``origin_url``, and point ``ref`` at it.

    ``signing`` signs the manifest. ``revision`` overrides what the source says of itself. For each
    of ``meshes`` the manifest gets a layout. What is no safetensors is converted in a folder below
    ``work``, as ``convert`` says. ``repair`` re-reads what the origin has already and replaces
    what is wrong.

    Raises :class:`UsageError`, :class:`DeployError` and its kinds, :class:`StoreError` and its
    kinds (``PreconditionFailed`` if another deploy moved the ref), ``DeadlineExceeded``. When it
    raises, the ref stands where it stood, and nothing is left in the work folder.
    """
    target = Ref.parse(ref)
    progress = progress or Silent()
    attempt = partial(
        _attempt, source, origin_url, target, revision, meshes, convert, work, repair,
        signing, deadline, progress, runner, time.monotonic(),
    )  # fmt: skip
    try:
        return attempt()
    except Collected as cause:
        progress.note(f"once more: {cause}")
        return attempt()


def _attempt(
    source: str | Path,
    origin_url: str,
    target: Ref,
    revision: str | None,
    meshes: Sequence[Mesh | MeshRequest],
    convert: ConvertOptions,
    work: Path | None,
    repair: bool,
    signing: Signing | None,
    deadline: Deadline,
    progress: Progress,
    runner: Callable[[Ticker], Runner],
    began: float,
) -> DeployResult:
    upstream = open_upstream(source, deadline)
    ticker = Ticker(deadline, progress.advance)
    with Origin.open(origin_url) as origin, WorkFolder(work) as folder:
        job = _Job(
            origin, upstream, folder, convert, repair, deadline, progress, ticker,
            runner(ticker),
        )  # fmt: skip
        before = origin.ref(target, deadline)
        plan = job.runner.call("resolve", lambda: resolve(upstream, deadline))
        config = _config(upstream, plan.others, deadline)
        others = tuple(_here(upstream, file, deadline) for file in plan.others)
        weights = job.weights(plan, config)
        config = config or dict(weights.config)
        left_out = (*plan.left_out, *weights.notes)
        for note in left_out:
            progress.note(f"note: {note}")
        mirrored = job.mirror(weights, others)
        files, tensors, tied = job.entries(weights, mirrored)
        laid_out = job.laid_out(Model(config, files, tensors, tied, job.reader(files)), meshes)
        manifest = build_manifest(
            model=target.model,
            revision=upstream.revision if revision is None else revision,
            upstream=upstream.name,
            created_at=now(),
            files=(*files, *laid_out.files),
            tensors=tensors,
            tied=tied,
            config=config,
            layouts=laid_out.layouts,
        )
        published = job.runner.call(
            "publish", lambda: publish(origin, target, manifest, before, deadline, signing)
        )
    return DeployResult(
        ref=str(target),
        manifest=published.manifest,
        changed=published.changed,
        moved=(*(item.file.path for item in mirrored if item.moved), *laid_out.moved),
        left_out=left_out,
        seconds=time.monotonic() - began,
    )


@dataclass(frozen=True, slots=True)
class _Job:
    """What the steps of one deploy have in common."""

    origin: Origin
    upstream: Upstream
    folder: WorkFolder
    convert: ConvertOptions
    repair: bool
    deadline: Deadline
    progress: Progress
    ticker: Ticker
    runner: Runner

    def weights(self, plan: Plan, config: Mapping[str, Any]) -> _Weights:
        """Bring the weights, and convert them if need be and they are not known yet."""
        brought = tuple(_here(self.upstream, file, self.deadline) for file in plan.weights)
        if not needs_conversion(plan.format, self.convert):
            headers = read_headers(brought)
            notes: list[str] = []
            if plan.index is not None:
                holder = {t.name: path for path, h in headers.items() for t in h.tensors}
                notes = check_index(plan.index, holder)
            return _Weights(brought, headers, metadata_ties(headers), tuple(notes))
        request = Request(plan.format, brought, self.convert, plan.index, config)
        return self.runner.call("convert", lambda: self._converted(request))

    def _converted(self, request: Request) -> _Weights:
        with self.progress.stage("read what is converted", request.nbytes):
            key = conversion_key(request, self.ticker)
        recorded = recorded_conversion(
            self.origin, key, self.deadline, reread=self.ticker if self.repair else None
        )
        if recorded is not None:
            return _Weights(
                tied=recorded.tied, notes=recorded.left_out, config=recorded.config,
                recorded=recorded,
            )  # fmt: skip
        with self.progress.stage("convert", request.nbytes):
            converted = convert_weights(
                request, self.folder, deadline=self.deadline, tick=self.ticker
            )
        weights = tuple(f for f in converted.files if f.path.endswith(".safetensors"))
        return _Weights(
            converted.files, read_headers(weights), converted.tied, converted.left_out,
            converted.config, key,
        )  # fmt: skip

    def mirror(self, weights: _Weights, others: Sequence[LocalFile]) -> list[Mirrored]:
        """Measure and mirror every file, and remember a conversion once all of it is there."""
        local = (*weights.files, *others)
        with self.progress.stage("read and upload", 2 * sum(file.size for file in local)):
            mirrored = self.runner.map(
                "mirror",
                lambda file: mirror_file(
                    self.origin,
                    file,
                    weights.headers[file.path].tensors if file.path in weights.headers else (),
                    self.deadline,
                    self.ticker,
                    repair=self.repair,
                ),
                local,
                lambda file: file.path,
            )
        if weights.key is not None:
            converted = mirrored[: len(weights.files)]
            record = ConversionRecord(
                files=tuple(item.file for item in converted),
                tensors=tuple(t for item in converted for t in item.measured.tensors),
                tied=weights.tied,
                left_out=weights.notes,
                config=dict(weights.config),
            )
            record_conversion(self.origin, weights.key, record, self.deadline)
        return mirrored

    def entries(
        self, weights: _Weights, mirrored: Sequence[Mirrored]
    ) -> tuple[list[FileEntry], list[TensorEntry], tuple[TiedEntry, ...]]:
        """What the manifest says of files, of tensors in load order, and of ties."""
        files = [item.file for item in mirrored]
        tensors = [tensor for item in mirrored for tensor in item.measured.tensors]
        if weights.recorded is not None:
            files += weights.recorded.files
            tensors += weights.recorded.tensors
        tied = tuple(sorted(weights.tied, key=lambda tie: load_order(tie.name)))
        return files, sorted(tensors, key=lambda t: load_order(t.name)), tied

    def laid_out(self, model: Model, meshes: Sequence[Mesh | MeshRequest]) -> LaidOut:
        """The layouts for meshes, and their rank files."""
        if not meshes:
            return LaidOut()
        return self.runner.call(
            "lay out",
            lambda: lay_out(
                self.origin, model, meshes, self.folder, self.deadline, self.ticker, self.progress,
                repair=self.repair,
            ),
        )  # fmt: skip

    def reader(self, files: Sequence[FileEntry]) -> Callable[[TensorEntry], memoryview]:
        """Reads a tensor's bytes from the origin, which has all of them by now."""
        blobs = {file.path: file.sha256 for file in files}

        def read(tensor: TensorEntry) -> memoryview:
            view = memoryview(bytearray(tensor.nbytes))
            for start in range(0, len(view), _READ):
                piece = view[start : start + _READ]
                self.origin.read_blob(
                    blobs[tensor.file], tensor.begin + start, piece, self.deadline
                )
            if to_hex(crc32c(view)) != tensor.crc32c:
                raise IntegrityError(
                    f"tensor {tensor.name!r} as the origin has it",
                    expected=f"CRC32C {tensor.crc32c}",
                    found=to_hex(crc32c(view)),
                    do="deploy again with --repair",
                )
            return view

        return read


def _here(upstream: Upstream, file: UpstreamFile, deadline: Deadline) -> LocalFile:
    local = upstream.local(file, deadline)
    if local is None:
        raise SourceError(file.path, expected="a file on this machine", found="one elsewhere")
    return local


def _config(
    upstream: Upstream, files: Sequence[UpstreamFile], deadline: Deadline
) -> dict[str, Any]:
    """The parsed ``config.json``, ``{}`` if there is none."""
    file = next((file for file in files if file.path == _CONFIG), None)
    if file is None:
        return {}
    text = read_small(upstream, file, _CONFIG_LIMIT, deadline)
    try:
        # Configs are written by Python, whose JSON knows NaN and infinities; canonical JSON does
        # not, so they become strings.
        value = json.loads(text, parse_constant=str, parse_float=_finite)
    except (ValueError, RecursionError) as cause:
        raise InvalidData(_CONFIG, expected="JSON in UTF-8", found=str(cause)) from None
    if not isinstance(value, dict):
        raise InvalidData(_CONFIG, expected="a JSON object", found=type(value).__name__)
    return value


def _finite(text: str) -> float | str:
    """A JSON number; the text itself if it is beyond what a float can hold."""
    value = float(text)
    return value if math.isfinite(value) else text
