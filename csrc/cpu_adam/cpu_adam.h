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
// [Note: bf16 split]
// A bf16 parameter `hi` and a signed 16-bit remainder `lo` hold an fp32 master weight exactly:
//     hi = (bits + 0x8000) >> 16,  lo = int16(bits & 0xFFFF),  bits = (hi << 16) + lo   (all modulo 2^32)
// `hi` is the master rounded to the nearest bf16, ties away from zero. The join is exact for all 2^32
// patterns.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offloadzero::cpu_adam {

enum class DType : int { BF16 = 0, FP16 = 1, FP32 = 2 };
constexpr int NUM_DTYPES = 3;

enum class Layout : int {
    BF16_SPLIT = 0,   // bf16 parameter, int16 remainder: see [Note: bf16 split]
    FP32 = 1,         // fp32 parameter, no master
    FP16_MASTER = 2,  // fp16 parameter (round to nearest even), fp32 master
    BF16_MASTER = 3,  // bf16 parameter (round to nearest even), fp32 master
};
constexpr int NUM_LAYOUTS = 4;

enum class Isa : int { SCALAR = 0, AVX2 = 1, AVX512 = 2 };
constexpr int NUM_ISAS = 3;

// Names as in [Note: Adam arithmetic].
struct AdamScalars {
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

bool isa_supported(Isa isa);

int adam_step(const AdamBuffers& buffers, Layout layout, DType grad_dtype, const AdamScalars& scalars,
              size_t num_elements, Isa isa, int num_threads);

// Sum of squares in double. The order of the additions is fixed by the element index alone: blocks of
// SQ_NORM_BLOCK elements, each summed in SQ_NORM_LANES interleaved lanes, block sums added in index order.
// Squares of any finite input are finite in double, so the result is finite exactly when every element is.
constexpr size_t SQ_NORM_BLOCK = 4096;
constexpr size_t SQ_NORM_LANES = 16;
int sq_norm(const void* grad, DType dtype, size_t num_elements, Isa isa, int num_threads, double* result);

// acc = round_to_nearest_even(float(acc) + float(grad))
int accumulate(void* acc, DType acc_dtype, const void* grad, DType grad_dtype, size_t num_elements, Isa isa,
               int num_threads);

int split_master(const float* master, uint16_t* param, int16_t* remainder, size_t num_elements, Isa isa,
                 int num_threads);
int join_master(const uint16_t* param, const int16_t* remainder, float* master, size_t num_elements, Isa isa,
                int num_threads);

// memcpy, cut into one contiguous range per thread.
int copy_bytes(void* dst, const void* src, size_t num_bytes, int num_threads);

// Checks split and join against the written rule for all 2^32 patterns; `num_mismatches` counts failures.
int split_join_exhaustive(Isa isa, int num_threads, uint64_t* num_mismatches);

}  // namespace offloadzero::cpu_adam
