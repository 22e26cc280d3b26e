"""The stages between resolving a source and publishing: bring or convert weights, mirror, lay out.

Each runs steps (:mod:`steps`) by the deploy's runner, and asks the origin first what it knows: see
:mod:`known`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warmcast.flows.chunks import Lanes
from warmcast.flows.convert.options import ConvertOptions
from warmcast.flows.local import LocalFile
from warmcast.flows.progress import Halved, Progress
from warmcast.flows.runner import Runner, Ticker
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
from warmcast.flows.steps.known import KnownFile, Recalling
from warmcast.flows.steps.lay_out import LaidOut, Model, lay_out
from warmcast.flows.steps.measure import Measured
from warmcast.flows.steps.meshes import MeshRequest
from warmcast.flows.steps.mirror import Mirrored, Streaming, mirror_file, stream_file
from warmcast.flows.steps.order import load_order
from warmcast.flows.steps.resolve import Plan
from warmcast.flows.steps.weights import (
    check_headers,
    check_index,
    fetch_header,
    local_header,
    metadata_ties,
    read_headers,
)
from warmcast.flows.upstreams import UpstreamFile, pinned
from warmcast.flows.workfolder import WorkFolder
from warmcast.manifests.checksum import crc32c, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import IntegrityError
from warmcast.manifests.header import Header
from warmcast.manifests.identity import Mesh
from warmcast.manifests.manifest import FileEntry, TensorEntry, TiedEntry
from warmcast.manifests.origin import Origin

_HEADERS = 8  # headers that are read at once
_READ = 1 << 24


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights as they will be deployed: files to mirror, those that are known, or a record."""

    files: tuple[LocalFile | UpstreamFile, ...] = ()
    known: tuple[KnownFile, ...] = ()
    headers: Mapping[str, Header] = field(default_factory=dict)
    tied: tuple[TiedEntry, ...] = ()
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    recorded: ConversionRecord | None = None


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of one deploy, and what they have in common."""

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

    def to_mirror(
        self, files: Sequence[UpstreamFile], *, weights: bool = False
    ) -> tuple[tuple[LocalFile | UpstreamFile, ...], tuple[KnownFile, ...]]:
        """Where files lie that the origin does not know, and what it knows of the others."""
        here = {f.path: self.upstream.local(f, self.deadline) for f in files}
        elsewhere = [file for file in files if here[file.path] is None]
        known = self.upstream.recall_all(elsewhere, self.deadline, weights=weights)
        left = tuple(here[f.path] or f for f in files if f.path not in known)
        return left, tuple(known[f.path] for f in files if f.path in known)

    def weights(self, plan: Plan, config: Mapping[str, Any]) -> Weights:
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
        return Weights(files, known, headers, metadata_ties(headers), tuple(notes))

    def _headers(self, files: Sequence[LocalFile | UpstreamFile]) -> list[Header]:
        """The headers of weights, wherever they lie."""

        def read(file: LocalFile | UpstreamFile) -> Header:
            if isinstance(file, LocalFile):
                return local_header(file)
            return fetch_header(self.upstream.asked, file, self.deadline)

        with ThreadPoolExecutor(_HEADERS, "warmcast-headers") as pool:
            return list(pool.map(read, files))

    def _converted(self, plan: Plan, config: Mapping[str, Any]) -> Weights:
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
            return Weights(
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
        return Weights(
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
                self.upstream.asked, files, self.folder, self.lanes, self.pace, self.deadline,
                self.ticker,
            )  # fmt: skip
        for file, item in zip(files, fetched, strict=True):
            known[file.path] = item.sha256
            self.upstream.remember_digest(file, item.sha256, self.deadline)
        return {item.file.path: item.file for item in fetched}

    def mirror(
        self, weights: Weights, others: Sequence[LocalFile | UpstreamFile]
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
            Streaming(self.origin, self.upstream.asked, self.lanes, self.pace, self.repair),
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
        self, weights: Weights, mirrored: Sequence[Mirrored], known: Sequence[KnownFile]
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
