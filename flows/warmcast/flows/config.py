"""``warmcast.yaml``: several models, where each comes from, and what is made of it.

    origin: s3://bucket/prefix
    defaults:                       # for every model that does not say otherwise
      ignore: ["*.onnx"]
    models:
      minilm:
        upstream: hf://sentence-transformers/all-MiniLM-L6-v2
        revision: main
        convert: {dtype: bfloat16, keep_dtype: ["*norm*"]}
        meshes: [{tp: 4, plan: transformers, presharded: true}]
        refs: [prod]                # minilm@prod
        sign: {key: /run/secrets/sign.pem}

Folders and files are relative to the file. What is no such thing is a :class:`UsageError` of one
line with the field's path. The flows take parameters of these types, too: they hold no secret,
only the paths of keys.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from warmcast.flows.convert.options import MAX_SHARD_NBYTES, ConvertOptions
from warmcast.flows.steps.meshes import MeshRequest, parse_mesh
from warmcast.manifests.errors import UsageError, WarmcastError
from warmcast.manifests.origin import Ref

if TYPE_CHECKING:
    from warmcast.flows.steps.publish import Signing

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.I)
_HUB = "hf://"


def parse_size(text: str, what: str) -> int:
    """Bytes of ``5GB`` (1e9 bytes each), ``5GiB`` (2**30) or ``5000000000``.

    Raises :class:`UsageError`, naming ``what``.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or not (size := _scaled(*match.groups())):
        raise UsageError(what, expected="a size such as 5GB", found=repr(text))
    return size


def _scaled(number: str, unit: str, binary: str) -> int:
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(unit.lower() or " "))


def _size(value: object) -> object:
    if isinstance(value, str):
        try:
            return parse_size(value, "size")
        except UsageError:
            raise ValueError("a size such as 5GB") from None
    return value


Size = Annotated[int, BeforeValidator(_size, json_schema_input_type=int | str), Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, strict=True)]


class Section(BaseModel):
    """A part of the file: frozen, nothing unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class MeshSection(Section):
    """A mesh: ``tp`` ranks, or ``dimensions`` by name; how tensors are split; rank files."""

    tp: Count | None = None
    dimensions: dict[str, Count] | None = None
    plan: dict[str, str] | Literal["transformers"] = Field(default_factory=dict)
    presharded: bool = False

    @model_validator(mode="after")
    def _checked(self) -> MeshSection:
        if (self.tp is None) == (self.dimensions is None):
            raise ValueError("either tp or dimensions")
        try:
            self.request()
        except UsageError as cause:
            raise ValueError(str(cause).partition("expected ")[2] or str(cause)) from None
        return self

    def request(self) -> MeshRequest:
        """What is asked of the deploy."""
        dimensions = {"tp": self.tp} if self.dimensions is None else self.dimensions
        value = {"dimensions": dimensions, "plan": self.plan, "presharded": self.presharded}
        return parse_mesh(value, "mesh")


class ConvertSection(Section):
    """What conversion is asked for; see ``warmcast deploy --help``."""

    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    keep_dtype: list[Text] = Field(default_factory=list)
    shard_by: Literal["size", "layer"] = "size"
    max_shard_size: Size = MAX_SHARD_NBYTES
    dequantise: bool = False
    merge: dict[str, Any] | Text | None = Field(
        default=None, description="Rules for tensor-parallel shards, or the file that has them."
    )
    base: Text | None = Field(default=None, description="What a LoRA adapter is merged into.")

    def located(self, folder: Path) -> ConvertSection:
        """The same, with its files named from ``folder``."""
        changes: dict[str, Any] = {}
        if isinstance(self.merge, str):
            changes["merge"] = str(folder / self.merge)
        if self.base is not None and "@" not in self.base:
            changes["base"] = _located(self.base, folder)
        return self.model_copy(update=changes)

    def options(self) -> ConvertOptions:
        """What is asked of the deploy. Raises :class:`UsageError`."""
        from warmcast.flows.convert.merge_rules import merge_rules, read_merge_rules

        merge = None
        if isinstance(self.merge, str):
            merge = read_merge_rules(Path(self.merge))
        elif self.merge is not None:
            merge = merge_rules(self.merge, "merge")
        return ConvertOptions(
            dtype=self.dtype,
            keep_dtype=tuple(self.keep_dtype),
            shard_by=self.shard_by,
            max_shard_nbytes=self.max_shard_size,
            dequantise=self.dequantise,
            merge=merge,
            base=self.base,
        )


class SignSection(Section):
    """How the manifest is signed: the path of a key, or a command and its public key's path."""

    key: Text | None = None
    command: Text | None = None
    public_key: Text | None = None

    @model_validator(mode="after")
    def _checked(self) -> SignSection:
        if (self.key is None) == (self.command is None):
            raise ValueError("either a key or a command")
        if (self.command is None) != (self.public_key is None):
            raise ValueError("a public_key with a command, and only there")
        return self

    def located(self, folder: Path) -> SignSection:
        """The same, with its files named from ``folder``."""
        named = {"key": self.key, "public_key": self.public_key}
        return self.model_copy(
            update={field: str(folder / path) for field, path in named.items() if path is not None}
        )

    def signing(self) -> Signing:
        """The signer. Raises :class:`UsageError`."""
        try:
            from warmcast.flows.steps.publish import Signing
            from warmcast.manifests.trust import PublicKey, command_signer, key_signer

            if self.key is not None:
                return Signing(key_signer(Path(self.key)), PublicKey.read(Path(self.key)))
            words = shlex.split(self.command or "")
            return Signing(command_signer(words), PublicKey.read(Path(self.public_key or "")))
        except ModuleNotFoundError as cause:
            raise UsageError(
                "signing",
                expected=f"the package {cause.name!r}",
                found="it is not installed",
                do="pip install 'warmcast[trust]'",
            ) from cause


