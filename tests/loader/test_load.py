"""Loading, end to end: from the origin and from a peer, the bytes that were deployed."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from tests.loader.models import Encoder, assert_same, filled


def test_origin_then_peer(publish, loader):
    deployed = publish(filled(Encoder()).state_dict())
    first, second = loader(), loader()
    with first.skeleton():
        model = Encoder()
    assert all(p.is_meta for p in model.parameters())
    report = first.load(model, deployed.ref)
    expected = load_file(deployed.source / "model.safetensors")
    expected["head.weight"] = expected["embed.weight"]
    assert_same(model.state_dict(), expected)
    assert (report.route, report.transport, report.verified) == ("origin", None, True)
    first.serve(model)
    with second.skeleton():
        other = Encoder()
    report = second.load(other, deployed.ref)
    assert (report.route, report.transport, report.verified) == ("peer", "gloo", True)
    assert_same(other.state_dict(), expected)
