/* Strips in vector registers: included once per instruction set. All work happens within 16-byte lanes, and
 * the lanes of a vector hold different rows, so the text is the same for every width.
 *
 * ZIP_LOW<n>(a, b) interleaves the low halves of a's and b's lanes in units of n bits, ZIP_HIGH<n> the high
 * halves.
 *
 * The includer defines
 *     STRIP4, STRIP8           the two functions to be made
 *     TAIL4, TAIL8             the functions for rows that do not fill a vector
 *     TARGET                   attribute of functions that use the instruction set
 *     VECTOR, LANES, LOAD      the register, its number of 16-byte lanes, an unaligned load
 *     ZIP_LOW8 .. ZIP_HIGH64, AND, XOR, SHIFT_LEFT4, SHIFT_RIGHT4 (of units of 8 or 16 bits), HIGH_NIBBLES
 *     store_lines(p, stride, streaming, a, b, c, d)    lane i of a, b, c, d to the 64 bytes at p + i*stride
 */

/* Four vectors of dwords w[i] = (i,0) (i,1) (i,2) (i,3) to w[i] = (0,i) (1,i) (2,i) (3,i), in every lane. */
TARGET ALWAYS_INLINE void transpose(VECTOR w[4])
{
    VECTOR a = ZIP_LOW32(w[0], w[1]), b = ZIP_LOW32(w[2], w[3]);
    VECTOR c = ZIP_HIGH32(w[0], w[1]), d = ZIP_HIGH32(w[2], w[3]);
    w[0] = ZIP_LOW64(a, b);
    w[1] = ZIP_HIGH64(a, b);
    w[2] = ZIP_LOW64(c, d);
    w[3] = ZIP_HIGH64(c, d);
}

/* 4 bits, 2*LANES rows. A lane of a column holds two rows, of each two words a and b (k 0..7 and 8..15):
 *
 *     load            a0 a1 a2 a3 b0 b1 b2 b3 | the next row      one vector per column m
 *     zip bytes       a0 a0' a1 a1' .. a3 a3' b0 b0' .. b3 b3'    one row of columns m = 2j, 2j+1
 *     zip 8 bytes     a's of j, j+1  and  b's of j, j+1
 *     swap nibbles    even k's (low nibble a's, high b's)  and  odd k's
 *     zip 2 bytes     even even' odd odd' of q = 0..3             the output words of one j
 *     transpose       j = 0..3                                    the output words of one q
 */
TARGET ALWAYS_INLINE void rows4(const uint8_t *source, ptrdiff_t column_stride, uint8_t *out,
                                ptrdiff_t row_stride, const int streaming)
{
    VECTOR v[8];
    for (int m = 0; m < 8; m++)
        v[m] = LOAD(source + m * column_stride);
    for (int second = 0; second < 2; second++) {
        VECTOR w[4];
        for (int m = 0; m < 8; m += 4) {
            VECTOR s = second ? ZIP_HIGH8(v[m], v[m + 1]) : ZIP_LOW8(v[m], v[m + 1]);
            VECTOR t = second ? ZIP_HIGH8(v[m + 2], v[m + 3]) : ZIP_LOW8(v[m + 2], v[m + 3]);
            VECTOR a = ZIP_LOW64(s, t), b = ZIP_HIGH64(s, t);
            VECTOR change = AND(XOR(a, SHIFT_LEFT4(b)), HIGH_NIBBLES);
            VECTOR even = XOR(a, change), odd = XOR(b, SHIFT_RIGHT4(change));
            w[m / 2] = ZIP_LOW16(even, odd);
            w[m / 2 + 1] = ZIP_HIGH16(even, odd);
        }
        transpose(w);
        store_lines(out + second * row_stride, 2 * row_stride, streaming, w[0], w[1], w[2], w[3]);
    }
}

/* 8 bits, LANES rows. A lane of a column holds one row, k 0..15; its two halves zipped are the output words
 * k 2q, 2q+8, 2q+1, 2q+9 of q = 0..3, which are transposed to the words of m = 0..3 and m = 4..7 for each q.
 */
TARGET ALWAYS_INLINE void rows8(const uint8_t *source, ptrdiff_t column_stride, uint8_t *out,
                                ptrdiff_t row_stride, const int streaming)
{
    VECTOR w[8];
    for (int m = 0; m < 8; m++) {
        VECTOR v = LOAD(source + m * column_stride);
        w[m] = ZIP_LOW8(v, ZIP_HIGH64(v, v));
    }
    transpose(w);
    transpose(w + 4);
    store_lines(out, row_stride, streaming, w[0], w[4], w[1], w[5]);
    store_lines(out + 64, row_stride, streaming, w[2], w[6], w[3], w[7]);
}

/* The rows that fill whole vectors; returns their number. */
TARGET ALWAYS_INLINE ptrdiff_t whole(const uint8_t *source, ptrdiff_t column_stride, uint8_t *out,
                                     ptrdiff_t row_stride, ptrdiff_t rows, const int streaming,
                                     const int bits)
{
    const ptrdiff_t step = bits == 4 ? 2 * LANES : LANES;
    ptrdiff_t row = 0;
    for (; row + step <= rows; row += step) {
        if (bits == 4)
            rows4(source + row * 8, column_stride, out + row * row_stride, row_stride, streaming);
        else
            rows8(source + row * 16, column_stride, out + row * row_stride, row_stride, streaming);
    }
    return row;
}

TARGET void STRIP4(const uint8_t *source, ptrdiff_t column_stride, uint8_t *out, ptrdiff_t row_stride,
                   ptrdiff_t rows, int streaming)
{
    /* Two calls, so that `streaming` is a constant in each loop. */
    ptrdiff_t done = streaming ? whole(source, column_stride, out, row_stride, rows, 1, 4)
                               : whole(source, column_stride, out, row_stride, rows, 0, 4);
    if (done < rows)
        TAIL4(source + done * 8, column_stride, out + done * row_stride, row_stride, rows - done, streaming);
}

TARGET void STRIP8(const uint8_t *source, ptrdiff_t column_stride, uint8_t *out, ptrdiff_t row_stride,
                   ptrdiff_t rows, int streaming)
{
    ptrdiff_t done = streaming ? whole(source, column_stride, out, row_stride, rows, 1, 8)
                               : whole(source, column_stride, out, row_stride, rows, 0, 8);
    if (done < rows)
        TAIL8(source + done * 16, column_stride, out + done * row_stride, row_stride, rows - done, streaming);
}
