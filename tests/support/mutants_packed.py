"""Mutants of a packed checkpoint: damages to its files, tensors and manifest."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from mutants import (
    WEIRD,
    Damage,
    Draw,
    Files,
    Mutant,
    combined,
    config_places,
    cut_bytes,
    drop,
    duplicate,
    edit_config,
    edit_index,
    flip,
    remove_file,
    rename,
    replace_file,
    reshape,
    retype,
    stray_file,
    swap_files,
)
from packed_files import MANIFEST


def edit_manifest(draw: Draw, files: Files) -> Mutant:
    """A value of the manifest is another one, or missing; its own hash stays as it was."""
    manifest = _edited(draw, json.loads(files[MANIFEST]))
    return Mutant(
        files=files | {MANIFEST: json.dumps(manifest).encode()},
        done=f"{MANIFEST}: edited",
        culprits=((MANIFEST,),),
    )


def _edited(draw: Draw, manifest: dict[str, Any]) -> dict[str, Any]:
    path = draw(st.sampled_from(config_places(manifest)))
    holder: Any = manifest
    for key in path[:-1]:
        holder = holder[key]
    if draw(st.integers(0, 3)):
        value = draw(st.sampled_from([value for value in WEIRD if value != "\ud800"]))
        if value == holder[path[-1]]:
            value = "another"
        holder[path[-1]] = value
    else:
        del holder[path[-1]]
    return manifest


PACKED_DAMAGES: tuple[Damage, ...] = (
    cut_bytes, replace_file, remove_file, swap_files, stray_file, flip, flip, flip, rename, drop, reshape,
    retype, duplicate, edit_index, edit_config, edit_manifest, edit_manifest,
)  # fmt: skip


def packed_mutants(files: Files) -> st.SearchStrategy[Mutant]:
    """Mutants of a packed checkpoint."""
    return combined(files, PACKED_DAMAGES)