class Settings(Section):
    """What may be said for every model, and for each."""

    allow: list[Text] = Field(default_factory=list)
    ignore: list[Text] = Field(default_factory=list)
    convert: ConvertSection = Field(default_factory=ConvertSection)
    meshes: list[MeshSection] = Field(default_factory=list)
    refs: list[Text] = Field(default=["prod"], min_length=1)
    sign: SignSection | None = None


class ModelSection(Settings):
    """One model."""

    upstream: Text
    revision: Text | None = None


class ConfigFile(Section):
    """The file."""

    origin: Text | None = Field(default=None, description="The origin's URL.")
    defaults: Settings = Field(default_factory=Settings)
    models: dict[str, ModelSection] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Job:
    """One model's deploy: what is deployed, what is made of it, and the refs that are to name it.

    It is plain data, and holds no secret.
    """

    source: str
    refs: tuple[str, ...]
    revision: str | None = None
    allow: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    convert: ConvertSection = field(default_factory=ConvertSection)
    meshes: tuple[MeshSection, ...] = ()
    sign: SignSection | None = None

    def requests(self) -> tuple[MeshRequest, ...]:
        """What is asked of the deploy for meshes."""
        return tuple(mesh.request() for mesh in self.meshes)


def source_of(upstream: str, revision: str | None, folder: Path) -> tuple[str, str | None]:
    """The source as a deploy names it, and the revision that the source itself does not tell.

    A repository of the Hub is named with its revision; raises :class:`UsageError` for two of them.
    """
    if not upstream.startswith(_HUB):
        return _located(upstream, folder), revision
    if revision is None:
        return upstream, None
    repository, mark, options = upstream.partition("?")
    if "@" in repository.removeprefix(_HUB):
        raise UsageError("revision", expected=f"one revision of {upstream}", found=repr(revision))
    return f"{repository}@{revision}{mark}{options}", None


def _located(source: str, folder: Path) -> str:
    return source if "://" in source else str(folder / source)


@dataclass(frozen=True, slots=True)
class Config:
    """A file that was read: the origin it names, if any, and a job for each model by its name."""

    origin: str | None
    jobs: Mapping[str, Job]

    def chosen(self, names: Sequence[str]) -> dict[str, Job]:
        """The jobs of these models, all if none is named. Raises :class:`UsageError`."""
        for name in names:
            if name not in self.jobs:
                raise UsageError(
                    repr(name), expected=f"a model of {', '.join(self.jobs)}", found="none of them"
                )
        return {name: job for name, job in self.jobs.items() if not names or name in names}


