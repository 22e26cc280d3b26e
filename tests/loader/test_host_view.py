"""A tensor's memory as a memoryview: it lives as long as the view does, and no longer."""

from __future__ import annotations

import gc
import weakref

import torch

from warmcast.loader.containers import host_view


def test_a_view_keeps_its_tensor():
    tensor = torch.arange(256, dtype=torch.uint8).repeat(1000)
    expected, alive = bytes(tensor.tolist()), weakref.ref(tensor)
    view = host_view(tensor)
    del tensor
    words = view.cast("I")
    del view
    assert alive() is not None
    assert words.tobytes() == expected
    del words
    gc.collect()
    assert alive() is None


def test_writing_through_a_view():
    tensor = torch.zeros(4, dtype=torch.uint8)
    host_view(tensor)[1:3] = b"\x07\xff"
    assert tensor.tolist() == [0, 7, 255, 0]


def test_an_empty_tensor():
    assert bytes(host_view(torch.empty(0, dtype=torch.uint8))) == b""
