"""Small damages to a checkpoint directory. Each changes one thing and leaves the rest a valid checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"


def truncate(file: Path, num_bytes: int) -> None:
    """Cut `num_bytes` off the end of a file."""
    size = file.stat().st_size
    if not 0 < num_bytes <= size:
        raise ValueError(f"{file}: {size} bytes, cannot cut {num_bytes}")
    with file.open("r+b") as handle:
        handle.truncate(size - num_bytes)


def flip_bit(file: Path, position: int, bit: int = 0) -> None:
    """Flip one bit of the byte at `position`; a negative position counts from the end."""
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)


def flip_tensor_bit(path: Path, name: str, position: int = 0, bit: int = 0) -> None:
    """Flip one bit of a tensor's data, wherever it is stored."""
    file = file_of(path, name)
    raw = file.read_bytes()
    header_bytes = int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8 : 8 + header_bytes])[name]["data_offsets"]
    if not -(end - begin) <= position < end - begin:
        raise IndexError(f"{name}: {end - begin} bytes, no position {position}")
    flip_bit(file, 8 + header_bytes + (begin if position >= 0 else end) + position, bit)


def edit_json(file: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content, indent=2) + "\n")


def edit_config(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """`edit` changes the parsed config.json in place."""
    edit_json(path / "config.json", edit)


def edit_weights_config(path: Path, group: str = "group_0", **changes: Any) -> None:
    """Change entries of one config group's `weights`, as `group_size=64`."""

    def edit(config: dict[str, Any]) -> None:
        quantization = config.get("quantization_config") or config["text_config"]["quantization_config"]
        quantization["config_groups"][group]["weights"].update(changes)

    edit_config(path, edit)


def files_of(path: Path) -> list[Path]:
    return sorted(path.glob("model*.safetensors"))


def file_of(path: Path, name: str) -> Path:
    """The file that holds tensor `name`."""
    for file in files_of(path):
        with safe_open(file, "pt") as handle:
            if name in handle.keys():  # noqa: SIM118 (not a dict)
                return file
    raise KeyError(f"{path}: no tensor {name}")


def _rewrite(path: Path, name: str, new: dict[str, torch.Tensor], *, index: bool) -> None:
    """Put `new` in the place of tensor `name`, in its file and, if `index`, in the index."""
    file = file_of(path, name)
    with safe_open(file, "pt") as handle:
        tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118 (not a dict)
        metadata = handle.metadata()
    del tensors[name]
    save_file({key: tensor.contiguous() for key, tensor in (tensors | new).items()}, file, metadata=metadata)
    if index and (path / INDEX).exists():

        def edit(content: dict[str, Any]) -> None:
            del content["weight_map"][name]
            content["weight_map"] |= dict.fromkeys(new, file.name)

        edit_json(path / INDEX, edit)


def tensor_of(path: Path, name: str) -> torch.Tensor:
    with safe_open(file_of(path, name), "pt") as handle:
        tensor: torch.Tensor = handle.get_tensor(name)
        return tensor


def drop_tensor(path: Path, name: str, *, index: bool = True) -> None:
    """Remove a tensor; with `index=False` the index goes on naming it."""
    _rewrite(path, name, {}, index=index)


def rename_tensor(path: Path, name: str, new_name: str, *, index: bool = True) -> None:
    _rewrite(path, name, {new_name: tensor_of(path, name)}, index=index)


def replace_tensor(path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """`change` makes the new tensor out of the old: another value, shape or dtype."""
    _rewrite(path, name, {name: change(tensor_of(path, name))}, index=True)
