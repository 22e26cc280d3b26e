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

from warmcast.manifests.errors import WarmcastError


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
