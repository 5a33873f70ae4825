// Cuts each call into blocks, and runs them on the pool.
#include "cpu_adam.h"

#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernel_table.h"
#include "thread_pool.h"

namespace offloadzero::cpu_adam {
namespace {

// Blocks of elementwise work, in elements. Long ones keep the hardware's prefetchers running; several per
// thread keep a thread that loses its core to the host program from holding up the call. The cut never shows
// in a result.
constexpr size_t MIN_BLOCK = 16384;
constexpr size_t MAX_BLOCK = 262144;
constexpr size_t BLOCKS_PER_THREAD = 8;
// Below this, waking a worker costs more than it saves.
constexpr size_t MIN_PARALLEL = 2 * MIN_BLOCK;
// One range of a parallel copy is never smaller than this.
constexpr size_t MIN_COPY_BYTES = size_t{1} << 20;
constexpr size_t PAGE_BYTES = 4096;

size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

#if defined(__aarch64__)
uint64_t float_mode() {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
void set_float_mode(uint64_t mode) { __asm__ volatile("msr fpcr, %0" ::"r"(mode) : "memory"); }
constexpr uint64_t DEFAULT_FLOAT_MODE = 0;
#elif defined(__x86_64__)
unsigned float_mode() { return _mm_getcsr(); }
void set_float_mode(unsigned mode) { _mm_setcsr(mode); }
constexpr unsigned DEFAULT_FLOAT_MODE = 0x1F80;
#else
#error "the floating-point mode of this architecture is not known"
#endif

// Round to nearest, subnormals kept, whatever the host program has set for this thread
// (torch.set_flush_denormal, for one): [Note: Adam arithmetic].
class DefaultFloatMode {
  public:
    DefaultFloatMode() : saved_(float_mode()) { set_float_mode(DEFAULT_FLOAT_MODE); }
    ~DefaultFloatMode() { set_float_mode(saved_); }
    DefaultFloatMode(const DefaultFloatMode&) = delete;
    DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

  private:
    decltype(float_mode()) saved_;
};

size_t block_size(size_t num_elements, int num_threads) {
    const size_t share = num_elements / (static_cast<size_t>(num_threads) * BLOCKS_PER_THREAD);
    const size_t block = share / MIN_BLOCK * MIN_BLOCK;
    return block < MIN_BLOCK ? MIN_BLOCK : block > MAX_BLOCK ? MAX_BLOCK : block;
}

// Calls range(begin, end) over [0, num_elements); every begin is a multiple of MIN_BLOCK.
template <class Range>
void for_ranges(size_t num_elements, int num_threads, const Range& range) {
    const int threads = num_elements < MIN_PARALLEL || num_threads < 1 ? 1 : num_threads;
    const size_t size = block_size(num_elements, threads);
    const auto block = [&](size_t index) {
        const size_t begin = index * size;
        const size_t end = num_elements - begin < size ? num_elements : begin + size;
        DefaultFloatMode mode;
        range(begin, end);
    };
    ThreadPool::instance().parallel_for(ceil_div(num_elements, size), threads, block);
}

bool has_l2(const StepScalars& scalars) { return !scalars.decoupled && scalars.weight_decay != 0.0f; }

uint32_t bit_reverse7(uint32_t x) {
    uint32_t reversed = 0;
    for (int bit = 0; bit < 7; ++bit) reversed |= (x >> bit & 1u) << (6 - bit);
    return reversed;
}

Dither make_dither(const KernelTable& kernels, uint32_t step) {
    static_assert(COMPACT_BLOCK == 128, "an element's place has 7 bits");
    Dither dither;
    for (uint32_t slot = 0; slot < COMPACT_BLOCK; ++slot) {
        const auto e = static_cast<uint32_t>(kernels.compact_element(slot));
        const uint32_t phase_m = (bit_reverse7(e) << 25) + step * 0x9E3779B9u;
        const uint32_t phase_s = (e << 25) + step * 0x6A09E667u;
        dither.exp_avg[slot] = ((phase_m >> 18) << 4) + 8 - BITS_OF_1;
        dither.exp_avg_sq[slot] = ((phase_s >> 18) << 2) + 2 - BITS_OF_1;
    }
    return dither;
}

CompactScalars compact_scalars(const StepScalars& scalars) {
    const bool moves = scalars.step_size >= 0x1p-100f;
    const float grad_scale = has_l2(scalars) ? 1.0f : scalars.grad_scale;
    return {
        scalars.grad_scale,
        scalars.one_minus_beta1 * grad_scale,
        scalars.sqrt_one_minus_beta2 * grad_scale,
        moves ? scalars.inv_sqrt_bias_correction2 / scalars.step_size : scalars.inv_sqrt_bias_correction2,
        moves ? scalars.eps / scalars.step_size : __builtin_inff(),
        scalars.beta1,
        scalars.sqrt_beta2,
        scalars.decay,
        scalars.weight_decay,
    };
}

}  // namespace

int adam_step(const AdamBuffers& buffers, Layout layout, DType grad_dtype, const StepScalars& scalars,
              size_t num_elements, Isa isa, int num_threads) {
    const KernelTable* kernels = kernels_for(isa);
    if (kernels == nullptr) return -ENOTSUP;
    const AdamKernel kernel =
        kernels->adam[static_cast<int>(layout)][static_cast<int>(grad_dtype)][has_l2(scalars)];
    for_ranges(num_elements, num_threads,
               [&](size_t begin, size_t end) { kernel(buffers, scalars, begin, end); });
    return 0;
}

int compact_adam_step(const CompactBuffers& buffers, DType grad_dtype, const StepScalars& scalars,
                      uint32_t step, size_t num_elements, Isa isa, int num_threads) {
    static_assert(MIN_BLOCK % COMPACT_BLOCK == 0, "a range holds whole compact blocks");
    const KernelTable* kernels = kernels_for(isa);
    if (kernels == nullptr) return -ENOTSUP;
    const CompactKernel kernel = kernels->compact[static_cast<int>(grad_dtype)][has_l2(scalars)];
    const Dither dither = make_dither(*kernels, step);
    const CompactScalars compact = compact_scalars(scalars);
    for_ranges(num_elements, num_threads,
               [&](size_t begin, size_t end) { kernel(buffers, compact, dither, begin, end); });
    return 0;
}

int compact_encode(const Fp32State& state, const CompactBuffers& buffers, size_t num_elements, Isa isa,
                   int num_threads) {
    const KernelTable* kernels = kernels_for(isa);
    if (kernels == nullptr) return -ENOTSUP;
    for_ranges(num_elements, num_threads,
               [&](size_t begin, size_t end) { kernels->compact_encode(state, buffers, begin, end); });
    return 0;
}

int compact_decode(const CompactBuffers& buffers, const Fp32State& state, size_t num_elements, Isa isa,
                   int num_threads) {
    const KernelTable* kernels = kernels_for(isa);
    if (kernels == nullptr) return -ENOTSUP;
    for_ranges(num_elements, num_threads,
               [&](size_t begin, size_t end) { kernels->compact_decode(buffers, state, begin, end); });
    return 0;
}

int lion_step(const MomentBuffers& buffers, Layout layout, DType grad_dtype, const StepScalars& scalars,
              size_t num_elements, Isa isa, int num_threads) {
    const KernelTable* kernels = kernels_for(isa);
    if (kernels == nullptr) return -ENOTSUP;
    const MomentKernel kernel = kernels->lion[static_cast<int>(layout)][static_cast<int>(grad_dtype)];
    for_ranges(num_elements, num_threads,
               [&](size_t begin, size_t end) { kernel(buffers, scalars, begin, end); });
    return 0;
}

int adagrad_step(const MomentBuffers& buffers, Layout layout, DType grad_dtype, const StepScalars& scalars,
                 size_t num_elements, Isa isa, int num_threads) {
    const KernelTable* kernels = kernels_for(isa);
    if (kernels == nullptr) return -ENOTSUP;
    const MomentKernel kernel =
        kernels->adagrad[static_cast<int>(layout)][static_cast<int>(grad_dtype)][has_l2(scalars)];
    for_ranges(num_elements, num_threads,
               [&](size_t begin, size_t end) { kernel(buffers, scalars, begin, end); });
    return 0;
}

int sgd_step(const MomentBuffers& buffers, Layout layout, DType grad_dtype, const StepScalars& scalars,
             size_t num_elements, Isa isa, int num_threads) {
    const KernelTable* kernels = kernels_for(isa);
    if (kernels == nullptr) return -ENOTSUP;
    const MomentKernel kernel =
        kernels->sgd[static_cast<int>(layout)][static_cast<int>(grad_dtype)][has_l2(scalars)];
    for_ranges(num_elements, num_threads,
               [&](size_t begin, size_t end) { kernel(buffers, scalars, begin, end); });
    return 0;
}

int sq_norm(const void* grad, DType dtype, size_t num_elements, Isa isa, int num_threads, double* result) {
    static_assert(MIN_BLOCK % SQ_NORM_BLOCK == 0, "a range holds whole norm blocks");
    const KernelTable* kernels = kernels_for(isa);
    if (kernels == nullptr) return -ENOTSUP;
    const SqNormKernel kernel = kernels->sq_norm[static_cast<int>(dtype)];
    const size_t num_sums = ceil_div(num_elements, SQ_NORM_BLOCK);
    const std::unique_ptr<double[]> sums(new (std::nothrow) double[num_sums]);
    if (sums == nullptr) return -ENOMEM;
    for_ranges(num_elements, num_threads, [&](size_t range_begin, size_t range_end) {
        for (size_t begin = range_begin; begin < range_end; begin += SQ_NORM_BLOCK) {
            const size_t end = range_end - begin < SQ_NORM_BLOCK ? range_end : begin + SQ_NORM_BLOCK;
            sums[begin / SQ_NORM_BLOCK] = kernel(grad, begin, end);
        }
    });
    *result = 0.0;
    for (size_t i = 0; i < num_sums; ++i) *result += sums[i];
    return 0;
}

int sq_norms(const void* grad, DType dtype, const Part* parts, size_t num_parts, Isa isa, int num_threads,
             double* results) {
    const size_t element_size = dtype == DType::FP32 ? 4 : 2;
    for (size_t k = 0; k < num_parts; ++k) {
        const auto* first = static_cast<const char*>(grad) + parts[k].start * element_size;
        const size_t num_elements = parts[k].stop - parts[k].start;
        const int status = sq_norm(first, dtype, num_elements, isa, num_threads, &results[k]);
        if (status != 0) return status;
    }
    return 0;
}

int stream(const StreamArrays& arrays, size_t num_elements, Isa isa, int num_threads, uint64_t* sink) {
    static_assert(MIN_BLOCK % STREAM_CHUNK == 0, "a range holds whole chunks");
    const KernelTable* kernels = kernels_for(isa);
    if (kernels == nullptr) return -ENOTSUP;
    if (num_elements % STREAM_CHUNK != 0 || arrays.num_arrays > MAX_STREAM_ARRAYS ||
        arrays.num_written > arrays.num_arrays) {
        return -EINVAL;
    }
    std::atomic<uint64_t> total{0};
    for_ranges(num_elements, num_threads, [&](size_t begin, size_t end) {
        total.fetch_add(kernels->stream(arrays, begin, end), std::memory_order_relaxed);
    });
    *sink = total.load();
    return 0;
}

int accumulate(void* acc, DType acc_dtype, const void* grad, DType grad_dtype, size_t num_elements, Isa isa,
               int num_threads) {
    const KernelTable* kernels = kernels_for(isa);
    if (kernels == nullptr) return -ENOTSUP;
    const AccumulateKernel kernel =
        kernels->accumulate[static_cast<int>(acc_dtype)][static_cast<int>(grad_dtype)];
    for_ranges(num_elements, num_threads, [&](size_t begin, size_t end) { kernel(acc, grad, begin, end); });
    return 0;
}

int split_master(const float* master, uint16_t* param, int16_t* remainder, size_t num_elements, Isa isa,
                 int num_threads) {
    const KernelTable* kernels = kernels_for(isa);
    if (kernels == nullptr) return -ENOTSUP;
    for_ranges(num_elements, num_threads,
               [&](size_t begin, size_t end) { kernels->split(master, param, remainder, begin, end); });
    return 0;
}

int join_master(const uint16_t* param, const int16_t* remainder, float* master, size_t num_elements, Isa isa,
                int num_threads) {
    const KernelTable* kernels = kernels_for(isa);
    if (kernels == nullptr) return -ENOTSUP;
    for_ranges(num_elements, num_threads,
               [&](size_t begin, size_t end) { kernels->join(param, remainder, master, begin, end); });
    return 0;
}

int copy_bytes(void* dst, const void* src, size_t num_bytes, int num_threads) {
    // The ranges are as long as possible: the C library switches to non-temporal stores for long copies.
    size_t range_bytes = ceil_div(num_bytes, static_cast<size_t>(num_threads < 1 ? 1 : num_threads));
    if (range_bytes < MIN_COPY_BYTES) range_bytes = MIN_COPY_BYTES;
    range_bytes = ceil_div(range_bytes, PAGE_BYTES) * PAGE_BYTES;
    const auto block = [&](size_t index) {
        const size_t begin = index * range_bytes;
        const size_t count = num_bytes - begin < range_bytes ? num_bytes - begin : range_bytes;
        std::memcpy(static_cast<char*>(dst) + begin, static_cast<const char*>(src) + begin, count);
    };
    ThreadPool::instance().parallel_for(ceil_div(num_bytes, range_bytes), num_threads, block);
    return 0;
}

int set_cores(const unsigned char* mask, size_t num_bytes) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    for (size_t core = 0; core < num_bytes * 8; ++core) {
        if (!(mask[core / 8] >> core % 8 & 1)) continue;
        if (core >= CPU_SETSIZE) return -EINVAL;
        CPU_SET(core, &cores);
    }
    if (CPU_COUNT(&cores) == 0) return -EINVAL;
    return ThreadPool::instance().set_cores(cores);
}

}  // namespace offloadzero::cpu_adam
