/* From the heads of packed tokens to what attention reads: rotary embedding, keys and values to their places in the cache.
 *
 * Everything is float32. A token's heads lie one behind the other, first those that are turned (queries, then keys), then
 * values; the two numbers of a pair lie side by side. Any of the kinds may be missing. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    float *heads;           /* (n, stride); queries are turned in their place */
    const float *turns;     /* (positions, size / 2) pairs of cos and sin */
    const int64_t *at;      /* (n,) position of each token */
    const int64_t *write;   /* (n, kv_heads) rows of `keys` and `values` */
    float *keys, *values;   /* (rows, size) */
    const float *query_norm, *key_norm; /* (size,) weights, or null */
    int64_t stride, query_heads, kv_heads, size;
    float eps;
} Placed;

static inline __attribute__((always_inline)) void turn(
    const float *from, float *to, const float *by, const float *norm, float eps, const int64_t size) {
    float scale = 1.0f;
    if (norm) {
        float squares = 0.0f;
        for (int64_t d = 0; d < size; d++) squares += from[d] * from[d];
        scale = 1.0f / sqrtf(squares / (float)size + eps);
    }
    for (int64_t d = 0; d < size; d += 2) {
        float a = from[d], b = from[d + 1];
        if (norm) a *= scale * norm[d], b *= scale * norm[d + 1];
        to[d] = a * by[d] - b * by[d + 1];
        to[d + 1] = a * by[d + 1] + b * by[d];
    }
}

static inline __attribute__((always_inline)) void place(const Placed *of, int64_t begin, int64_t end, const int64_t size) {
    for (int64_t i = begin; i < end; i++) {
        const float *by = of->turns + of->at[i] * size;
        float *head = of->heads + i * of->stride;
        for (int64_t h = 0; h < of->query_heads; h++, head += size) turn(head, head, by, of->query_norm, of->eps, size);
        const int64_t *rows = of->write + i * of->kv_heads;
        for (int64_t h = 0; h < of->kv_heads; h++, head += size)
            turn(head, of->keys + rows[h] * size, by, of->key_norm, of->eps, size);
        for (int64_t h = 0; h < of->kv_heads; h++, head += size)
            memcpy(of->values + rows[h] * size, head, sizeof(float) * size);
    }
}

/* Tokens `begin` to `end`. */
void place_heads(const Placed *of, int64_t begin, int64_t end) {
    switch (of->size) {
    case 32: place(of, begin, end, 32); break;
    case 64: place(of, begin, end, 64); break;
    case 128: place(of, begin, end, 128); break;
    default: place(of, begin, end, of->size);
    }
}
