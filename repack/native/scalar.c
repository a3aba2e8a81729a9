/* Strips in plain C: every processor, and the rows that are left over where a vector takes several. */
#include <string.h>

#include "native.h"

/* Byte q of `word`, at byte `to`. */
static inline uint32_t move_byte(uint32_t word, int q, int to)
{
    return ((word >> (8 * q)) & 0xffu) << (8 * to);
}

/* A column's two words hold k 0..7 and k 8..15; byte q of them k 2q, 2q+1 and k 2q+8, 2q+9. Byte q of `low`
 * holds the even two, of `high` the odd two. Word (q, j) of the output is low low high high of columns 2j and
 * 2j+1. */
void scalar_strip4(const uint8_t *source, ptrdiff_t column_stride, uint8_t *out, ptrdiff_t row_stride,
                   ptrdiff_t rows, int streaming)
{
    (void)streaming;
    for (ptrdiff_t r = 0; r < rows; r++) {
        uint32_t low[8], high[8], words[16];
        for (int m = 0; m < 8; m++) {
            uint32_t pair[2];
            memcpy(pair, source + m * column_stride + r * 8, 8);
            low[m] = (pair[0] & 0x0f0f0f0fu) | ((pair[1] << 4) & 0xf0f0f0f0u);
            high[m] = ((pair[0] >> 4) & 0x0f0f0f0fu) | (pair[1] & 0xf0f0f0f0u);
        }
        for (int q = 0; q < 4; q++)
            for (int j = 0; j < 4; j++)
                words[4 * q + j] = move_byte(low[2 * j], q, 0) | move_byte(low[2 * j + 1], q, 1) |
                                   move_byte(high[2 * j], q, 2) | move_byte(high[2 * j + 1], q, 3);
        memcpy(out + r * row_stride, words, 64);
    }
}

/* Word (q, m) of the output: k 2q, 2q+8, 2q+1, 2q+9 of column m. */
void scalar_strip8(const uint8_t *source, ptrdiff_t column_stride, uint8_t *out, ptrdiff_t row_stride,
                   ptrdiff_t rows, int streaming)
{
    (void)streaming;
    for (ptrdiff_t r = 0; r < rows; r++) {
        uint8_t bytes[128];
        for (int m = 0; m < 8; m++) {
            const uint8_t *k = source + m * column_stride + r * 16;
            for (int q = 0; q < 4; q++) {
                uint8_t *word = bytes + 32 * q + 4 * m;
                word[0] = k[2 * q];
                word[1] = k[2 * q + 8];
                word[2] = k[2 * q + 1];
                word[3] = k[2 * q + 9];
            }
        }
        memcpy(out + r * row_stride, bytes, 128);
    }
}