def read_config(location: Path) -> Config:
    """Read and check a file. Raises :class:`UsageError`, of one line with the field's path."""
    try:
        from warmcast.flows.yamlfile import read_yaml
    except ModuleNotFoundError as cause:
        raise UsageError(
            str(location),
            expected=f"the package {cause.name!r}",
            found="it is not installed",
            do="pip install 'warmcast[flows]'",
        ) from cause
    content = read_yaml(location)
    return parse_config(content.value, str(location), location.parent, content.line)


def parse_config(
    value: object,
    where: str,
    folder: Path,
    line: Callable[[Sequence[str | int]], int | None] = lambda _: None,
) -> Config:
    """The same of a value; ``line`` tells the line of a field by its path."""

    def place(path: Sequence[str | int]) -> str:
        number = line(path)
        named = ".".join(map(str, path))
        at = where if number is None else f"{where}:{number}"
        return f"{at}: {named}" if named else at

    try:
        file = ConfigFile.model_validate(value)
    except (ValidationError, RecursionError) as cause:
        raise _refused(cause, place) from None
    jobs = {}
    for name, section in file.models.items():
        try:
            jobs[name] = _job(name, section, file.defaults, folder)
        except WarmcastError as cause:
            raise UsageError(f"{place(('models', name))}: {cause}") from None
    return Config(file.origin, jobs)


S = TypeVar("S", bound=Section)


def _merged(given: S, defaults: S) -> dict[str, Any]:
    """What is given, and the defaults for the rest; ``convert`` field by field."""
    merged = {name: getattr(defaults, name) for name in type(defaults).model_fields}
    for name in given.model_fields_set:
        value = getattr(given, name)
        if isinstance(value, ConvertSection):
            value = ConvertSection(**_merged(value, merged[name]))
        merged[name] = value
    return merged


def _job(name: str, section: ModelSection, defaults: Settings, folder: Path) -> Job:
    merged = _merged(section, defaults)
    source, revision = source_of(section.upstream, section.revision, folder)
    sign: SignSection | None = merged["sign"]
    convert: ConvertSection = merged["convert"].located(folder)
    convert.options()  # what is wrong with it is told before anything is deployed
    return Job(
        source=source,
        refs=tuple(str(Ref(name, ref)) for ref in dict.fromkeys(merged["refs"])),
        revision=revision,
        allow=tuple(merged["allow"]),
        ignore=tuple(merged["ignore"]),
        convert=convert,
        meshes=tuple(merged["meshes"]),
        sign=sign and sign.located(folder),
    )


_DO = "see `warmcast plan --schema`"
_BRANCH = re.compile(r"(dict|list|literal)\[.*\]|constrained-(str|int)|function-.*")


def _refused(
    cause: ValidationError | RecursionError, place: Callable[[Sequence[str | int]], str]
) -> UsageError:
    """One line for the first thing that is wrong."""
    if isinstance(cause, RecursionError):
        return UsageError(place(()), expected="values in values, so far", found="deeper ones")
    first = cause.errors(include_url=False)[0]
    # Where several types would do, the path ends with the one that was tried.
    path = [
        part for part in first["loc"] if not (isinstance(part, str) and _BRANCH.fullmatch(part))
    ]
    message = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    found = f"{first['input']!r:.80}"
    expected, found = {
        "missing": ("the field", "nothing"),
        "extra_forbidden": ("no such field", found),
        "model_type": ("a mapping", found),
        "model_attributes_type": ("a mapping", found),
    }.get(first["type"], (message, found))
    if "either" in message and isinstance(first["input"], Mapping):
        found = ", ".join(map(str, first["input"])) or "neither"
    return UsageError(place(path), expected=expected, found=found, do=_DO)


def with_refs(job: Job, names: Sequence[str]) -> Job:
    """The same job for other refs of its model."""
    model = Ref.parse(job.refs[0]).model
    return replace(job, refs=tuple(str(Ref(model, name)) for name in names))
