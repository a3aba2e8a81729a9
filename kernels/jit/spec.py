"""Everything that can change a binary, and the key made of it: `BuildSpec`."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import JitError
from .source import KernelSource, SourceText
from .toolkit import installed_toolkit, toolkit_headers_digest

FORMAT_VERSION = 1  # of what is compiled, how it is read back and how it is stored
STANDARD = "c++17"
ARCH = re.compile(r"sm_(\d{2,3})[af]?")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)

Value = TypeVar("Value")
Pairs = Mapping[str, Value] | tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSpec:
    """One cubin to build.

    Fields:
        source: the .cu file.
        kernels: the kernels in it that are launched, as C++ expressions: `"moe"`, `"scale<4, float>"`.
        arch: "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", as far as NVRTC knows them.
        constants: name to int or bool; a mapping or pairs. Each is a `constexpr` in front of the source.
        defines: name to text; a mapping or pairs. Each is a `#define` in front of the source.
        max_registers: at most that many registers per thread; None leaves it to the compiler.
        fast_math: approximate division, square root and transcendental functions, denormals to zero.
        line_info: source lines for profilers.
        ptxas_options: more options for the assembler, one per item.
        label: what people call this variant; changes nothing.
    """

    source: KernelSource
    kernels: tuple[str, ...]
    arch: str
    constants: Pairs[int | bool] = ()
    defines: Pairs[str] = ()
    max_registers: int | None = None
    fast_math: bool = False
    line_info: bool = False
    ptxas_options: tuple[str, ...] = ()
    label: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "constants", _sorted(self.constants))  # hashable, and independent of order
        object.__setattr__(self, "defines", _sorted(self.defines))
        if not isinstance(self.kernels, tuple) or not self.kernels or not all(self.kernels):
            raise TypeError(f"BuildSpec.kernels: expected a tuple of names, got {self.kernels!r}.")
        if ARCH.fullmatch(self.arch) is None:
            raise JitError(f"{self.title}: arch: expected one like sm_80 or sm_90a, got {self.arch!r}.")
        names = [name for name, _ in (*_sorted(self.constants), *_sorted(self.defines))]
        for name in names:
            if IDENTIFIER.fullmatch(name) is None or names.count(name) > 1:
                raise JitError(f"{self.title}: expected distinct C++ names for constants, got {name!r}.")
        for name, value in _sorted(self.constants):
            if not isinstance(value, int) or not -(2**63) < value < 2**63:
                raise TypeError(f"{self.title}: constant {name}: expected a bool or int64, got {value!r}.")
        for name, text in _sorted(self.defines):
            if not isinstance(text, str) or "\n" in text:
                raise TypeError(f"{self.title}: define {name}: expected one line of text, got {text!r}.")
        if self.max_registers is not None and not 16 <= self.max_registers <= 255:
            raise JitError(f"{self.title}: max_registers: expected 16 to 255, got {self.max_registers}.")

    @property
    def title(self) -> str:
        """How errors and reports call it: the label, else the source and its kernels."""
        return self.label or f"{self.source.name}:{','.join(self.kernels)}"

    @property
    def prologue(self) -> str:
        """The C++ text in front of the source."""
        lines = [f"#define {name} {text}" for name, text in _sorted(self.defines)]
        lines += [_constexpr(name, value) for name, value in _sorted(self.constants)]
        return "\n".join([*lines, f'#line 1 "{self.source.name}"', ""])

    def key(self) -> str:
        """SHA-256 in hex over all that can change the binary, read from disk now; a few milliseconds.

        Covers source, contents of all headers (the toolkit's too), prologue, options, architecture, NVRTC's
        build and the format version; not times or the label, and paths only where line_info puts them in.

        Raises:
            JitError: a source cannot be read, or the extra `cuda` is not installed.
        """
        return self.key_of(self.source.read())

    def key_of(self, source: SourceText) -> str:
        """The key with this reading of the source."""
        toolkit = installed_toolkit()
        ingredients = {
            "format": FORMAT_VERSION,
            "nvrtc": [toolkit.version, toolkit.build],
            "toolkit_headers": toolkit_headers_digest(source.toolkit_headers),
            "name": self.source.name,
            "source": source.text,
            "headers": source.headers,
            "prologue": self.prologue,
            "kernels": self.kernels,
            "arch": self.arch,
            "standard": STANDARD,
            "max_registers": self.max_registers,
            "fast_math": self.fast_math,
            "line_info": str(self.source.root) if self.line_info else None,  # then the binary names files
            "ptxas_options": self.ptxas_options,
        }
        return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()


def _sorted(pairs: Pairs[Value]) -> tuple[tuple[str, Value], ...]:
    items = pairs.items() if isinstance(pairs, Mapping) else pairs
    return tuple(sorted(items, key=lambda pair: pair[0]))


def _constexpr(name: str, value: int | bool) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {'true' if value else 'false'};"
    kind = "int" if -(2**31) < value < 2**31 else "long long"
    return f"constexpr {kind} {name} = {value};"
