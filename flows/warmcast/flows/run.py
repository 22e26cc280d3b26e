"""``deploy``: the steps of a deployment, composed; for the command, for flows and for other code.

Resolve the source; convert pickles; measure and mirror each file; publish. Nothing that the origin
has is moved twice, so a deploy that was killed is resumed by running it again. Until the last step
no ref is touched.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from warmcast.flows.chunks import Lanes
from warmcast.flows.convert.options import ConvertOptions
from warmcast.flows.errors import SourceChanged
from warmcast.flows.local import LocalFile
from warmcast.flows.progress import Halved, Progress, Silent, nbytes_text
from warmcast.flows.runner import InProcess, Runner, Ticker
from warmcast.flows.steps.convert import (
    AdapterFiles,
    ConversionRecord,
    Request,
    conversion_key,
    convert_weights,
    needs_conversion,
    record_conversion,
    recorded_conversion,
)
from warmcast.flows.steps.errand import Errand
from warmcast.flows.steps.fetch import fetch
from warmcast.flows.steps.journal import Pace
from warmcast.flows.steps.known import Known, KnownFile, Recalling
from warmcast.flows.steps.lay_out import LaidOut, Model, lay_out
from warmcast.flows.steps.measure import Measured
from warmcast.flows.steps.meshes import MeshRequest
from warmcast.flows.steps.mirror import Mirrored, Streaming, mirror_file, stream_file
from warmcast.flows.steps.order import load_order
from warmcast.flows.steps.publish import Collected, Signing, publish
from warmcast.flows.steps.resolve import Plan, resolve
from warmcast.flows.steps.weights import (
    check_headers,
    check_index,
    fetch_header,
    metadata_ties,
    read_headers,
)
from warmcast.flows.upstreams import Upstream, UpstreamFile, pinned, read_small
from warmcast.flows.upstreams.overlay import open_source
from warmcast.flows.workfolder import WorkFolder
from warmcast.manifests.checksum import crc32c, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import IntegrityError, InvalidData, WarmcastError
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
_PACE = Pace()
_HEADERS = 8  # headers that are read at once
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
    """The weights as they will be deployed: files to mirror, those that are known, or a record."""

    files: tuple[LocalFile | UpstreamFile, ...] = ()
    known: tuple[KnownFile, ...] = ()
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
    allow: Sequence[str] = (),
    ignore: Sequence[str] = (),
    work: Path | None = None,
    repair: bool = False,
    signing: Signing | None = None,
    deadline: Deadline = _NEVER,
    progress: Progress | None = None,
    runner: Callable[[Ticker], Runner] = InProcess,
    pace: Pace = _PACE,
) -> DeployResult:
    """Deploy ``source`` into the origin at ``origin_url``, and point ``ref`` at it.

    ``source`` is a folder, or a URL (:func:`open_upstream`); of its files those that ``allow``
    matches (all, if empty) and ``ignore`` does not: see :func:`select`. One that lies elsewhere and
    changes meanwhile is deployed once more, as it is then. ``pace`` bounds what moves at once.

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
        _attempt, source, origin_url, target, revision, meshes, convert, allow, ignore,
        work, repair, signing, deadline, progress, runner, pace, time.monotonic(),
    )  # fmt: skip
    try:
        return attempt()
    except (Collected, _Changed) as cause:
        progress.note(f"once more: {cause}")
    try:
        return attempt()
    except _Changed as cause:
        raise cause.error from cause


def _attempt(
    source: str | Path,
    origin_url: str,
    target: Ref,
    revision: str | None,
    meshes: Sequence[Mesh | MeshRequest],
    convert: ConvertOptions,
    allow: Sequence[str],
    ignore: Sequence[str],
    work: Path | None,
    repair: bool,
    signing: Signing | None,
    deadline: Deadline,
    progress: Progress,
    runner: Callable[[Ticker], Runner],
    pace: Pace,
    began: float,
) -> DeployResult:
    ticker = Ticker(deadline, progress.advance)
    with (
        Origin.open(origin_url) as origin,
        WorkFolder(work) as folder,
        closing(open_source(source, convert.base, origin, deadline)) as opened,
    ):
        known = Known(origin, opened.name)
        upstream = Recalling(opened, known, reread=ticker if repair else None)
        job = _Job(
            str(source), origin, upstream, folder, convert, allow, ignore, repair, deadline,
            progress, ticker, runner(ticker), pace, Lanes(pace.lanes),
        )  # fmt: skip
        with _changed(upstream):
            return job.run(target, revision, meshes, signing, began)


