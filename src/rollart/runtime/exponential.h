/* The exponential of float32, in steps that compilers make vector instructions of. */

#ifndef ROLLART_EXPONENTIAL_H
#define ROLLART_EXPONENTIAL_H

#include <stdint.h>
#include <string.h>

/* x - n ln 2 in two parts. FLAGS let the compiler join them into one rounded product, but not through fused steps. */
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
static inline float reduced(float x, float n) {
    return __builtin_fmaf(n, 2.12194440e-4f, __builtin_fmaf(n, -0.693359375f, x));
}
#else
static inline float reduced(float x, float n) { return x - n * 0.693359375f + n * 2.12194440e-4f; }
#endif

/* exp(x) for x <= 0 (Cephes' polynomial); 0 below -87. Relative error below 1e-7; on CPUs without fused multiply-add it rises
 * with -x, to 4e-6 at -87. */
static inline float exp_negative(float x) {
    float low = x < -87.0f ? -87.0f : x;
    float n = __builtin_rintf(low * 1.44269504088896341f);
    float r = reduced(low, n);
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return x < -87.0f ? 0.0f : p * power;
}

#endif
