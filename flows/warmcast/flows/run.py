"""``deploy``: the steps of a deployment, composed; for the command, for flows and for other code.

Resolve the source; convert pickles; measure and mirror each file; publish. Nothing that the origin
has is moved twice, so a deploy that was killed is resumed by running it again. Until the last step
no ref is touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from warmcast.flows.chunks import Lanes
from warmcast.flows.convert.options import ConvertOptions
from warmcast.flows.errors import SourceChanged
from warmcast.flows.progress import Progress, Silent
from warmcast.flows.result import DeployResult
from warmcast.flows.runner import InProcess, Runner, Ticker
from warmcast.flows.stages import Stages
from warmcast.flows.steps.journal import Pace
from warmcast.flows.steps.known import Known, Recalling
from warmcast.flows.steps.lay_out import Model
from warmcast.flows.steps.meshes import MeshRequest
from warmcast.flows.steps.model_config import read_config
from warmcast.flows.steps.publish import Collected, Signing, publish
from warmcast.flows.steps.resolve import resolve
from warmcast.flows.upstreams.overlay import open_source
from warmcast.flows.workfolder import WorkFolder
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError
from warmcast.manifests.identity import Mesh
from warmcast.manifests.manifest import build_manifest
from warmcast.manifests.origin import Origin, Ref, now

__all__ = ["DeployResult", "deploy"]

_NEVER = Deadline.never()
_AS_IT_IS = ConvertOptions()
_PACE = Pace()


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
        stages = Stages(
            str(source), origin, upstream, folder, convert, allow, ignore, repair, deadline,
            progress, ticker, runner(ticker), pace, Lanes(pace.lanes),
        )  # fmt: skip
        with _changed(upstream):
            return _run(stages, target, revision, meshes, signing, began)


def _run(
    stages: Stages,
    target: Ref,
    revision: str | None,
    meshes: Sequence[Mesh | MeshRequest],
    signing: Signing | None,
    began: float,
) -> DeployResult:
    """The steps, one after the other."""
    origin, upstream, deadline = stages.origin, stages.upstream, stages.deadline
    before = origin.ref(target, deadline)
    plan = stages.runner.call(
        "resolve",
        lambda: resolve(
            upstream, deadline, allow=stages.allow, ignore=stages.ignore, convert=stages.convert
        ),
    )
    config = read_config(upstream, plan.others, deadline)
    others, known = stages.to_mirror(plan.others)
    weights = stages.weights(plan, config)
    config = config or dict(weights.config)
    left_out = (*plan.left_out, *weights.notes)
    for note in left_out:
        stages.progress.note(f"note: {note}")
    mirrored = stages.mirror(weights, others)
    files, tensors, tied = stages.entries(weights, mirrored, known)
    laid_out = stages.laid_out(Model(config, files, tensors, tied, stages.reader(files)), meshes)
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
    published = stages.runner.call(
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
