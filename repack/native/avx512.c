/* Strips with AVX-512 (F and BW): every store is a whole cache line. */
#include "native.h"

#if defined(__x86_64__)
#define STRIP4 avx512_strip4
#define STRIP8 avx512_strip8
#define TAIL4 avx2_strip4
#define TAIL8 avx2_strip8
#define TARGET __attribute__((target("avx512f,avx512bw")))
#define VECTOR __m512i
#define LANES 4
#define OP(name) _mm512_##name
#define WHOLE(name) _mm512_##name##_si512
#include "x86.h"

/* Transposes the lanes: 0x44 and 0xee take the lower and the upper two lanes of two vectors, 0x88 and 0xdd
 * the even and the odd ones. */
TARGET ALWAYS_INLINE void store_lines(uint8_t *p, ptrdiff_t stride, const int streaming, VECTOR a, VECTOR b,
                                      VECTOR c, VECTOR d)
{
    VECTOR lower_ab = _mm512_shuffle_i64x2(a, b, 0x44), lower_cd = _mm512_shuffle_i64x2(c, d, 0x44);
    VECTOR upper_ab = _mm512_shuffle_i64x2(a, b, 0xee), upper_cd = _mm512_shuffle_i64x2(c, d, 0xee);
    STORE(p, _mm512_shuffle_i64x2(lower_ab, lower_cd, 0x88));
    STORE(p + stride, _mm512_shuffle_i64x2(lower_ab, lower_cd, 0xdd));
    STORE(p + 2 * stride, _mm512_shuffle_i64x2(upper_ab, upper_cd, 0x88));
    STORE(p + 3 * stride, _mm512_shuffle_i64x2(upper_ab, upper_cd, 0xdd));
}

#include "lanes.h"
#endif
