"""A kernel's source file and the headers that it includes, read as text: `KernelSource`, `SourceText`."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import JitError

CUDA_FOLDER = Path(__file__).resolve().parent.parent / "cuda"
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include\b[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|(.*))', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceText:
    """What one reading of a source found.

    Fields:
        text: the .cu file.
        headers: (path below the root, SHA-256 in hex) of every header in the closure, sorted.
        toolkit_headers: the names in `#include <...>` anywhere in the closure, sorted.
    """

    text: str
    headers: tuple[tuple[str, str], ...]
    toolkit_headers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """A .cu file by its name below `root`, the folder in which its headers are looked for.

    `#include "x.cuh"` is searched beside the including file, then in the root, as the compiler does;
    `#include <x>` is the CUDA toolkit's.
    """

    name: str
    root: Path = CUDA_FOLDER

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.root, Path):
            raise TypeError(f"KernelSource: expected a str and a Path, got {self.name!r} and {self.root!r}.")
        path = PurePosixPath(self.name)
        if path.is_absolute() or ".." in path.parts or path.suffix != ".cu":
            raise JitError(f"KernelSource.name: expected a .cu file below {self.root}, got {self.name!r}.")

    def read(self) -> SourceText:
        """The source and its headers as they are on disk now.

        Raises:
            JitError: a file is missing or no text, lies outside the root, or is included by a macro's name.
        """
        texts: dict[str, str] = {}
        toolkit: set[str] = set()
        waiting = [self.name]
        while waiting:
            name = waiting.pop()
            if name in texts:
                continue
            texts[name] = self._text(name)
            for match in INCLUDE.finditer(texts[name]):
                quoted, angled, other = match.groups()
                if other is not None:
                    raise JitError(
                        f'{self.root / name}: expected #include "..." or <...>, so that the headers can be '
                        f"found without a preprocessor, got {match[0].strip()!r}."
                    )
                if angled is not None:
                    toolkit.add(angled)
                else:
                    waiting.append(self._locate(quoted, name))
        text = texts.pop(self.name)
        headers = tuple((name, hashlib.sha256(texts[name].encode()).hexdigest()) for name in sorted(texts))
        return SourceText(text=text, headers=headers, toolkit_headers=tuple(sorted(toolkit)))

    def _text(self, name: str) -> str:
        try:
            return (self.root / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise JitError(
                f"{self.root / name}: expected a source file of the package, got {error}. "
                "Reinstall marlin-moe."
            ) from error

    def _locate(self, header: str, includer: str) -> str:
        """The header's path below the root."""
        root = self.root.resolve()
        for folder in (root / PurePosixPath(includer).parent, root):
            path = (folder / header).resolve()
            if path.is_file() and path.is_relative_to(root):
                return path.relative_to(root).as_posix()
        raise JitError(
            f'{self.root / includer}: expected the header of #include "{header}" below {self.root}, got none '
            "there. Headers of the CUDA toolkit are included with <...>."
        )
