// Cuts each call into blocks, and runs them on the pool.
#include "cpu_adam.h"

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

// Round to nearest, subnormals kept, whatever the host program has set for this thread
// (torch.set_flush_denormal, for one): [Note: Adam arithmetic].
class DefaultFloatMode {
  public:
#if defined(__x86_64__)
    DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~DefaultFloatMode() { _mm_setcsr(saved_); }
    DefaultFloatMode(const DefaultFloatMode&) = delete;
    DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

  private:
    unsigned saved_;
#else
    DefaultFloatMode() {}
    ~DefaultFloatMode() {}
#endif
};

size_t block_size(size_t num_elements, int num_threads) {
    const size_t share = num_elements / (static_cast<size_t>(num_threads) * BLOCKS_PER_THREAD);
    const size_t block = share / MIN_BLOCK * MIN_BLOCK;
    return block < MIN_BLOCK ? MIN_BLOCK : block > MAX_BLOCK ? MAX_BLOCK : block;
}

// range(begin, end) over [0, num_elements); every begin is a multiple of MIN_BLOCK.
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

}  // namespace

int adam_step(const AdamBuffers& buffers, Layout layout, DType grad_dtype, const AdamScalars& scalars,
              size_t num_elements, Isa isa, int num_threads) {
    const KernelTable* kernels = kernels_for(isa);
    if (kernels == nullptr) return -ENOTSUP;
    const bool l2 = !scalars.decoupled && scalars.weight_decay != 0.0f;
    const AdamKernel kernel = kernels->adam[static_cast<int>(layout)][static_cast<int>(grad_dtype)][l2];
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
    std::unique_ptr<double[]> sums(new (std::nothrow) double[num_sums]);
    if (sums == nullptr) return -ENOMEM;
    for_ranges(num_elements, num_threads, [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; i += SQ_NORM_BLOCK) {
            sums[i / SQ_NORM_BLOCK] = kernel(grad, i, end - i < SQ_NORM_BLOCK ? end : i + SQ_NORM_BLOCK);
        }
    });
    double total = 0.0;
    for (size_t i = 0; i < num_sums; ++i) total += sums[i];
    *result = total;
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
    // Ranges as long as possible: the C library switches to non-temporal stores for long copies.
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

}  // namespace offloadzero::cpu_adam
