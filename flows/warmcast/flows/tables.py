"""A manifest in tables, for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from warmcast.flows.progress import nbytes_text, printable
from warmcast.manifests.manifest import Layout, Manifest

_WIDTH = 200
"""Columns where there is no terminal to ask."""


def print_manifest(manifest: Manifest, limit: int | None) -> None:
    """Print what a manifest says, at most ``limit`` rows a table."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    for table in tables(manifest, limit):
        console.print(table)


def tables(manifest: Manifest, limit: int | None) -> list[Table]:
    """The tables: the deployment, its files, tensors, ties and layouts."""
    facts = [
        ("manifest", manifest.digest),
        ("model", manifest.model),
        ("revision", manifest.revision or "-"),
        ("upstream", manifest.upstream),
        ("created", manifest.created_at),
        ("model key", manifest.model_key),
        ("size", f"{nbytes_text(manifest.nbytes)} in {len(manifest.files)} files"),
        ("tensors", f"{len(manifest.tensors)} stored, {len(manifest.tied)} tied"),
    ]
    files = (
        (file.path, f"{file.size:,}", file.crc32c, file.sha256[:16]) for file in manifest.files
    )
    tensors = (
        (t.name, t.dtype, _shape(t.shape), f"{t.nbytes:,}", t.file, t.crc32c)
        for t in manifest.tensors
    )
    tied = ((t.name, t.of, _shape(t.shape), _shape(t.stride), str(t.offset)) for t in manifest.tied)
    result = [
        _table("deployment", ["", ""], facts, len(facts), None),
        _table("files", ["path", "bytes", "crc32c", "sha256"], files, len(manifest.files), limit),
        _table(
            "tensors, in load order",
            ["name", "dtype", "shape", "bytes", "file", "crc32c"],
            tensors,
            len(manifest.tensors),
            limit,
        ),
    ]
    if manifest.tied:
        columns = ["name", "view of", "shape", "stride", "offset"]
        result.append(_table("tied", columns, tied, len(manifest.tied), limit))
    if manifest.layouts:
        layouts = map(_layout, manifest.layouts)
        columns = ["mesh", "ranks", "rank files", "plan", "mesh key"]
        result.append(_table("layouts", columns, layouts, len(manifest.layouts), limit))
    return result


def _layout(layout: Layout) -> Sequence[str]:
    dimensions = " × ".join(f"{name} {size}" for name, size in layout.mesh.dimensions)
    plan = ", ".join(f"{pattern} {rule}" for pattern, rule in layout.mesh.plan.items())
    files = str(len({shard.file for shard in layout.shards}) or "-")
    return dimensions or "-", str(len(layout.ranks)), files, plan or "-", layout.mesh_key[:16]


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], count: int, limit: int | None
) -> Table:
    more = 0 if limit is None else max(0, count - limit)
    table = Table(
        title=title,
        title_justify="left",
        show_header=any(columns),
        caption=f"{more} more; --all shows them" if more else None,
        caption_justify="left",
    )
    for column in columns:
        table.add_column(
            column, justify="right" if column in ("bytes", "offset") else "left", overflow="fold"
        )
    for row in islice(rows, limit):
        table.add_row(*(escape(printable(cell)) for cell in row))
    return table
