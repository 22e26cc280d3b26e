"""Every error of loading, in one tree; the root is that of :mod:`warmcast.manifests.errors`.

WarmcastError
├── SkeletonMismatch        the containers are not what the manifest describes
├── WeightVerificationError bytes on the device differ from the truth
├── RestartRequired         no route is left that would not corrupt the model: start anew
├── GroupLost               a rank of the group did not vote in time
├── RegistryUnavailable     the registry did not answer in time
└── PeerError               a peer did not do what the protocol says
    ├── PeerBusy            it serves as many receivers as it can
    ├── PeerRefused         it will not serve this receiver, and says why
    ├── PeerSilent          it did not answer in time
    ├── TransportUnusable   this way across does not work between these two; another may
    ├── PartyBroken         another receiver of the same broadcast failed; it can be asked again
    └── TransferFailed      the transfer broke off; what was written is not to be used
"""

from __future__ import annotations

import logging
from typing import TypeVar

from warmcast.manifests.errors import WarmcastError

log = logging.getLogger("warmcast")

E = TypeVar("E", bound=BaseException)


def without_frames(cause: E) -> E:
    """An error that is to be kept, without the frames that it came through.

    They hold all that those functions saw, gigabytes of weights among it, and are held by each
    other: only Python's collector would free them, which counts objects and not their bytes.
    """
    log.debug("kept for later: %s", cause, exc_info=cause)
    link: BaseException | None = cause
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return cause


class SkeletonMismatch(WarmcastError):
    """The containers are not what the manifest describes; the message names the differences."""


class WeightVerificationError(WarmcastError):
    """Bytes on the device differ from the truth; the message names the tensors."""


class RestartRequired(WarmcastError):
    """The skeleton was changed so that a checkpoint no longer fits it: the process must restart."""


class GroupLost(WarmcastError):
    """A rank of the group did not vote in time."""


class RegistryUnavailable(WarmcastError):
    """The registry did not answer in time."""


class PeerError(WarmcastError):
    """A peer did not do what the protocol says; another route is taken."""


class PeerBusy(PeerError):
    """The sender serves as many receivers as it can."""


class PeerRefused(PeerError):
    """The sender will not serve this receiver, and says why."""


class PeerSilent(PeerError):
    """The peer did not answer in time."""


class TransportUnusable(PeerError):
    """This way across does not work between these two workers; another may."""


class PartyBroken(PeerError):
    """Another receiver of the same broadcast failed; the sender can be asked again."""


class TransferFailed(PeerError):
    """The transfer broke off; what was written is not to be used."""
