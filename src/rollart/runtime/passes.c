/* What a model computes between its matrix products, forward and backward, each in one pass over memory.
 *
 * Everything is float32, rows lie one behind the other. Sums over many rows are taken in parts of SUMMED rows, whose sums are
 * then added: the error grows with the parts, not with the rows. Of attention: `trainer/attention_passes.c`. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "exponential.h"
#include "largest.h"

#define SUMMED 64

/* out = x / rms(x) * weight, scale = 1 / rms(x) or not told where it is null; x is (rows, width). */
void norm_forward(const float *x, const float *weight, float *out, float *scale, float eps, int64_t rows, int64_t width) {
    for (int64_t i = 0; i < rows; i++) {
        const float *in = x + i * width;
        float *to = out + i * width, squares = 0.0f;
        for (int64_t j = 0; j < width; j++) squares += in[j] * in[j];
        const float s = 1.0f / sqrtf(squares / (float)width + eps);
        if (scale) scale[i] = s;
        for (int64_t j = 0; j < width; j++) to[j] = in[j] * s * weight[j];
    }
}

/* out = d loss / d x + the gradient that comes past the norm (`past`, or none where it is null); by_weight (width,) adds up
 * d loss / d weight, or is null. `sums` is scratch of (width,). */
void norm_backward(const float *grad, const float *x, const float *weight, const float *scale, const float *past, float *out,
    float *by_weight, float *sums, int64_t rows, int64_t width) {
    for (int64_t begin = 0; begin < rows; begin += SUMMED) {
        const int64_t end = begin + SUMMED < rows ? begin + SUMMED : rows;
        memset(sums, 0, sizeof(float) * width);
        for (int64_t i = begin; i < end; i++) {
            const float *g = grad + i * width, *in = x + i * width, s = scale[i];
            float along = 0.0f;
            for (int64_t j = 0; j < width; j++) {
                const float product = g[j] * in[j];
                along += product * weight[j];
                sums[j] += product * s;
            }
            if (!out) continue;
            float *to = out + i * width;
            const float back = along * s * s * s / (float)width;
            if (past)
                for (int64_t j = 0; j < width; j++) to[j] = past[i * width + j] + (g[j] * weight[j] * s - in[j] * back);
            else
                for (int64_t j = 0; j < width; j++) to[j] = g[j] * weight[j] * s - in[j] * back;
        }
        if (by_weight)
            for (int64_t j = 0; j < width; j++) by_weight[j] += sums[j];
    }
}

static inline float sigmoid(float x) {
    const float small = exp_negative(-fabsf(x)), share = 1.0f / (1.0f + small);
    return x < 0.0f ? small * share : share;
}

/* out = silu(gate) * up for rows of (gate, up), `width` numbers each. */
void gate_forward(const float *both, float *out, int64_t rows, int64_t width) {
    for (int64_t i = 0; i < rows; i++) {
        const float *gate = both + 2 * i * width, *up = gate + width;
        float *to = out + i * width;
        for (int64_t j = 0; j < width; j++) to[j] = gate[j] * sigmoid(gate[j]) * up[j];
    }
}

/* by_both = d loss / d (gate, up). */
void gate_backward(const float *both, const float *grad, float *by_both, int64_t rows, int64_t width) {
    for (int64_t i = 0; i < rows; i++) {
        const float *gate = both + 2 * i * width, *up = gate + width, *g = grad + i * width;
        float *by_gate = by_both + 2 * i * width, *by_up = by_gate + width;
        for (int64_t j = 0; j < width; j++) {
            const float share = sigmoid(gate[j]), opened = gate[j] * share;
            by_gate[j] = g[j] * up[j] * (share + opened * (1.0f - share));
            by_up[j] = g[j] * opened;
        }
    }
}

/* Log-softmax of (rows, vocabulary) logits times `factor` at the targets, and the logarithm that normalises each row. Returns
 * the entropy summed over rows. */
double target_forward(const float *logits, const int64_t *targets, float *logprobs, float *log_norms, float factor,
    int64_t rows, int64_t vocabulary) {
    double entropy = 0.0;
    for (int64_t i = 0; i < rows; i++) {
        const float *row = logits + i * vocabulary, top = largest(row, vocabulary);
        float sum = 0.0f, weighted = 0.0f;
        for (int64_t j = 0; j < vocabulary; j++) {
            const float below = (row[j] - top) * factor, share = exp_negative(below);
            sum += share;
            weighted += share * below;
        }
        const float log_sum = logf(sum);
        logprobs[i] = (row[targets[i]] - top) * factor - log_sum;
        log_norms[i] = top * factor + log_sum;
        entropy += (double)(log_sum - weighted / sum);
    }
    return entropy;
}

/* Logits become the gradient of the logits, given that of the log-probabilities. */
void target_backward(float *logits, const int64_t *targets, const float *grad, const float *log_norms, float factor,
    int64_t rows, int64_t vocabulary) {
    for (int64_t i = 0; i < rows; i++) {
        float *row = logits + i * vocabulary;
        const float scaled = grad[i] * factor, log_norm = log_norms[i];
        for (int64_t j = 0; j < vocabulary; j++) {
            const float above = row[j] * factor - log_norm;
            row[j] = -scaled * exp_negative(above > 0.0f ? 0.0f : above);
        }
        row[targets[i]] += scaled;
    }
}
