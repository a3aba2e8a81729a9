"""A checkpoint directory: its config and its tensors, found from headers and read when asked for.

With an index exactly its files are read, else `model.safetensors`, else the only safetensors file. Others are
neither read nor copied, and named in `left_out`.
"""

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

import torch

from .errors import CheckpointError, report
from .tensor_file import TensorEntry, TensorFile, file_kind

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ONLY_SHARD = "-00001-of-00001.safetensors"
SHARD_NAME = re.compile(r"model-\d+-of-\d+\.safetensors")


class Checkpoint:
    """An open checkpoint directory.

    Attributes:
        path: the directory.
        config: `config.json`, parsed.
        files: file name -> `TensorFile`, in index order.
        tensors: tensor name -> `TensorEntry`, over all files.
        index: the index, parsed, or None for a single file.
        left_out: names of safetensors files that are no part of the checkpoint.

    Raises:
        CheckpointError: missing or malformed config, index or files; an index that disagrees with its files
            or points outside the directory; shard files that no index names. All problems in one text.
    """

    fills_any_device = False

    def __init__(self, path: str | Path, *, follow_links: bool = False) -> None:
        self.path = Path(path)
        found = _what_stands_at(self.path)
        if found is not None:
            raise CheckpointError(
                f"{self.path}: expected a checkpoint directory (config.json and safetensors files), got "
                f"{found}."
            )
        self.config = read_json(inside(self.path, CONFIG, follow_links=follow_links))
        self.index = None
        if os.path.lexists(self.path / INDEX):  # a link that leads nowhere is an error, not a missing index
            self.index = read_json(inside(self.path, INDEX, follow_links=follow_links))
        names, self.left_out = self._choose_files()
        self.files: dict[str, TensorFile] = {}
        problems = []
        for name in names:
            try:
                self.files[name] = TensorFile(inside(self.path, name, follow_links=follow_links), name=name)
            except CheckpointError as error:
                problems.append(str(error))
        self.tensors: dict[str, TensorEntry] = {}
        for name, file in self.files.items():
            for key, entry in file.entries.items():
                if key in self.tensors:
                    problems.append(
                        f"{key}: expected in one file, got it in {self.tensors[key].file} and {name}."
                    )
                self.tensors[key] = entry
        if not problems:
            problems += self._index_problems()
        if problems:
            raise CheckpointError(report(str(self.path), problems))

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of the config: `text_config` where there is one, else the whole."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def quantization_config(self) -> Mapping[str, Any]:
        """`quantization_config`, at the top level or in `text_config`; CheckpointError without one."""
        for place, config in (("", self.config), ("text_config.", self.text_config)):
            for key in ("quantization_config", "compression_config"):
                found = config.get(key)
                if isinstance(found, dict):
                    return found
                if found is not None:
                    raise CheckpointError(
                        f"{self.path / CONFIG}: expected {place}{key} to be an object, got "
                        f"{type(found).__name__}."
                    )
        raise CheckpointError(
            f"{self.path / CONFIG}: expected a quantization_config (at the top or in text_config), got none. "
            "The checkpoint is not quantized, or its config was lost; quantize it with llm-compressor first."
        )

    @property
    def num_experts(self) -> set[int]:
        """Routed experts of a layer, as the config names them; empty where it does not."""
        keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        found = [self.text_config.get(key) for key in keys]
        return {value for value in found if _is_count(value)}

    @property
    def top_k(self) -> int | None:
        """Experts per token as the config names it, or None."""
        for key in ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"):
            value = self.text_config.get(key)
            if _is_count(value):
                return value
        return None

    def read(self, name: str) -> torch.Tensor:
        """A new CPU tensor with the bytes of tensor `name`."""
        return self.files[self.tensors[name].file].read(name)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` (CPU, contiguous) with the bytes of tensor `name`."""
        self.files[self.tensors[name].file].read_into(name, out)

    def read_all(self, wanted: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill tensors (CPU, contiguous) with those of their names: file after file, front to back."""
        found = [(self.tensors[name], out) for name, out in wanted]
        of_file: dict[str, list[tuple[TensorEntry, torch.Tensor]]] = {}
        for entry, out in sorted(found, key=lambda item: item[0].offset_bytes):
            of_file.setdefault(entry.file, []).append((entry, out))
        for name, reads in of_file.items():
            self.files[name].read_all(reads)

    def read_part_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill `out` (CPU, contiguous) with elements of tensor `name` from `start` on."""
        self.files[self.tensors[name].file].read_part_into(name, start, out)

    def close(self) -> None:
        """Close all files."""
        for file in self.files.values():
            file.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _choose_files(self) -> tuple[list[str], list[str]]:
        present = sorted(p.name for p in self.path.glob("*.safetensors"))
        if self.index is not None:
            chosen = list(dict.fromkeys(self._weight_map().values()))
            wrong = [name for name in chosen if not is_below(name)]
            if wrong:
                raise CheckpointError(
                    f"{self.path}: expected file names inside the directory, got "
                    f"{shorten([ascii(name) for name in wrong])} in its index. Fetch the index again."
                )
        elif SINGLE in present:
            chosen = [SINGLE]
        elif len(present) == 1:
            chosen = present
        else:
            found = ", ".join(present) if present else "no safetensors file"
            raise CheckpointError(
                f"{self.path}: expected {INDEX}, {SINGLE} or exactly one safetensors file, got {found}."
            )
        left_out = [name for name in present if name not in chosen]
        stray = [name for name in left_out if SHARD_NAME.fullmatch(name)]
        if self.index is None and SHARD_NAME.fullmatch(chosen[0]) and not chosen[0].endswith(ONLY_SHARD):
            raise CheckpointError(
                f"{self.path}: expected {INDEX}, because {chosen[0]} is one shard of several, got none. "
                "Fetch the index and the other shards."
            )
        if stray:
            source = INDEX if self.index is not None else chosen[0]
            raise CheckpointError(
                f"{self.path}: expected every model shard to be named by {source}, got {', '.join(stray)} "
                "beside it. A second or older set of shards lies in the directory; remove it, or fetch the "
                "index that goes with it."
            )
        return chosen, left_out

    def _weight_map(self) -> Mapping[str, str]:
        weight_map = self.index.get("weight_map") if self.index else None
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(
                f"{self.path / INDEX}: expected a weight_map of tensor names to file names, got "
                f"{type(weight_map).__name__}."
            )
        if not weight_map:
            raise CheckpointError(
                f"{self.path / INDEX}: expected a weight_map that names tensors, got an empty one."
            )
        return weight_map

    def _index_problems(self) -> list[str]:
        if self.index is None:
            return []
        weight_map = self._weight_map()
        index = self.path / INDEX
        absent = [f"{k} (said to be in {f})" for k, f in weight_map.items() if k not in self.files[f].entries]
        unknown = [f"{k} (in {e.file})" for k, e in self.tensors.items() if k not in weight_map]
        problems = []
        if absent:
            problems.append(
                f"{index}: names {len(absent)} tensors that their files do not hold: {shorten(absent)}. "
                "Files and index are of different versions; fetch them again."
            )
        if unknown:
            problems.append(
                f"{index}: the files hold {len(unknown)} tensors that it does not name: {shorten(unknown)}. "
                "Files and index are of different versions; fetch them again."
            )
        return problems


def _what_stands_at(path: Path) -> str | None:
    """What is there instead of a directory, for the error; None where it is one."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:  # nothing, or a name that no file system has
        gone = isinstance(error, (FileNotFoundError, NotADirectoryError))
        return "nothing there" if gone else f"one that cannot be looked at: {error.args[-1]}"
    if stat.S_ISDIR(mode):
        return None
    return "a file" if stat.S_ISREG(mode) else file_kind(mode)


def is_below(name: str) -> bool:
    """Whether `name` can be that of a file below a directory."""
    parts = PurePosixPath(name).parts
    inner = bool(parts) and not name.startswith("/") and ".." not in parts
    return inner and "\\" not in name and "\0" not in name


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError when it is missing or no object."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"{path}: expected a JSON file, got {file_kind(mode)}. Fetch it again.")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: expected a readable JSON file, got {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON, got text that is none: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}.")
    return value


def inside(directory: Path, name: str, *, follow_links: bool = False) -> Path:
    """The path of file `name` of a directory; CheckpointError where it leads out of it.

    Links are followed inside the directory and, from a hub snapshot (`…/snapshots/<revision>`), into the same
    repository's `blobs`; any other link out is refused unless `follow_links`.
    """
    if not is_below(name):
        raise CheckpointError(
            f"{directory}: expected file names inside the directory, got {name!r} in its index."
        )
    path = directory / name
    try:
        target, root = path.resolve(), directory.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a name no file system has
        raise CheckpointError(f"{directory}: expected a file called {name!r}, got {error}.") from error
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not follow_links and not any(target.is_relative_to(place) for place in allowed):
        raise CheckpointError(
            f"{path}: expected a file inside {root}, got a link to {target}. Copy the file there, or ask for "
            "follow_links."
        )
    return path


def shorten(names: list[str], limit: int = 6) -> str:
    """The first few names and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
