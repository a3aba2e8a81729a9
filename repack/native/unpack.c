/* Marlin words back to packed words: the inverse of the strips, in plain C, by code of its own.
 *
 * Eight rows at a time: of each of 64 columns they are one cache line of `out` (4 bits), written whole while
 * the 512 (1024) source bytes of a row's 64 columns are read in the order of memory. One thread: those who
 * call it work on several layers at once. */
#include <string.h>

#include "native.h"

enum { ROWS = 8 };

static inline uint32_t byte_of(uint32_t word, int i)
{
    return (word >> (8 * i)) & 0xffu;
}

/* One row of a strip, 64 bytes: the two words of 8 columns, `column_stride` bytes apart. */
static inline void row4(const uint8_t *tile, uint8_t *out, ptrdiff_t column_stride)
{
    uint32_t words[16], low[8] = {0}, high[8] = {0};
    memcpy(words, tile, 64);
    for (int q = 0; q < 4; q++)
        for (int j = 0; j < 4; j++) {
            uint32_t word = words[4 * q + j];
            low[2 * j] |= byte_of(word, 0) << (8 * q);
            low[2 * j + 1] |= byte_of(word, 1) << (8 * q);
            high[2 * j] |= byte_of(word, 2) << (8 * q);
            high[2 * j + 1] |= byte_of(word, 3) << (8 * q);
        }
    for (int m = 0; m < 8; m++) {
        uint32_t pair[2] = {(low[m] & 0x0f0f0f0fu) | ((high[m] & 0x0f0f0f0fu) << 4),
                            ((low[m] >> 4) & 0x0f0f0f0fu) | (high[m] & 0xf0f0f0f0u)};
        memcpy(out + m * column_stride, pair, 8);
    }
}

/* One row of a strip, 128 bytes: the sixteen bytes of 8 columns. */
static inline void row8(const uint8_t *tile, uint8_t *out, ptrdiff_t column_stride)
{
    for (int m = 0; m < 8; m++) {
        uint8_t k[16];
        for (int q = 0; q < 4; q++) {
            const uint8_t *word = tile + 32 * q + 4 * m;
            k[2 * q] = word[0];
            k[2 * q + 8] = word[1];
            k[2 * q + 1] = word[2];
            k[2 * q + 9] = word[3];
        }
        memcpy(out + m * column_stride, k, 16);
    }
}

void unpack(const struct unpacking *job)
{
    ptrdiff_t tile = 16 * job->bits, piece = 2 * job->bits; /* bytes of a row of a strip, of a column in it */
    for (ptrdiff_t expert = 0; expert < job->experts; expert++) {
        const uint8_t *source = job->source + expert * job->source_expert_stride;
        uint8_t *out = job->out + expert * job->out_expert_stride;
        for (ptrdiff_t c = 0; c < job->columns / 64; c++)
            for (ptrdiff_t start = 0; start < job->rows; start += ROWS) {
                ptrdiff_t stop = start + ROWS < job->rows ? start + ROWS : job->rows;
                for (ptrdiff_t g = 0; g < 8; g++)
                    for (ptrdiff_t r = start; r < stop; r++) {
                        const uint8_t *from = source + r * job->source_row_stride + (8 * c + g) * tile;
                        uint8_t *to = out + (64 * c + g) * job->out_column_stride + r * piece;
                        if (job->bits == 4)
                            row4(from, to, 8 * job->out_column_stride);
                        else
                            row8(from, to, 8 * job->out_column_stride);
                    }
            }
    }
}