@dataclass(frozen=True, slots=True)
class _Job:
    """What the steps of one deploy have in common."""

    source: str
    origin: Origin
    upstream: Recalling
    folder: WorkFolder
    convert: ConvertOptions
    allow: Sequence[str]
    ignore: Sequence[str]
    repair: bool
    deadline: Deadline
    progress: Progress
    ticker: Ticker
    runner: Runner
    pace: Pace
    lanes: Lanes

    def run(
        self,
        target: Ref,
        revision: str | None,
        meshes: Sequence[Mesh | MeshRequest],
        signing: Signing | None,
        began: float,
    ) -> DeployResult:
        """The steps, one after the other."""
        origin, upstream, deadline = self.origin, self.upstream, self.deadline
        before = origin.ref(target, deadline)
        plan = self.runner.call(
            "resolve",
            lambda: resolve(
                upstream, deadline, allow=self.allow, ignore=self.ignore, convert=self.convert
            ),
        )
        config = _config(upstream, plan.others, deadline)
        others, known = self.to_mirror(plan.others)
        weights = self.weights(plan, config)
        config = config or dict(weights.config)
        left_out = (*plan.left_out, *weights.notes)
        for note in left_out:
            self.progress.note(f"note: {note}")
        mirrored = self.mirror(weights, others)
        files, tensors, tied = self.entries(weights, mirrored, known)
        laid_out = self.laid_out(Model(config, files, tensors, tied, self.reader(files)), meshes)
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
        published = self.runner.call(
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

    def to_mirror(
        self, files: Sequence[UpstreamFile], *, weights: bool = False
    ) -> tuple[tuple[LocalFile | UpstreamFile, ...], tuple[KnownFile, ...]]:
        """Where files lie that the origin does not know, and what it knows of the others."""
        here = {f.path: self.upstream.local(f, self.deadline) for f in files}
        elsewhere = [file for file in files if here[file.path] is None]
        known = self.upstream.recall_all(elsewhere, self.deadline, weights=weights)
        left = tuple(here[f.path] or f for f in files if f.path not in known)
        return left, tuple(known[f.path] for f in files if f.path in known)

    def weights(self, plan: Plan, config: Mapping[str, Any]) -> _Weights:
        """Bring the weights, and convert them if need be and they are not known yet."""
        if needs_conversion(plan.format, self.convert):
            return self.runner.call("convert", lambda: self._converted(plan, config))
        files, known = self.to_mirror(plan.weights, weights=True)
        found = dict(zip((f.path for f in files), self._headers(files), strict=True))
        found |= {item.file.path: item.header for item in known}
        headers = {file.path: found[file.path] for file in plan.weights}
        check_headers(headers)
        notes: list[str] = []
        if plan.index is not None:
            holder = {t.name: path for path, h in headers.items() for t in h.tensors}
            notes = check_index(plan.index, holder)
        return _Weights(files, known, headers, metadata_ties(headers), tuple(notes))

    def _headers(self, files: Sequence[LocalFile | UpstreamFile]) -> list[Header]:
        """The headers of weights, wherever they lie."""

        def read(file: LocalFile | UpstreamFile) -> Header:
            if isinstance(file, LocalFile):
                return read_headers([file])[file.path]
            return fetch_header(self.upstream, file, self.deadline)

        with ThreadPoolExecutor(_HEADERS, "warmcast-headers") as pool:
            return list(pool.map(read, files))

    def _converted(self, plan: Plan, config: Mapping[str, Any]) -> _Weights:
        sources = (*plan.weights, *(plan.adapter.files if plan.adapter else ()))
        here = {file.path: self.upstream.local(file, self.deadline) for file in sources}
        elsewhere = [file for file in sources if here[file.path] is None]
        known = self.upstream.digests(elsewhere, self.deadline)
        if len(known) < len(elsewhere):
            here |= self._fetched(elsewhere, known)
            elsewhere = []
        request = self._request(plan, here, config)
        with self.progress.stage("read what is converted", request.nbytes):
            key = conversion_key(request, self.ticker, known)
        recorded = recorded_conversion(
            self.origin, key, self.deadline, reread=self.ticker if self.repair else None
        )
        if recorded is not None:
            return _Weights(
                tied=recorded.tied, notes=recorded.left_out, config=recorded.config,
                recorded=recorded,
            )  # fmt: skip
        if elsewhere:
            here |= self._fetched(elsewhere, known)
            request = self._request(plan, here, config)
        with self.progress.stage("convert", request.nbytes):
            converted = convert_weights(
                request, self.folder, deadline=self.deadline, tick=self.ticker
            )
        weights = tuple(f for f in converted.files if f.path.endswith(".safetensors"))
        return _Weights(
            converted.files, (), read_headers(weights), converted.tied, converted.left_out,
            converted.config, key,
        )  # fmt: skip

    def _request(
        self, plan: Plan, here: Mapping[str, LocalFile | None], config: Mapping[str, Any]
    ) -> Request:
        """What is to be converted; of files that are not here yet, their names alone."""

        def files(wanted: Sequence[UpstreamFile]) -> tuple[LocalFile, ...]:
            return tuple(here[f.path] or LocalFile(f.path, Path(), f.size, 0, 0) for f in wanted)

        adapter = None
        if plan.adapter is not None:
            adapter = AdapterFiles(
                plan.adapter.format, files(plan.adapter.files), plan.adapter.config
            )
        return Request(
            plan.format, files(plan.weights), self.convert, plan.index, config, adapter
        )  # fmt: skip

    def _fetched(
        self, files: Sequence[UpstreamFile], known: dict[str, str]
    ) -> dict[str, LocalFile]:
        """Files brought to this machine; their SHA-256s are added to ``known``, and remembered."""
        if not files:
            return {}
        with self.progress.stage("fetch", sum(file.size for file in files)):
            fetched = fetch(
                self.upstream, files, self.folder, self.lanes, self.pace, self.deadline,
                self.ticker,
            )  # fmt: skip
        for file, item in zip(files, fetched, strict=True):
            known[file.path] = item.sha256
            self.upstream.remember_digest(file, item.sha256, self.deadline)
        return {item.file.path: item.file for item in fetched}

    def mirror(
        self, weights: _Weights, others: Sequence[LocalFile | UpstreamFile]
    ) -> list[Mirrored]:
        """Measure and mirror every file, and remember a conversion once all of it is there."""
        files = (*weights.files, *others)
        with self.progress.stage("read and upload", sum(file.size for file in files)):
            tick = Halved(self.ticker)
            mirrored = self.runner.map(
                "mirror",
                lambda file: self._mirror(
                    file, weights.headers.get(file.path), tick, as_it_is=weights.key is None
                ),
                files,
                lambda file: file.path,
                lambda file: self._errand(file, weights.headers.get(file.path)),
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

    def _errand(self, file: LocalFile | UpstreamFile, header: Header | None) -> Errand | None:
        """The same for another machine, if it can have the file."""
        if isinstance(file, LocalFile):
            return None
        return Errand(
            source=str(pinned(self.source, self.upstream.revision)),
            revision=self.upstream.revision,
            origin=self.origin.url,
            file=file,
            tensors=() if header is None else header.tensors,
            metadata=None if header is None else header.metadata,
            pace=self.pace,
            repair=self.repair,
        )

    def _mirror(
        self,
        file: LocalFile | UpstreamFile,
        header: Header | None,
        tick: Callable[[int], None],
        *,
        as_it_is: bool,
    ) -> Mirrored:
        """Put a file into the origin; ``as_it_is``: it may come from elsewhere another time."""
        tensors = () if header is None else header.tensors
        metadata = None if header is None else header.metadata
        if isinstance(file, LocalFile):
            mirrored = mirror_file(
                self.origin, file, tensors, self.deadline, tick, repair=self.repair
            )
            if mirrored.moved and as_it_is and metadata is not None:
                self.upstream.remember(None, mirrored.measured, self.deadline, metadata=metadata)
            return mirrored

        def recall() -> Measured | None:
            found = self.upstream.recall(file, self.deadline, weights=header is not None)
            return None if found is None else found.measured

        return stream_file(
            Streaming(self.origin, self.upstream, self.lanes, self.pace, self.repair),
            file,
            tensors,
            self.deadline,
            tick,
            recall=recall,
            remember=lambda measured: self.upstream.remember(
                file, measured, self.deadline, metadata=metadata
            ),
            note=self.progress.note,
        )

    def entries(
        self, weights: _Weights, mirrored: Sequence[Mirrored], known: Sequence[KnownFile]
    ) -> tuple[list[FileEntry], list[TensorEntry], tuple[TiedEntry, ...]]:
        """What the manifest says of files, of tensors in load order, and of ties."""
        files = [item.file for item in mirrored]
        tensors = [tensor for item in mirrored for tensor in item.measured.tensors]
        for item in (*weights.known, *known):
            files.append(item.file)
            tensors += item.tensors
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


class _Changed(WarmcastError):
    """A source elsewhere changed while it was deployed; ``error`` says which."""

    def __init__(self, error: SourceChanged) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def _changed(upstream: Recalling) -> Iterator[None]:
    """Tell apart the changes of sources elsewhere, whose new state can be listed."""
    try:
        yield
    except SourceChanged as error:
        if upstream.remote:
            raise _Changed(error) from error
        raise


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
