// The optimizer kernels: Adam on the CPU in one pass over memory, and the small helpers around it.
//
// This core knows neither Python nor torch: callers hand over addresses and element counts. Functions return
// 0 or -errno.
//
// [Note: Adam arithmetic]
// Every element goes through the same sequence of IEEE-754 binary32 operations, each rounded to nearest even,
// in this order and with nothing fused:
//
//     g     = float(grad) * grad_scale
//     g     = g + (weight_decay * p)                      only L2 with weight_decay != 0
//     p     = p * decay                                   only decoupled; decay = 1 - lr * weight_decay
//     m     = (beta1 * m) + (one_minus_beta1 * g)
//     v     = (beta2 * v) + ((one_minus_beta2 * g) * g)
//     denom = (sqrt(v) * inv_sqrt_bias_correction2) + eps
//     p     = p - ((step_size * m) / denom)               step_size = lr / bias_correction1
//
// One square root and one division per element. The scalars are computed in double by the caller and rounded
// to binary32 once. Because no operation depends on a neighbour, the result is bitwise the same for every
// ISA, thread count, alignment and cut into sub-ranges, and separate elementwise operations on any IEEE
// device reproduce it. Three things would break that and are excluded: contraction to fused multiply-add
// (-ffp-contract=off; GCC's vector intrinsics are plain operators and would be fused too), the rsqrt/rcp
// approximations, and flush-to-zero modes (the control register is set to its default around every block).
// NaN payloads are the one thing not defined.
//
// [Note: compact state]
// 5 bytes per parameter and two fp32 scales per COMPACT_BLOCK elements (after FlashOptim, arXiv 2602.23349).
// The format is what decoding says:
//
//     master                                                   [Note: compact remainder] in remainders.h
//     m      = +-X(c) * scale_m                                8 bits: sign, then c of 7 bits
//              X(c) = 2 * ((1 + (c % 32) / 32) * 2^(c / 32) - 1)        0 to 29.5
//     v      = s * s, s = Y(k) * scale_s                       k = uint8 code
//              Y(k) = 2 * ((1 + (k % 128) / 128) * 2^(k / 128) - 1)     0 to 5.96875
//
// m: companded by segments of straight line, as telephony's 8 bits are (ITU-T G.711, mu-law): with
// x = |m| / (largest |m| of the block) in [0, 1], y = 1 + 14.75 x in [1, 15.75] is rounded to 5 bits of
// mantissa, and c is y's pattern from there up, less that of 1. No division and no table. In [2^e, 2^(e+1))
// the codes lie 2^e / 32 apart in y, so the error of x is at most 2^e / 944, up to rounding: 0.11 % of the
// largest magnitude below x = 0.068, 0.85 % above x = 0.47. The softsign 2x / (1 + x) of the paper has 0.2 %
// and 0.8 %, and costs a division each way.
//
// v: s = sqrt(v), and y = 1 + 2.984375 * s / (largest s of the block) in [1, 3.984375] is rounded to 7 bits
// of mantissa: the error of s is at most largest / 764 below a third of the largest and largest / 382 above.
// k is never below 1: a second moment must not vanish beside a first moment that does not, for the quotient
// of the two is the update; below largest / 382 s is enlarged to that.
//
// Writing what was read gives the same codes, where the scales are not 0. A block whose largest magnitude is
// below SMALLEST_SCALED = 2^-100 becomes zero (so no code is scaled by a subnormal; s is above 2^-75 for
// every v above 0).
//
// These are the errors of encoding. An update dithers the two codes first, [Note: dithered codes]; its error
// is below a whole code, twice the above.
//
// A block with a first moment that is not finite becomes NaN (its scale is, its codes are 0), its weights at
// the next step and those of such moments at once. A second moment that overflows keeps those of its block at
// infinity, so that nothing moves there: [Note: Adam arithmetic] does the same to the element.
//
// [Note: compact arithmetic]
// fma(a, b, c) is a * b + c rounded once; every other operation is rounded by itself. The same bits for every
// ISA, thread count, alignment and cut at block borders.
//
//     per call
//     grad_m = one_minus_beta1 * grad_scale                    only the factor with L2 and weight_decay != 0
//     grad_s = sqrt_one_minus_beta2 * grad_scale               likewise
//     root   = inv_sqrt_bias_correction2 / step_size           undivided if step_size < 2^-100
//     floor  = eps / step_size                                 infinity if step_size < 2^-100
//
//     per block
//     S      = beta1 * scale_m, R = sqrt_beta2 * scale_s
//
//     per element; F = +-(2 + X(c)), G = 2 + Y(k)
//     g      = float(grad)
//     g      = fma(weight_decay, p, g * grad_scale)            only L2 with weight_decay != 0
//     m      = fma(F, S, fma(g, grad_m, -copysign(2 * S, F)))
//     s      = fma(G, R, -(2 * R))
//     t      = g * grad_s
//     s      = sqrt(fma(s, s, t * t))
//     p      = fma(p, decay, -(m / fma(s, root, floor)))
//
//     per block
//     scale_m = (largest |m|) * (1 / 29.5)                     the constant is fp32; 0 below SMALLEST_SCALED
//     scale_s = (largest s) * (1 / 5.96875)                    likewise
//     inv_m   = 14.75 / max(largest |m|, SMALLEST_SCALED)
//     inv_s   = 2.984375 / max(largest s, SMALLEST_SCALED)
//
//     per element
//     y      = fma(m, inv_m, copysign(1, m))
//     c      = (bits(|y|) - bits(1) + dither_m) >> 18, with the sign of y
//     y      = fma(s, inv_s, 1)
//     k      = max(1, (bits(y) - bits(1) + dither_s) >> 16)
//
// The largest is that of the patterns as integers, so NaN is above infinity and infinity above all numbers.
// If the largest |m| is not finite, scale_m is NaN and every m of the block is encoded as 0; if the largest s
// is NaN, likewise; if it is infinity, it and every s counts as at most the largest fp32 number.
//
// [Note: dithered codes]
// Rounded to nearest after every step (dither_m = 2^17, dither_s = 2^15, as encoding fp32 moments does), a
// moment stops wherever a step moves it by less than half a code: with beta2 = 0.999 s decays by 0.05 % per
// step, which is that at every code, and m does so at the low ones. Rounding would be a bias that no later
// step makes up for. So a number below one code is added before the fraction is cut off (dither: Schuchman
// 1964; as stochastic rounding: Gupta et al. 2015, arXiv 1502.02551). It depends on nothing but the element's
// place e in its block and the step:
//
//     phase_m  = (bit_reverse(e) << 25) + step * 0x9E3779B9    e in 7 bits, all modulo 2^32; golden ratio
//     phase_s  = (e << 25) + step * 0x6A09E667                 square root of two
//     dither_m = ((phase_m >> 18) << 4) + 8                    in units of 2^-18 codes: 8 to 2^18 - 8
//     dither_s = ((phase_s >> 18) << 2) + 2                    in units of 2^-16 codes: 2 to 2^16 - 2
//
// Over the steps, those of one element are Weyl sequences (multiples modulo 1 of an irrational number that is
// badly approximable), whose averages converge like log(n) / n instead of random numbers' 1 / sqrt(n). The
// two numbers are independent over the rationals, and the pairs (bit_reverse(e), e) of a block are a
// Hammersley set: neither over steps nor over elements do the dithers of m and s go together. Neither dither
// reaches 0 or a whole code: the roundings of y, of one or two spacings of fp32, do not move the largest
// codes, nor those of m that did not change (of s, once in 16,384 steps).
//
// [Note: Lion and Adagrad arithmetic]
// As [Note: Adam arithmetic]: nothing fused, one rounding per operation, L2 and decay as there.
//
//     Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2)
//     u = (beta1 * m) + (one_minus_beta1 * g)
//     p = (p * decay) - (step_size * sign(u))                  sign(0) = 0, sign(NaN) = NaN
//     m = (beta2 * m) + (one_minus_beta2 * g)
//
//     Adagrad (Duchi et al. 2011), L2 only
//     v = v + (g * g)
//     p = p - ((step_size * g) / (sqrt(v) + eps))
//
// [Note: SGD arithmetic]
// Likewise, L2 only. Without momentum (beta2 is 0) u = g, and m is not looked at; else the scalars say which:
//
//     m = (beta1 * m) + (one_minus_beta1 * g)
//     u = (beta2 * m) + (one_minus_beta2 * g)
//     p = p - (step_size * u)
//
//                 beta1      one_minus_beta1                            beta2      one_minus_beta2
//     plain       momentum   1 - dampening, in the first step 1         1          0
//     Nesterov's  momentum   1                                          momentum   1
#pragma once

