"""What NVRTC and its assembler said while compiling: registers, spills, warnings."""

import re
from dataclasses import dataclass, replace

FUNCTION = re.compile(r"Function properties for (\S+)")
ENTRY = re.compile(r"Compiling entry function '([^']+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
STATIC_SMEM = re.compile(r"(\d+)(?:\+\d+)? bytes smem")
WGMMA = re.compile(r"\(C75\d\d\)")  # what the assembler did to wgmma instructions
SERIALIZED = re.compile(r"Potential Performance Loss|serialized")
WARNING = re.compile(r"(?:^|\s)warning(?:\s*:|\s+#)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionUsage:
    """What one compiled function takes: a kernel, or a device function that was not inlined.

    Fields:
        symbol: its mangled name.
        registers: per thread; None for device functions, which the assembler does not count apart.
        stack_bytes: the stack frame of a thread.
        spill_store_bytes, spill_load_bytes: of registers to local memory and back, in the code.
        static_smem_bytes: shared memory of a block that is not dynamic.
    """

    symbol: str
    registers: int | None = None
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    static_smem_bytes: int = 0


def parse_usage(log: str) -> tuple[FunctionUsage, ...]:
    """Every function in a log of the assembler's `-v`, in its order.

    A kernel's block goes from "Compiling entry function" to "Used ... registers"; device functions that were
    not inlined have a "Function properties" of their own.
    """
    found: dict[str, FunctionUsage] = {}
    entry = current = None
    for line in log.splitlines():
        if match := ENTRY.search(line):
            entry = current = match[1]
            found.setdefault(entry, FunctionUsage(symbol=entry))
        elif match := FUNCTION.search(line):
            current = match[1]
            found.setdefault(current, FunctionUsage(symbol=current))
        elif (match := STACK.search(line)) and current is not None:
            stack, stores, loads = map(int, match.groups())
            found[current] = replace(
                found[current], stack_bytes=stack, spill_store_bytes=stores, spill_load_bytes=loads
            )
        elif (match := REGISTERS.search(line)) and entry is not None:
            smem = STATIC_SMEM.search(line)
            found[entry] = replace(
                found[entry], registers=int(match[1]), static_smem_bytes=int(smem[1]) if smem else 0
            )
    return tuple(found.values())


def parse_warnings(log: str) -> tuple[str, ...]:
    """Every warning of the compiler and the assembler, each with the source lines that belong to it.

    Fences that the assembler added to wgmma code (C7517, C7519) count, although it calls them information.
    """
    warnings: list[str] = []
    lines = iter(log.replace("\0", "").splitlines())
    for line in lines:
        if WARNING.search(line) is None and WGMMA.search(line) is None:
            continue
        block = [line.rstrip()]
        if not line.startswith("ptxas"):  # the compiler shows the place, up to an empty line
            for more in lines:
                if not more.strip():
                    break
                block.append(more.rstrip())
        warnings.append("\n".join(block))
    return tuple(warnings)


def parse_serialized_wgmma(log: str) -> tuple[str, ...]:
    """The lines that say that wgmma instructions run one after the other (C7510 and others)."""
    return tuple(line for line in parse_warnings(log) if WGMMA.search(line) and SERIALIZED.search(line))
