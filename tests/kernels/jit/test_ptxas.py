"""The assembler's log, from lines that NVRTC 13.0 wrote."""

from marlin_moe.kernels.jit.ptxas import FunctionUsage, parse_serialized_wgmma, parse_usage, parse_warnings

LOG = """\
a.cu(3): warning #177-D: variable "unused" was declared but never referenced
  int unused;
      ^

Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"

ptxas info    : Overriding maximum register limit 256 for 'k' with  24 of maxrregcount option
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k2' for 'sm_90a'
ptxas info    : Function properties for k2
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compile time = 5.812 ms
ptxas warning : Something of the assembler
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     344 bytes stack frame, 404 bytes spill stores, 408 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 344 bytes cumulative stack size, 532 bytes smem
ptxas info    : Compile time = 28.047 ms
ptxas info    : Function properties for _Z1fILi20EEff
ptxas         .     16 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
\0\0"""
INJECTED = (
    "ptxas info    : (C7519) warpgroup.arrive is injected in around line 59 by compiler in function 'k'"
)
SERIALIZED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "the presence of Extern calls in the function 'k'"
)


def test_usage_of_kernels_and_of_functions_that_were_not_inlined() -> None:
    assert parse_usage(LOG) == (
        FunctionUsage(symbol="k2", registers=8),
        FunctionUsage(
            symbol="k",
            registers=24,
            stack_bytes=344,
            spill_store_bytes=404,
            spill_load_bytes=408,
            static_smem_bytes=532,
        ),
        FunctionUsage(symbol="_Z1fILi20EEff", stack_bytes=16, spill_store_bytes=4, spill_load_bytes=12),
    )


def test_warnings_are_whole_and_information_is_none() -> None:
    assert parse_warnings(LOG) == (
        'a.cu(3): warning #177-D: variable "unused" was declared but never referenced\n'
        "  int unused;\n      ^",
        "ptxas warning : Something of the assembler",
    )


def test_serialized_wgmma_is_found_and_added_fences_are_warnings() -> None:
    log = f"{INJECTED}\n{SERIALIZED}\n{LOG}"
    assert parse_serialized_wgmma(log) == (SERIALIZED,)
    assert parse_serialized_wgmma(f"{INJECTED}\n{LOG}") == ()
    assert parse_warnings(log)[:2] == (INJECTED, SERIALIZED)
