/* The instruction sets this build has code for, best first. */
#include "native.h"

static int always(void)
{
    return 1;
}

#if defined(__x86_64__)
static int has_avx512(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx2");
}

static int has_avx2(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") != 0;
}
#endif

const struct variant VARIANTS[] = {
#if defined(__x86_64__)
    {"avx512", has_avx512, avx512_strip4, avx512_strip8},
    {"avx2", has_avx2, avx2_strip4, avx2_strip8},
    {"sse2", always, sse2_strip4, sse2_strip8},
#elif defined(__aarch64__)
    {"neon", always, neon_strip4, neon_strip8},
#endif
    {"scalar", always, scalar_strip4, scalar_strip8},
    {NULL, NULL, NULL, NULL},
};
