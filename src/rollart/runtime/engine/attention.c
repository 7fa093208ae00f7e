/* Attention of decoding rows over a slotted cache: one query position a row, each row over exactly its own length.
 *
 * The first `shared[i]` tokens of row i are read from the slot `lead[i]` and stay in the CPU's cache from one sibling to the
 * next. All sums are float32, whatever the cache holds. Memory is (slot, kv head, token, size), as in cache.py. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "exponential.h"

#define AHEAD 8 /* tokens: how far before their use keys are asked for; values are asked for while keys are read */

typedef struct {
    const int64_t *slots, *lead, *shared, *ends;
    int64_t kv_heads, sharing, capacity, query_stride, out_stride;
    float scale;
} Rows;

static inline float wide_f32(float x) { return x; }
static inline float narrow_f32(float x) { return x; }
static inline float wide_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}
static inline uint16_t narrow_bf16(float x) { /* to nearest, ties to even; NaN stays one */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* The largest first, then exponentials in its place, divided by their sum. A NaN among them makes all NaN. */
static inline void softmax(float *scores, int64_t n) {
    float top = scores[0], sum = 0.0f;
    for (int64_t t = 1; t < n; t++) top = scores[t] > top ? scores[t] : top;
    for (int64_t t = 0; t < n; t++) {
        scores[t] = exp_negative(scores[t] - top);
        sum += scores[t];
    }
    float share = 1.0f / sum;
    for (int64_t t = 0; t < n; t++) scores[t] *= share;
}

#define DEFINE(TYPE, T)                                                                                                  \
    static inline __attribute__((always_inline)) void scores_##TYPE(const float *query, const T *keys, const T *values,  \
        float *scores, int64_t from, int64_t to, int64_t sharing, int64_t capacity, const int64_t size) {                \
        for (int64_t t = from; t < to; t++) {                                                                            \
            const T *stored = keys + t * size;                                                                           \
            for (int64_t line = 0; line < size; line += 64 / (int64_t)sizeof(T)) {                                       \
                __builtin_prefetch(stored + AHEAD * size + line, 0, 3);                                                  \
                __builtin_prefetch(values + t * size + line, 0, 2);                                                      \
            }                                                                                                            \
            for (int64_t s = 0; s < sharing; s++) {                                                                      \
                float sum = 0.0f;                                                                                        \
                for (int64_t d = 0; d < size; d++) sum += query[s * size + d] * wide_##TYPE(stored[d]);                  \
                scores[s * capacity + t] = sum;                                                                          \
            }                                                                                                            \
        }                                                                                                                \
    }                                                                                                                    \
    static inline __attribute__((always_inline)) void mix_##TYPE(                                                        \
        float *mixed, const T *values, const float *scores, int64_t from, int64_t to, const int64_t size) {              \
        float sums[256];                                                                                                 \
        for (int64_t d = 0; d < size; d++) sums[d] = mixed[d];                                                           \
        for (int64_t t = from; t < to; t++)                                                                              \
            for (int64_t d = 0; d < size; d++) sums[d] += scores[t] * wide_##TYPE(values[t * size + d]);                 \
        for (int64_t d = 0; d < size; d++) mixed[d] = sums[d];                                                           \
    }                                                                                                                    \
    static inline __attribute__((always_inline)) void rows_##TYPE(const T *queries, const T *keys, const T *values,      \
        T *out, const Rows *of, int64_t begin, int64_t end, float *scratch, const int64_t size) {                        \
        const int64_t capacity = of->capacity, sharing = of->sharing;                                                    \
        float *query = scratch, *mixed = query + sharing * size, *scores = mixed + size;                                 \
        for (int64_t i = begin; i < end; i++)                                                                            \
            for (int64_t h = 0; h < of->kv_heads; h++) {                                                                 \
                const int64_t first = (of->lead[i] * of->kv_heads + h) * capacity * size;                                \
                const int64_t own = (of->slots[i] * of->kv_heads + h) * capacity * size;                                 \
                const int64_t shared = of->shared[i], n = of->ends[i];                                                   \
                const T *asked = queries + i * of->query_stride + h * sharing * size;                                    \
                T *answer = out + i * of->out_stride + h * sharing * size;                                               \
                for (int64_t d = 0; d < sharing * size; d++) query[d] = wide_##TYPE(asked[d]) * of->scale;               \
                scores_##TYPE(query, keys + first, values + first, scores, 0, shared, sharing, capacity, size);          \
                scores_##TYPE(query, keys + own, values + own, scores, shared, n, sharing, capacity, size);              \
                for (int64_t s = 0; s < sharing; s++) {                                                                  \
                    softmax(scores + s * capacity, n);                                                                   \
                    for (int64_t d = 0; d < size; d++) mixed[d] = 0.0f;                                                  \
                    mix_##TYPE(mixed, values + first, scores + s * capacity, 0, shared, size);                           \
                    mix_##TYPE(mixed, values + own, scores + s * capacity, shared, n, size);                             \
                    for (int64_t d = 0; d < size; d++) answer[s * size + d] = narrow_##TYPE(mixed[d]);                   \
                }                                                                                                        \
            }                                                                                                            \
    }                                                                                                                    \
    /* Rows `begin` to `end`; size is at most 256. Returns 0, or 1 where memory is out. */                              \
    int attend_##TYPE(const T *queries, const T *keys, const T *values, T *out, const Rows *of, int64_t begin,           \
        int64_t end, int64_t size) {                                                                                     \
        float *scratch = malloc(sizeof(float) * (of->sharing * (size + of->capacity) + size));                           \
        if (!scratch) return 1;                                                                                          \
        switch (size) {                                                                                                  \
        case 32: rows_##TYPE(queries, keys, values, out, of, begin, end, scratch, 32); break;                            \
        case 64: rows_##TYPE(queries, keys, values, out, of, begin, end, scratch, 64); break;                            \
        case 128: rows_##TYPE(queries, keys, values, out, of, begin, end, scratch, 128); break;                          \
        default: rows_##TYPE(queries, keys, values, out, of, begin, end, scratch, size);                                 \
        }                                                                                                                \
        free(scratch);                                                                                                   \
        return 0;                                                                                                        \
    }

DEFINE(f32, float)
DEFINE(bf16, uint16_t)
