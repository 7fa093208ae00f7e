/* One token for each row of float32 logits: the inverse of its distribution function at a uniform number.
 *
 * Masses are float32, their sums float64, so that rare tokens keep their share. Sums are taken over blocks of ids, then within
 * the block that holds the token. A row that is not finite gets a log-probability that is not. */

#include <math.h>
#include <stdint.h>

#include "exponential.h"
#include "largest.h"

#define LANES 8

static inline double sum_of(const float *masses, int64_t n) {
    double lanes[LANES] = {0.0}, sum = 0.0;
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES)
        for (int64_t l = 0; l < LANES; l++) lanes[l] += (double)masses[j + l];
    for (int64_t l = 0; l < LANES; l++) sum += lanes[l];
    for (; j < n; j++) sum += (double)masses[j];
    return sum;
}

/* (rows, vocabulary) logits and (rows,) uniforms in (0, 1) give ids and log-probabilities. `masses` is scratch of (vocabulary,),
 * `sums` of one number for each `block` ids of it. */
void draw_tokens(const float *logits, const double *uniform, int64_t *ids, float *logprobs, float *masses, double *sums,
    int64_t block, int64_t rows, int64_t vocabulary) {
    const int64_t blocks = (vocabulary + block - 1) / block;
    for (int64_t i = 0; i < rows; i++) {
        const float *row = logits + i * vocabulary, top = largest(row, vocabulary);
        for (int64_t j = 0; j < vocabulary; j++) masses[j] = exp_negative(row[j] - top);
        double total = 0.0;
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t left = vocabulary - b * block;
            sums[b] = sum_of(masses + b * block, left < block ? left : block);
            total += sums[b];
        }
        const double wanted = uniform[i] * total;
        double below = 0.0;
        int64_t b = 0;
        while (b < blocks - 1 && !(below + sums[b] > wanted)) below += sums[b++];
        while (b > 0 && sums[b] == 0.0) b--; /* where rounding leaves the sum a little short */
        const int64_t end = (b + 1) * block < vocabulary ? (b + 1) * block : vocabulary;
        int64_t found = b * block;
        for (int64_t j = found; j < end; j++) {
            if (masses[j] > 0.0f) found = j; /* the last that has a mass, for the same reason */
            below += (double)masses[j];
            if (below > wanted) break;
        }
        ids[i] = found;
        logprobs[i] = row[found] - top - (float)log(total);
    }
}
