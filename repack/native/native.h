/* Weight repacking on a CPU: the shapes that the files of this folder share.
 *
 * Letters: B experts, K x N a matrix, r = k div 16 a row of the Marlin tensor, c = n div 64.
 *
 *     source  int32 [B, N, K*bits/32]    checkpoint layout: a column's k's are contiguous, low bits first
 *     out     int32 [B, K/16, N*bits/2]  Marlin layout: 64 columns of a row are 512 (8 bits: 1024) bytes
 *
 * A strip is the 8 columns n = 64c + g + 8m, m = 0..7, of one g = 0..7. Its 16 k's of row r are 8 pieces of
 * 8 (16) source bytes, and become the 64 (128) bytes at 64g (128g) of the row's 64 columns: whole cache
 * lines.
 */
#ifndef MARLIN_MOE_NATIVE_H
#define MARLIN_MOE_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "weight repacking in C reads packed words as little-endian bytes"
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Repacks a strip of `rows` rows.
 *
 * `source` is its column m = 0 at row 0, with `column_stride` bytes from m to m + 1 (8 columns of the
 * matrix); `out` its bytes of row 0, with `row_stride` bytes to row 1. `streaming`: `out` and `row_stride`
 * are multiples of a cache line, and stores should go past the caches. All arguments fit registers: a struct
 * on the stack would be read back behind the queue of pending stores, which cost a third of the speed. */
typedef void strip_function(const uint8_t *source, ptrdiff_t column_stride, uint8_t *out,
                            ptrdiff_t row_stride, ptrdiff_t rows, int streaming);

struct variant {
    const char *name;
    int (*available)(void); /* does this processor have the instructions? */
    strip_function *strip4, *strip8;
};

/* Best first; ends with {NULL}. The last one, scalar, is available everywhere. */
extern const struct variant VARIANTS[];

struct repacking {
    const uint8_t *source;
    ptrdiff_t source_expert_stride, source_column_stride; /* bytes */
    uint8_t *out;
    ptrdiff_t out_expert_stride, out_row_stride; /* bytes */
    ptrdiff_t experts, columns, rows;            /* B, N, K/16 */
    int bits;
    int threads;
};

/* Fills `out`. Touches no Python object; starts and joins its own threads. */
void repack(const struct repacking *job, const struct variant *variant);

struct unpacking {
    const uint8_t *source;
    ptrdiff_t source_expert_stride, source_row_stride; /* bytes */
    uint8_t *out;
    ptrdiff_t out_expert_stride, out_column_stride; /* bytes */
    ptrdiff_t experts, columns, rows;               /* B, N, K/16 */
    int bits;
};

/* Fills `out` with the packed words of Marlin words; a processor of any kind, one thread. */
void unpack(const struct unpacking *job);

strip_function scalar_strip4, scalar_strip8;
#if defined(__x86_64__)
strip_function sse2_strip4, sse2_strip8;
strip_function avx2_strip4, avx2_strip8;
strip_function avx512_strip4, avx512_strip8;
#elif defined(__aarch64__)
strip_function neon_strip4, neon_strip8;
#endif

#endif
