"""An errand: the mirroring of one file as plain data, for another machine that does it.

That machine opens the upstream and the origin for itself, with its own credentials; the bytes pass
through it alone. The journal of transfers (:mod:`journal`) has each file moved once, whoever asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass

from warmcast.flows.chunks import Lanes
from warmcast.flows.errors import SourceChanged
from warmcast.flows.steps.journal import Pace
from warmcast.flows.steps.known import Known
from warmcast.flows.steps.measure import Measured
from warmcast.flows.steps.mirror import Mirrored, Streaming, stream_file
from warmcast.flows.upstreams import UpstreamFile, open_upstream
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.header import HeaderTensor
from warmcast.manifests.origin import Origin


@dataclass(frozen=True, slots=True)
class Errand:
    """Which file of which upstream goes to which origin.

    ``revision`` is what the upstream has to be at. ``metadata`` is the header's, of weights, whose
    tensors are ``tensors``; None for other files.
    """

    source: str
    revision: str
    origin: str
    file: UpstreamFile
    tensors: tuple[HeaderTensor, ...]
    metadata: Mapping[str, str] | None
    pace: Pace
    repair: bool


def carry_out(errand: Errand, deadline: Deadline, tick: Callable[[int], None]) -> Mirrored:
    """Put the file into the origin. Raises what mirroring here would raise."""
    file, weights = errand.file, errand.metadata is not None
    metadata = None if errand.metadata is None else dict(errand.metadata)
    with (
        Origin.open(errand.origin) as origin,
        closing(open_upstream(errand.source, deadline)) as upstream,
    ):
        if upstream.revision != errand.revision:
            raise SourceChanged(
                errand.source,
                expected=f"revision {errand.revision}, as the deploy found it",
                found=upstream.revision,
                do="deploy again, or name the revision",
            )
        known = Known(origin, upstream.name)
        reread = tick if errand.repair else None

        def recall() -> Measured | None:
            found = known.recall(file, deadline, weights=weights, reread=reread)
            return None if found is None else found.measured

        return stream_file(
            Streaming(origin, upstream, Lanes(errand.pace.lanes), errand.pace, errand.repair),
            file,
            errand.tensors,
            deadline,
            tick,
            recall=recall,
            remember=lambda measured: known.remember(file, measured, deadline, metadata=metadata),
        )
