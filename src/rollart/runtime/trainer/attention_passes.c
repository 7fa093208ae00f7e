/* Causal attention of packed sequences, forward and backward, with the rotation of queries and keys to their places.
 *
 * A sequence reads its first `shared` tokens from `lead` on and the others from `own` on, so that sequences that begin alike
 * have one copy of what they begin with. Its queries are some of its tokens, in the order of their places; each looks at the
 * tokens up to its own. Keys and values of a sequence are laid out once a head; queries come in tiles, whose scores lie token
 * by token, so that all queries of a tile are exponentiated side by side; backward makes them again from the logarithms of
 * their sums. All products are of ROWS x CHUNK numbers kept in registers. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "exponential.h"

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#if defined(__x86_64__) && !defined(__AVX512F__)
#define ROWS 4 /* sixteen registers */
#else
#define ROWS 8
#endif
#define CHUNK (2 * LANES)
#define TILE 32
#define INLINE static inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct {
    const float *queries, *keys, *values, *cos, *sin;
    float *out, *log_sums;
    const float *grad_out;                        /* backward only, as the three below */
    float *grad_queries, *grad_keys, *grad_values;
    const int64_t *lead, *shared, *own, *begins;  /* by sequence; `begins` of its queries, and where the last one's end */
    const int64_t *asked, *places;                /* by query: its row, and its place in the sequence */
    int64_t sequences, heads, kv_heads, size;
    int64_t query_stride, key_stride, value_stride; /* of rows; gradients have the same */
    float scale;
} Attention;

typedef struct {
    int64_t padded;                                      /* numbers that a head has here */
    float *keys, *values, *grad_keys, *grad_values;      /* (tokens, padded) of one sequence and head */
    float *queries, *asked, *mixed;                      /* (TILE, padded) */
    float *queries_across, *asked_across;                /* (padded, TILE) */
    float *scores, *grads;                               /* (tokens, TILE) */
} Scratch;

