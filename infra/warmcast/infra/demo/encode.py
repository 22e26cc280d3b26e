"""What workers and reference do with a model: build it, run it on fixed inputs, hash the outputs.

All of it is deterministic on one kind of device, so equal weights give equal digests; the digest
covers each output's name, dtype, shape and bytes.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from warmcast.manifests.errors import UsageError

SENTENCES = (
    "A worker takes its weights from the fastest place that has them.",
    "The weights come from a peer's memory.",
    "It rained all day, and the river rose.",
    "Peers that were killed answer nobody.",
)

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # Matrix products that do not depend on how their operands are aligned (MKL), nor on which
    # workspace is free (cuBLAS): where weights lie in memory is what differs between workers.
    "MKL_CBWR": "AUTO,STRICT",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""What every process that encodes has in its environment from the start."""

_THREADS = 2
_TOKENIZERS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.txt",
    "vocab.json",
)  # fmt: skip
_TOKENS = (2, 16)
"""Sequences, and tokens of each, for a model without a tokenizer."""


def prepare() -> None:
    """Make this process deterministic and quiet."""
    torch.set_num_threads(_THREADS)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    warnings.simplefilter("ignore")
    logging.getLogger("warmcast").addHandler(logging.StreamHandler())  # standard error: the log


def model_class(config: Any) -> Any:
    """The class that wrote a checkpoint, whose names its tensors have; AutoModel if unknown."""
    names = config.architectures or [None]
    return getattr(transformers, str(names[0]), transformers.AutoModel)


def build(folder: Path, default: torch.dtype) -> nn.Module:
    """The model of a folder's ``config.json``, its weights as its class initialises them.

    ``default`` is the dtype of the weights where the config does not tell.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    wanted = model_class(config)
    dtype = getattr(config, "dtype", None) or default
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    try:
        auto = wanted is transformers.AutoModel
        model: nn.Module = wanted.from_config(config) if auto else wanted(config)
    finally:
        torch.set_default_dtype(before)
    return model


def read(folder: Path, device: torch.device) -> nn.Module:
    """The model of a folder as transformers reads it, with nothing of ours."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model: nn.Module = model_class(config).from_pretrained(folder, dtype="auto")
    return model.to(device)


def encode(model: nn.Module, folder: Path, device: torch.device) -> dict[str, Any]:
    """Run a model on the fixed inputs; the outputs' names and shapes, and their digest.

    Raises :class:`UsageError` for a model that does not read token ids.
    """
    model.eval()
    model.config.use_cache = False  # type: ignore[union-attr]
    inputs = {name: tensor.to(device) for name, tensor in _inputs(model, folder).items()}
    with torch.no_grad():
        outputs = _tensors(model(**inputs, return_dict=True))
    hidden, mask = outputs.get("last_hidden_state"), inputs.get("attention_mask")
    if hidden is not None and mask is not None and hidden.shape[:2] == mask.shape:
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        outputs["sentence_embedding"] = (hidden * weight).sum(1) / weight.sum(1)
    return {
        "digest": digest(outputs),
        "outputs": {name: list(tensor.shape) for name, tensor in outputs.items()},
    }


def digest(outputs: Mapping[str, Tensor]) -> str:
    """The SHA-256 of tensors: their names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(outputs.items()):
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(flat.numpy().data)
    return found.hexdigest()


def _inputs(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    config: Any = model.config
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise UsageError(
            f"model {type(model).__name__}",
            expected="one that reads token ids",
            found=f"one that reads {model.main_input_name}",
            do="name another folder with --model",
        )
    if any((folder / name).exists() for name in _TOKENIZERS):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        inputs = dict(tokenizer(list(SENTENCES), padding=True, return_tensors="pt"))
    else:
        vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        count = _TOKENS[0] * _TOKENS[1]
        ids = torch.arange(1, count + 1).remainder(vocabulary).reshape(_TOKENS)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :1]
    known = inspect.signature(model.forward).parameters
    return {name: tensor for name, tensor in inputs.items() if name in known}


def _tensors(outputs: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in outputs.items() if isinstance(value, Tensor)}
