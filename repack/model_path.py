"""A directory, or the name of a model on the Hugging Face Hub -> the directory that holds its files."""

import os
import re
from pathlib import Path

from .checkpoint import shorten
from .errors import CheckpointError

MODEL_ID = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*?)(?:@(?P<revision>[\w./-]+))?")
"""`org/model`, or `org/model@revision`."""

OTHER_FILES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "original/*")
"""Files of a repository that are never read here, and are not fetched."""

OF_FILES = (".safetensors", ".json")
"""What ends so is a file's path and no model."""


def model_path(path: str | Path) -> Path:
    """What stands at `path`, else the hub's snapshot of the model of that name.

    huggingface_hub finds it in its local cache, or fetches it there first. The snapshot's links into `blobs/`
    are read as they are. Where the folder `org` is here, `org/model` is rather a mistyped path: then nothing
    is fetched.

    Raises:
        CheckpointError: huggingface_hub is not installed, or has no such model, or cannot fetch it (offline,
            gated, a full disk); it says how to get it.
    """
    text = os.fspath(path)
    found = MODEL_ID.fullmatch(text)
    if found is None or os.path.lexists(path) or text.endswith(OF_FILES):
        return Path(path)
    name, revision = found["id"], found["revision"]
    fetch = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    expected = f"{text}: expected a directory or a model on the Hugging Face Hub, got no such directory, and"
    folder = Path(text).parent
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise CheckpointError(
            f"{expected} huggingface_hub, which finds models, cannot be imported: {error}. "
            f"pip install 'marlin-moe[hub]', then {fetch}; or name a directory."
        ) from error
    try:
        # offline the client still asks for the files of a commit
        offline = constants.HF_HUB_OFFLINE or folder.is_dir()
        snapshot = snapshot_download(
            name, revision=revision, ignore_patterns=list(OTHER_FILES), local_files_only=offline
        )
    except LocalEntryNotFoundError as error:
        if folder.is_dir():
            raise CheckpointError(
                f"{text}: expected a directory, because the folder {folder} is here, got none of that name "
                f"in it ({_names_in(folder)}), nor a copy of a model of that name in the hub's local cache. "
                f"Check the spelling. If the model on the hub is meant, run {fetch} first."
            ) from error
        raise CheckpointError(
            f"{expected} no complete copy in the hub's local cache: {_first_line(error)} Where there is a "
            f"network, run {fetch} (and unset HF_HUB_OFFLINE); or copy it here and name its directory."
        ) from error
    except Exception as error:  # whatever its client meets: the network, a missing right, a full disk
        raise CheckpointError(
            f"{expected} from the hub: {_first_line(error)} Check the name; for a gated model run "
            f"hf auth login, then {fetch}."
        ) from error
    return Path(snapshot)


def _names_in(folder: Path) -> str:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return error.strerror or str(error)
    return shorten(names) if names else "it is empty"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".") + "."
