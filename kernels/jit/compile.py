"""BuildSpec to cubin, by NVRTC through cuda.core: `compile_cubin`, `CompiledKernel`."""

import io
import time
from dataclasses import dataclass

from ..errors import JitError
from .ptxas import FunctionUsage, parse_serialized_wgmma, parse_usage, parse_warnings
from .spec import ARCH, STANDARD, BuildSpec
from .toolkit import import_cuda, installed_toolkit


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """A cubin and what is known of it.

    Fields:
        key: the spec's key.
        arch: what it runs on.
        symbols: (C++ expression as in the spec, mangled name) of every kernel.
        functions: the kernels, and the device functions that were not inlined.
        warnings: the compiler's and the assembler's, whole.
        seconds: how long the compiler took.
        cubin: the binary.
    """

    key: str
    arch: str
    symbols: tuple[tuple[str, str], ...]
    functions: tuple[FunctionUsage, ...]
    warnings: tuple[str, ...]
    seconds: float
    cubin: bytes

    def symbol(self, kernel: str) -> str:
        """The mangled name of a kernel of the spec."""
        return dict(self.symbols)[kernel]

    def usage(self, kernel: str) -> FunctionUsage:
        """What a kernel of the spec takes, without the device functions that it calls."""
        symbol = self.symbol(kernel)
        return next(function for function in self.functions if function.symbol == symbol)

    @property
    def registers(self) -> int:
        """The most registers per thread of any kernel."""
        return max(function.registers or 0 for function in self.functions)

    @property
    def spill_store_bytes(self) -> int:
        """Spill stores of all functions together."""
        return sum(function.spill_store_bytes for function in self.functions)

    @property
    def spill_load_bytes(self) -> int:
        """Spill loads of all functions together."""
        return sum(function.spill_load_bytes for function in self.functions)

    @property
    def static_smem_bytes(self) -> int:
        """The most static shared memory per block of any kernel."""
        return max(function.static_smem_bytes for function in self.functions)


def compile_cubin(spec: BuildSpec) -> CompiledKernel:
    """Compiles, whatever the cache holds. Needs no GPU; several threads may compile at once.

    Raises:
        JitError: the extra `cuda` is missing, NVRTC does not know the architecture, the source does not
            compile, its wgmma instructions are serialized, or it was edited meanwhile.
    """
    program_type = import_cuda("cuda.core").Program
    _check_arch(spec)
    source = spec.source.read()
    key = spec.key_of(source)
    log = io.StringIO()
    start = time.perf_counter()
    try:
        program = program_type(spec.prologue + source.text, "c++", _options(spec))
        compiled = program.compile("cubin", name_expressions=spec.kernels, logs=log)
    except Exception as error:  # cuda.core's own types are private and change; the log is in the text
        raise JitError(
            f"{spec.title} for {spec.arch}: expected NVRTC to compile {spec.source.root / spec.source.name}, "
            f"got {type(error).__name__}: {error}"
        ) from error
    seconds = time.perf_counter() - start
    text = log.getvalue()
    if serialized := parse_serialized_wgmma(text):
        raise JitError(
            f"{spec.title} for {spec.arch}: expected wgmma instructions that overlap, got code in which the "
            "assembler serialized them, many times slower. Keep accumulators out of branches and calls "
            "between wgmma.fence and wgmma.wait_group.\n" + "\n".join(serialized)
        )
    if spec.key() != key:
        raise JitError(
            f"{spec.title}: expected {spec.source.root} unchanged while compiling, got other contents after "
            "than before. Compile again."
        )
    return CompiledKernel(
        key=key,
        arch=spec.arch,
        symbols=tuple((name, _text(compiled.symbol_mapping[name])) for name in spec.kernels),
        functions=_usage(spec, text),
        warnings=parse_warnings(text.replace(f"{spec.source.root}/", "")),
        seconds=seconds,
        cubin=bytes(compiled.code),
    )


def _options(spec: BuildSpec) -> object:
    folders = [str(spec.source.root), *installed_toolkit().include_folders]
    options: object = import_cuda("cuda.core").ProgramOptions(
        name=str(spec.source.root / spec.source.name),  # else the working directory's headers come first
        std=STANDARD,
        arch=spec.arch,
        include_path=folders,
        max_register_count=spec.max_registers,
        use_fast_math=spec.fast_math or None,
        lineinfo=spec.line_info or None,
        ptxas_options=["-v", *spec.ptxas_options],
        no_cache=True,  # NVRTC keeps one of its own where there is a driver, and a hit there writes no log
    )
    return options


def _check_arch(spec: BuildSpec) -> None:
    match = ARCH.fullmatch(spec.arch)
    toolkit = installed_toolkit()
    if match is None or int(match[1]) not in toolkit.compute_capabilities:
        known = ", ".join(f"sm_{number}" for number in toolkit.compute_capabilities)
        raise JitError(
            f"{spec.title}: arch: expected one that NVRTC {toolkit.version} knows ({known}), got {spec.arch}."
        )


def _usage(spec: BuildSpec, log: str) -> tuple[FunctionUsage, ...]:
    functions = parse_usage(log)
    if not any(function.registers is not None for function in functions):
        raise JitError(
            f"{spec.title} for {spec.arch}: expected registers and spills in NVRTC's log, got {log!r}. "
            "This NVRTC writes another log; report it."
        )
    return functions


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
