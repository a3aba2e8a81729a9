/* What lanes.h asks for, in x86 names: OP(x) is _mm_x, _mm256_x or _mm512_x; WHOLE(x) has the width at its
 * end. STORE is for the includer's store_lines. */
#include <immintrin.h>

#define LOAD(p) WHOLE(loadu)((const void *)(p))
#define ZIP_LOW8 OP(unpacklo_epi8)
#define ZIP_LOW16 OP(unpacklo_epi16)
#define ZIP_LOW32 OP(unpacklo_epi32)
#define ZIP_LOW64 OP(unpacklo_epi64)
#define ZIP_HIGH8 OP(unpackhi_epi8)
#define ZIP_HIGH16 OP(unpackhi_epi16)
#define ZIP_HIGH32 OP(unpackhi_epi32)
#define ZIP_HIGH64 OP(unpackhi_epi64)
#define AND WHOLE(and)
#define XOR WHOLE(xor)
#define SHIFT_LEFT4(v) OP(slli_epi16)(v, 4)
#define SHIFT_RIGHT4(v) OP(srli_epi16)(v, 4)
#define HIGH_NIBBLES OP(set1_epi32)((int)0xf0f0f0f0u)
#define STORE(p, v) (streaming ? WHOLE(stream)((void *)(p), v) : WHOLE(storeu)((void *)(p), v))
