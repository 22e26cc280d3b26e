"""Changes to the weights between loading and serving, and the truth of what they lead to.

Quantising, fusing or repacking changes bytes on the device, so the manifest's truth no longer
holds: a state is hashed when it is *ready*, after its change. The first worker that is ready
publishes that truth beside the manifests, under the identity that names the change; receivers are
given changed weights and hold them to it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import nn

from warmcast.loader.containers import State, parameter_like
from warmcast.loader.dtypes import safetensors_name
from warmcast.loader.errors import SkeletonMismatch
from warmcast.loader.plan import Truth
from warmcast.loader.verify import measure
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.identity import environment_key
from warmcast.manifests.manifest import Crc32c, Name, Record, Sample, Sha256, Size, parse_record
from warmcast.manifests.origin import Origin


@dataclass(frozen=True, slots=True)
class Change:
    """A change that a worker makes to its loaded weights before it serves.

    ``apply`` changes a loaded model in place. ``prepare`` gives a skeleton the containers that
    ``apply`` would leave, unfilled; with it workers receive changed weights from their peers,
    without it each loads and changes them itself. ``version`` names the change's own code;
    ``versions`` whatever else its result depends on (engine, kernels). torch's version and the
    GPU's compute capability are added.
    """

    name: str
    version: str
    apply: Callable[[nn.Module], None]
    prepare: Callable[[nn.Module], None] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def key(self, device: torch.device) -> str:
        """The environment key of this change on a device."""
        capability = "cpu"
        if device.type == "cuda":
            capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        versions = {"torch": torch.__version__, "device": capability, **self.versions}
        return environment_key(self.name, self.version, versions)


def shadow(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters are on meta: to see what a change would lead to."""
    memo: dict[int, object] = {
        id(p): parameter_like(p, torch.empty_like(p, device="meta")) for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


class _TruthEntry(Record):
    name: Name
    dtype: str
    nbytes: Size
    crc32c: Crc32c
    sample: Sample


class _TruthRecord(Record):
    identity: Sha256
    tensors: tuple[_TruthEntry, ...]


def truths_of(state: State, deadline: Deadline) -> list[Truth]:
    """The truth of a model's containers as they are now, by the containers' names."""
    rows = []
    for container in sorted(state.containers, key=lambda c: c.name):
        dtype = safetensors_name(container.tensor.dtype)
        if dtype is None:
            raise SkeletonMismatch(
                container.name, expected="a dtype of safetensors", found=container.tensor.dtype
            )
        rows.append((container.name, dtype, container.tensor))
    return measure(rows, deadline)


def published_truth(origin: Origin, identity: str, deadline: Deadline) -> dict[str, Truth] | None:
    """The published truth of a changed state, by tensor; None if nobody was ready yet."""
    value = origin.record("truths", identity, deadline)
    if value is None:
        return None
    record = parse_record(_TruthRecord, value, f"truths/{identity[:12]}")
    return {entry.name: Truth(**entry.model_dump()) for entry in record.tensors}


def publish_truth(
    origin: Origin, identity: str, truths: Sequence[Truth], deadline: Deadline
) -> bool:
    """Publish a changed state's truth, if nobody has; whether what is published equals ``truths``.

    Two workers can come to different bytes by the same change (kernels that are not
    deterministic); then the first one's count, and the second does not serve its own.
    """
    value = {"identity": identity, "tensors": [asdict(truth) for truth in truths]}
    if origin.put_record("truths", identity, value, deadline):
        return True
    return published_truth(origin, identity, deadline) == {t.name: t for t in truths}