INLINE int64_t up_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* c (ROWS, CHUNK) = or += the sum over k < n of a[r, k] * b[k, :]. */
INLINE void product(const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_step, float *c, int64_t c_row,
    int64_t n, int adds) {
    Vector sums[ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        sums[r][0] = adds ? *(const Vector *)(c + r * c_row) : (Vector){0};
        sums[r][1] = adds ? *(const Vector *)(c + r * c_row + LANES) : (Vector){0};
    }
    for (int64_t k = 0; k < n; k++) {
        const Vector left = *(const Vector *)(b + k * b_step), right = *(const Vector *)(b + k * b_step + LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const float factor = a[r * a_row + k * a_step];
            sums[r][0] += left * factor;
            sums[r][1] += right * factor;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        *(Vector *)(c + r * c_row) = sums[r][0];
        *(Vector *)(c + r * c_row + LANES) = sums[r][1];
    }
}

INLINE int64_t token_of(const Attention *of, int64_t sequence, int64_t place) {
    const int64_t shared = of->shared[sequence];
    return place < shared ? of->lead[sequence] + place : of->own[sequence] + place - shared;
}

/* to = from, turned by the angles of a token (direction 1) or back (-1), times a factor. The halves of a head turn together. */
INLINE void turned(const Attention *of, int64_t token, const float *from, float *to, float direction, float factor) {
    const int64_t half = of->size / 2;
    const float *cos = of->cos + token * of->size, *sin = of->sin + token * of->size;
    for (int64_t d = 0; d < half; d++) {
        const float c = cos[d] * factor, s = sin[d] * factor * direction, left = from[d], right = from[half + d];
        to[d] = left * c - right * s;
        to[half + d] = right * c + left * s;
    }
}

/* Keys and values of the first n tokens. */
INLINE void lay_out(const Attention *of, const Scratch *at, int64_t sequence, int64_t head, int64_t n, int backward) {
    const int64_t size = of->size, padded = at->padded;
    for (int64_t j = 0; j < n; j++) {
        const int64_t token = token_of(of, sequence, j);
        turned(of, token, of->keys + token * of->key_stride + head * size, at->keys + j * padded, 1.0f, 1.0f);
        memcpy(at->values + j * padded, of->values + token * of->value_stride + head * size, sizeof(float) * size);
    }
    if (!backward) return;
    memset(at->grad_keys, 0, sizeof(float) * up_to(n, ROWS) * padded);
    memset(at->grad_values, 0, sizeof(float) * up_to(n, ROWS) * padded);
}

INLINE void laid_across(const Scratch *at, const float *rows, float *across, const int64_t size) {
    for (int64_t d = 0; d < size; d++)
        for (int64_t i = 0; i < TILE; i++) across[d * TILE + i] = rows[i * at->padded + d];
}

/* Each of `tokens` rows times each row of a tile: (tokens, TILE). */
INLINE void scored(const Scratch *at, const float *rows, const float *across, float *scores, int64_t tokens, int64_t size) {
    for (int64_t j = 0; j < tokens; j += ROWS)
        for (int64_t i = 0; i < TILE; i += CHUNK)
            product(rows + j * at->padded, at->padded, 1, across + i, TILE, scores + j * TILE + i, TILE, size, 0);
}

/* (TILE, padded) = the sum of rows weighted by scores, as far as the last of ROWS queries looks. */
INLINE void mixed(const Scratch *at, const float *scores, const float *rows, float *out, const int64_t *places, int64_t n) {
    for (int64_t r = 0; r < n; r += ROWS) {
        const int64_t reach = places[(r + ROWS < n ? r + ROWS : n) - 1] + 1;
        for (int64_t d = 0; d < at->padded; d += CHUNK)
            product(scores + r, 1, TILE, rows + d, at->padded, out + r * at->padded + d, at->padded, reach, 0);
    }
}

/* (tokens, padded) += the queries' rows weighted by scores, for each token those that look at it or at one of its ROWS. */
INLINE void spread(const Scratch *at, const float *scores, const float *rows, float *out, const int64_t *places, int64_t n) {
    int64_t first = 0;
    for (int64_t j = 0; j <= places[n - 1]; j += ROWS) {
        while (places[first] < j) first++;
        for (int64_t d = 0; d < at->padded; d += CHUNK)
            product(scores + j * TILE + first, TILE, 1, rows + first * at->padded + d, at->padded,
                out + j * at->padded + d, at->padded, n - first, 1);
    }
}

/* Scores that a query does not look at count for nothing. */
INLINE void masked(float *scores, const int64_t *places, int64_t n, int64_t tokens) {
    int32_t ends[TILE];
    for (int64_t i = 0; i < TILE; i++) ends[i] = (int32_t)places[i < n ? i : n - 1];
    for (int32_t j = (int32_t)places[0] + 1; j < tokens; j++)
        for (int64_t i = 0; i < TILE; i++) scores[j * TILE + i] = j > ends[i] ? -INFINITY : scores[j * TILE + i];
}

/* A token's scores of all queries, and the sums that they go into. */
INLINE void exponentiated(float *restrict scores, const float *restrict top, float *restrict sum) {
    for (int64_t i = 0; i < TILE; i++) scores[i] = exp_negative(scores[i] - top[i]);
    for (int64_t i = 0; i < TILE; i++) sum[i] += scores[i];
}

INLINE void attended(const Attention *of, const Scratch *at, int64_t head, const int64_t *asked, const int64_t *places,
    int64_t n) {
    const int64_t tokens = up_to(places[n - 1] + 1, ROWS);
    float top[TILE], sum[TILE] = {0};
    scored(at, at->keys, at->queries_across, at->scores, tokens, of->size);
    masked(at->scores, places, n, tokens);
    for (int64_t i = 0; i < TILE; i++) top[i] = at->scores[i];
    for (int64_t j = 1; j < tokens; j++)
        for (int64_t i = 0; i < TILE; i++) top[i] = at->scores[j * TILE + i] > top[i] ? at->scores[j * TILE + i] : top[i];
    for (int64_t j = 0; j < tokens; j++)
        exponentiated(at->scores + j * TILE, top, sum);
    mixed(at, at->scores, at->values, at->mixed, places, n);
    for (int64_t i = 0; i < n; i++) {
        float *to = of->out + (asked[i] * of->heads + head) * of->size;
        const float share = 1.0f / sum[i];
        of->log_sums[asked[i] * of->heads + head] = top[i] + logf(sum[i]);
        for (int64_t d = 0; d < of->size; d++) to[d] = at->mixed[i * at->padded + d] * share;
    }
}

INLINE void attended_back(const Attention *of, const Scratch *at, int64_t head, const int64_t *asked, const int64_t *places,
    const int64_t *rotated, int64_t n) {
    const int64_t size = of->size, padded = at->padded, tokens = up_to(places[n - 1] + 1, ROWS);
    float log_sums[TILE] = {0}, along[TILE] = {0};
    for (int64_t i = 0; i < n; i++) {
        const int64_t from = (asked[i] * of->heads + head) * size;
        float sum = 0.0f;
        for (int64_t d = 0; d < size; d++) {
            at->asked[i * padded + d] = of->grad_out[from + d];
            sum += of->grad_out[from + d] * of->out[from + d];
        }
        along[i] = sum;
        log_sums[i] = of->log_sums[asked[i] * of->heads + head];
    }
    laid_across(at, at->asked, at->asked_across, size);
    scored(at, at->keys, at->queries_across, at->scores, tokens, size);
    scored(at, at->values, at->asked_across, at->grads, tokens, size);
    masked(at->scores, places, n, tokens);
    for (int64_t j = 0; j < tokens; j++)
        for (int64_t i = 0; i < TILE; i++) {
            const float above = at->scores[j * TILE + i] - log_sums[i];
            const float share = exp_negative(above > 0.0f ? 0.0f : above); /* at most 1: what rounding adds is cut */
            at->scores[j * TILE + i] = share;
            at->grads[j * TILE + i] = share * (at->grads[j * TILE + i] - along[i]);
        }
    spread(at, at->scores, at->asked, at->grad_values, places, n);
    spread(at, at->grads, at->queries, at->grad_keys, places, n);
    mixed(at, at->grads, at->keys, at->mixed, places, n);
    for (int64_t i = 0; i < n; i++)
        turned(of, rotated[i], at->mixed + i * padded, of->grad_queries + asked[i] * of->query_stride + head * size, -1.0f,
            of->scale);
}

INLINE void add_back(const Attention *of, const Scratch *at, int64_t sequence, int64_t head, int64_t n) {
    for (int64_t j = 0; j < n; j++) {
        const int64_t token = token_of(of, sequence, j);
        float *by_key = of->grad_keys + token * of->key_stride + head * of->size, *back = at->mixed;
        float *by_value = of->grad_values + token * of->value_stride + head * of->size;
        turned(of, token, at->grad_keys + j * at->padded, back, -1.0f, 1.0f);
        for (int64_t d = 0; d < of->size; d++) {
            by_key[d] += back[d];
            by_value[d] += at->grad_values[j * at->padded + d];
        }
    }
}

INLINE void head_of(const Attention *of, const Scratch *at, int64_t sequence, int64_t kv_head, int64_t n, int backward) {
    const int64_t begin = of->begins[sequence], count = of->begins[sequence + 1] - begin;
    const int64_t groups = of->heads / of->kv_heads;
    const int64_t *asked = of->asked + begin, *places = of->places + begin;
    int64_t rotated[TILE];
    lay_out(of, at, sequence, kv_head, n, backward);
    for (int64_t head = kv_head * groups; head < (kv_head + 1) * groups; head++)
        for (int64_t first = 0; first < count; first += TILE) {
            const int64_t tile = count - first < TILE ? count - first : TILE;
            for (int64_t i = 0; i < tile; i++) {
                rotated[i] = token_of(of, sequence, places[first + i]);
                turned(of, rotated[i], of->queries + asked[first + i] * of->query_stride + head * of->size,
                    at->queries + i * at->padded, 1.0f, of->scale);
            }
            laid_across(at, at->queries, at->queries_across, of->size);
            if (backward)
                attended_back(of, at, head, asked + first, places + first, rotated, tile);
            else
                attended(of, at, head, asked + first, places + first, tile);
        }
    if (backward) add_back(of, at, sequence, kv_head, n);
}

INLINE void heads(const Attention *of, const Scratch *at, int64_t begin, int64_t end, int backward) {
    for (int64_t sequence = 0; sequence < of->sequences; sequence++) {
        const int64_t stop = of->begins[sequence + 1];
        if (stop == of->begins[sequence]) continue;
        for (int64_t kv_head = begin; kv_head < end; kv_head++)
            head_of(of, at, sequence, kv_head, of->places[stop - 1] + 1, backward);
    }
}

/* Zeros: what pads a row of a head is never written, and what pads a tile or a sequence is a number. */
static float *scratch(Scratch *at, int64_t size, int64_t longest) {
    const int64_t padded = up_to(size, CHUNK), tokens = up_to(longest, ROWS);
    float *all = calloc(4 * tokens * padded + 5 * TILE * padded + 2 * TILE * tokens, sizeof(float));
    if (!all) return 0;
    at->padded = padded;
    at->keys = all;
    at->values = at->keys + tokens * padded;
    at->grad_keys = at->values + tokens * padded;
    at->grad_values = at->grad_keys + tokens * padded;
    at->queries = at->grad_values + tokens * padded;
    at->asked = at->queries + TILE * padded;
    at->mixed = at->asked + TILE * padded;
    at->queries_across = at->mixed + TILE * padded;
    at->asked_across = at->queries_across + TILE * padded;
    at->scores = at->asked_across + TILE * padded;
    at->grads = at->scores + TILE * tokens;
    return all;
}

INLINE int run(const Attention *given, int64_t longest, int64_t begin, int64_t end, int backward) {
    Scratch made;
    float *all = scratch(&made, given->size, longest);
    if (!all) return 1;
    Attention of = *given;
    Scratch at = made;
    switch (of.size) { /* loops over a head of known size are unrolled */
    case 32:
        of.size = 32;
        at.padded = up_to(32, CHUNK);
        heads(&of, &at, begin, end, backward);
        break;
    case 64:
        of.size = 64;
        at.padded = up_to(64, CHUNK);
        heads(&of, &at, begin, end, backward);
        break;
    default: heads(&of, &at, begin, end, backward);
    }
    free(all);
    return 0;
}

/* Heads `begin` to `end` of keys and values, of sequences of at most `longest` tokens. Returns 0, or 1 where memory is out. */
int attend_forward(const Attention *of, int64_t longest, int64_t begin, int64_t end) { return run(of, longest, begin, end, 0); }

/* The same of gradients; those of keys and values are added to what is there. */
int attend_backward(const Attention *of, int64_t longest, int64_t begin, int64_t end) { return run(of, longest, begin, end, 1); }
