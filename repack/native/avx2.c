/* Strips with AVX2. */
#include "native.h"

#if defined(__x86_64__)
#define STRIP4 avx2_strip4
#define STRIP8 avx2_strip8
#define TAIL4 sse2_strip4
#define TAIL8 sse2_strip8
#define TARGET __attribute__((target("avx2")))
#define VECTOR __m256i
#define LANES 2
#define OP(name) _mm256_##name
#define WHOLE(name) _mm256_##name##_si256
#include "x86.h"

/* 0x20 joins the low lanes of two vectors, 0x31 the high ones. */
TARGET ALWAYS_INLINE void store_lines(uint8_t *p, ptrdiff_t stride, const int streaming, VECTOR a, VECTOR b,
                                      VECTOR c, VECTOR d)
{
    STORE(p, _mm256_permute2x128_si256(a, b, 0x20));
    STORE(p + 32, _mm256_permute2x128_si256(c, d, 0x20));
    STORE(p + stride, _mm256_permute2x128_si256(a, b, 0x31));
    STORE(p + stride + 32, _mm256_permute2x128_si256(c, d, 0x31));
}

#include "lanes.h"
#endif
