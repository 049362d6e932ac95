"""The trained weights: one safetensors file that the plain model loads, or a folder that transformers opens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from meg_compile.train.batches import DTYPES
from meg_compile.weights import save_file, save_folder


def export_weights(config: Any, program: Any, values: Iterable[tuple[str, Tensor | None]], is_first: bool) -> None:
    """Write the weights where `config.export` says: `NAME.safetensors` is a file, any other path a folder.

    values: what `Executor.gather("value")` yields. A collective: all ranks call this.
    """
    settings = config.export
    path, dtype = Path(settings.path), DTYPES.get(settings.dtype)
    if path.suffix == ".safetensors":
        save_file(program.params, values, path if is_first else None, dtype)
        return
    like = Path(config.init.path) if config.init.path else None
    save_folder(program, values, path if is_first else None, dtype, settings.max_shard_gb, like)