#include <cstddef>
#include <cstdint>

namespace offloadzero::cpu_adam {

enum class DType : int { BF16 = 0, FP16 = 1, FP32 = 2 };
constexpr int NUM_DTYPES = 3;

enum class Layout : int {
    BF16_SPLIT = 0,   // bf16 parameter, int16 remainder: see [Note: bf16 split] in remainders.h
    FP32 = 1,         // fp32 parameter, no master
    FP16_MASTER = 2,  // fp16 parameter (round to nearest even), fp32 master
    BF16_MASTER = 3,  // bf16 parameter (round to nearest even), fp32 master
};
constexpr int NUM_LAYOUTS = 4;

enum class Isa : int { SCALAR = 0, AVX2 = 1, AVX512 = 2 };
constexpr int NUM_ISAS = 3;

// Names as in [Note: Adam arithmetic].
struct StepScalars {
    float grad_scale;
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float eps;
    float step_size;
    float inv_sqrt_bias_correction2;
    float decay;
    float weight_decay;
    float sqrt_beta2;            // used by the compact state only,
    float sqrt_one_minus_beta2;  // and so is this
    bool decoupled;
};

// Addresses of the first elements, each aligned to its element's size; `master` is the int16 remainder, the
// fp32 master or null, as the layout says.
struct AdamBuffers {
    void* param;
    void* master;
    float* exp_avg;
    float* exp_avg_sq;
    const void* grad;
};

// The same for the optimizers with one moment: Lion's first, Adagrad's sum of squares, SGD's momentum.
struct MomentBuffers {
    void* param;
    void* master;
    float* moment;
    const void* grad;
};

// The three fp32 arrays whose values the compact state holds.
struct Fp32State {
    float* master;
    float* exp_avg;
    float* exp_avg_sq;
};

bool isa_supported(Isa isa);

int adam_step(const AdamBuffers& buffers, Layout layout, DType grad_dtype, const StepScalars& scalars,
              size_t num_elements, Isa isa, int num_threads);

// Sum of squares in double. The order of the additions is fixed by the element index alone: blocks of
// SQ_NORM_BLOCK elements, each summed in SQ_NORM_LANES interleaved lanes, block sums added in index order.
// Squares of any finite input are finite in double, so the result is finite exactly when every element is.
constexpr size_t SQ_NORM_BLOCK = 4096;
constexpr size_t SQ_NORM_LANES = 16;
int sq_norm(const void* grad, DType dtype, size_t num_elements, Isa isa, int num_threads, double* result);

// Elements [start, stop) of an array.
struct Part {
    size_t start;
    size_t stop;
};

// Writes the result of sq_norm() for each part of `grad` by itself.
int sq_norms(const void* grad, DType dtype, const Part* parts, size_t num_parts, Isa isa, int num_threads,
             double* results);

// Computes acc = round_to_nearest_even(float(acc) + float(grad)).
int accumulate(void* acc, DType acc_dtype, const void* grad, DType grad_dtype, size_t num_elements, Isa isa,
               int num_threads);

int split_master(const float* master, uint16_t* param, int16_t* remainder, size_t num_elements, Isa isa,
                 int num_threads);
int join_master(const uint16_t* param, const int16_t* remainder, float* master, size_t num_elements, Isa isa,
                int num_threads);

// The scales lie in pairs: scale_m, scale_s of block 0, of block 1, ... A block's elements start at a
// multiple of COMPACT_BLOCK from the first; the last block may be shorter.
constexpr size_t COMPACT_BLOCK = 128;

struct CompactBuffers {
    uint16_t* param;  // bf16
    int8_t* remainder;
    int8_t* exp_avg;
    uint8_t* exp_avg_sq;
    float* scales;
    const void* grad;  // unused by encode and decode
};

// `step`, modulo 2^32, is that of [Note: dithered codes].
int compact_adam_step(const CompactBuffers& buffers, DType grad_dtype, const StepScalars& scalars,
                      uint32_t step, size_t num_elements, Isa isa, int num_threads);
int compact_encode(const Fp32State& state, const CompactBuffers& buffers, size_t num_elements, Isa isa,
                   int num_threads);
int compact_decode(const CompactBuffers& buffers, const Fp32State& state, size_t num_elements, Isa isa,
                   int num_threads);

int lion_step(const MomentBuffers& buffers, Layout layout, DType grad_dtype, const StepScalars& scalars,
              size_t num_elements, Isa isa, int num_threads);
int adagrad_step(const MomentBuffers& buffers, Layout layout, DType grad_dtype, const StepScalars& scalars,
                 size_t num_elements, Isa isa, int num_threads);
int sgd_step(const MomentBuffers& buffers, Layout layout, DType grad_dtype, const StepScalars& scalars,
             size_t num_elements, Isa isa, int num_threads);

// Measures the memory's best rate: reads every array and writes `num_written` of them in place, all at the
// same pace, as the optimizers do and without their arithmetic. The arrays that are written come first;
// `num_elements` is a multiple of STREAM_CHUNK. `sink` receives a value of all bytes read.
constexpr size_t STREAM_CHUNK = 256;
constexpr size_t MAX_STREAM_ARRAYS = 8;
struct StreamArrays {
    void* address[MAX_STREAM_ARRAYS];
    size_t element_size[MAX_STREAM_ARRAYS];
    size_t num_arrays;
    size_t num_written;
    bool prefetch;
};
int stream(const StreamArrays& arrays, size_t num_elements, Isa isa, int num_threads, uint64_t* sink);

// Keeps the pool's workers on the CPUs whose bits are set (bit k of byte b: CPU 8 b + k). Returns 0 or
// -errno.
int set_cores(const unsigned char* mask, size_t num_bytes);

// A memcpy, cut into one contiguous range per thread.
int copy_bytes(void* dst, const void* src, size_t num_bytes, int num_threads);

// Checks split and join against the written rule for all 2^32 patterns; `num_mismatches` counts failures.
int split_join_exhaustive(Isa isa, int num_threads, uint64_t* num_mismatches);

}  // namespace offloadzero::cpu_adam
