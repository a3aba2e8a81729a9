/* Strips with NEON, which every aarch64 processor has. */
#include "native.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define STRIP4 neon_strip4
#define STRIP8 neon_strip8
#define TAIL4 scalar_strip4
#define TAIL8 scalar_strip8
#define TARGET
#define VECTOR uint8x16_t
#define LANES 1
#define LOAD vld1q_u8
#define AS(bits, v) vreinterpretq_u##bits##_u8(v)
#define ZIP_LOW(bits, a, b) vreinterpretq_u8_u##bits(vzip1q_u##bits(AS(bits, a), AS(bits, b)))
#define ZIP_HIGH(bits, a, b) vreinterpretq_u8_u##bits(vzip2q_u##bits(AS(bits, a), AS(bits, b)))
#define ZIP_LOW8 vzip1q_u8
#define ZIP_LOW16(a, b) ZIP_LOW(16, a, b)
#define ZIP_LOW32(a, b) ZIP_LOW(32, a, b)
#define ZIP_LOW64(a, b) ZIP_LOW(64, a, b)
#define ZIP_HIGH8 vzip2q_u8
#define ZIP_HIGH16(a, b) ZIP_HIGH(16, a, b)
#define ZIP_HIGH32(a, b) ZIP_HIGH(32, a, b)
#define ZIP_HIGH64(a, b) ZIP_HIGH(64, a, b)
#define AND vandq_u8
#define XOR veorq_u8
#define SHIFT_LEFT4(v) vshlq_n_u8(v, 4)
#define SHIFT_RIGHT4(v) vshrq_n_u8(v, 4)
#define HIGH_NIBBLES vdupq_n_u8(0xf0)

/* Ordinary stores: there is no intrinsic for those that go past the caches. */
ALWAYS_INLINE void store_lines(uint8_t *p, ptrdiff_t stride, const int streaming, VECTOR a, VECTOR b,
                               VECTOR c, VECTOR d)
{
    (void)stride;
    (void)streaming;
    vst1q_u8(p, a);
    vst1q_u8(p + 16, b);
    vst1q_u8(p + 32, c);
    vst1q_u8(p + 48, d);
}

#include "lanes.h"
#endif
