/* Strips with SSE2, which every x86-64 processor has. */
#include "native.h"

#if defined(__x86_64__)
#define STRIP4 sse2_strip4
#define STRIP8 sse2_strip8
#define TAIL4 scalar_strip4
#define TAIL8 scalar_strip8
#define TARGET
#define VECTOR __m128i
#define LANES 1
#define OP(name) _mm_##name
#define WHOLE(name) _mm_##name##_si128
#include "x86.h"

ALWAYS_INLINE void store_lines(uint8_t *p, ptrdiff_t stride, const int streaming, VECTOR a, VECTOR b,
                               VECTOR c, VECTOR d)
{
    (void)stride;
    STORE(p, a);
    STORE(p + 16, b);
    STORE(p + 32, c);
    STORE(p + 48, d);
}

#include "lanes.h"
#endif
