/* The largest of many float32, in steps that compilers make vector instructions of. */

#ifndef ROLLART_LARGEST_H
#define ROLLART_LARGEST_H

#include <stdint.h>

#define WIDE 16

/* The largest of n numbers, or NaN where the first is one. */
static inline float largest(const float *x, int64_t n) {
    float tops[WIDE], top = x[0];
    for (int64_t l = 0; l < WIDE; l++) tops[l] = top;
    int64_t j = 0;
    for (; j + WIDE <= n; j += WIDE)
        for (int64_t l = 0; l < WIDE; l++) tops[l] = x[j + l] > tops[l] ? x[j + l] : tops[l];
    for (; j < n; j++) top = x[j] > top ? x[j] : top;
    for (int64_t l = 0; l < WIDE; l++) top = tops[l] > top ? tops[l] : top;
    return top;
}

#endif
