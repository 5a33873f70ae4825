// The exhaustive check of [Note: bf16 split]: 2^32 patterns, in C++ because it is 4 billion of them.
#include <atomic>
#include <cerrno>
#include <cstring>

#include "kernel_table.h"
#include "thread_pool.h"

namespace offloadzero::cpu_adam {
namespace {

constexpr size_t PATTERNS_PER_BLOCK = size_t{1} << 12;
constexpr size_t NUM_BLOCKS = (size_t{1} << 32) / PATTERNS_PER_BLOCK;

// The rule once more, by another way than the kernels': round the magnitude half away from zero.
bool split_is_right(uint32_t bits, uint16_t hi, int16_t lo) {
    const uint32_t carry = (bits & 0xFFFFu) >= 0x8000u ? 1 : 0;
    const int32_t below = static_cast<int32_t>(bits & 0xFFFFu) - (carry ? 0x10000 : 0);
    return hi == static_cast<uint16_t>((bits >> 16) + carry) && lo == below;
}

uint64_t mismatches_in_block(const KernelTable& kernels, uint32_t first) {
    uint32_t bits[PATTERNS_PER_BLOCK], joined_bits[PATTERNS_PER_BLOCK];
    float master[PATTERNS_PER_BLOCK];
    uint16_t hi[PATTERNS_PER_BLOCK];
    int16_t lo[PATTERNS_PER_BLOCK];
    for (size_t i = 0; i < PATTERNS_PER_BLOCK; ++i) bits[i] = first + static_cast<uint32_t>(i);
    std::memcpy(master, bits, sizeof bits);
    kernels.split(master, hi, lo, 0, PATTERNS_PER_BLOCK);
    kernels.join(hi, lo, master, 0, PATTERNS_PER_BLOCK);
    std::memcpy(joined_bits, master, sizeof bits);
    uint64_t mismatches = 0;
    for (size_t i = 0; i < PATTERNS_PER_BLOCK; ++i) {
        mismatches += joined_bits[i] != bits[i] || !split_is_right(bits[i], hi[i], lo[i]);
    }
    return mismatches;
}

}  // namespace

int split_join_exhaustive(Isa isa, int num_threads, uint64_t* num_mismatches) {
    const KernelTable* kernels = kernels_for(isa);
    if (kernels == nullptr) return -ENOTSUP;
    std::atomic<uint64_t> mismatches{0};
    ThreadPool::instance().parallel_for(NUM_BLOCKS, num_threads, [&](size_t block) {
        const uint64_t found =
            mismatches_in_block(*kernels, static_cast<uint32_t>(block * PATTERNS_PER_BLOCK));
        if (found != 0) mismatches.fetch_add(found, std::memory_order_relaxed);
    });
    *num_mismatches = mismatches.load();
    return 0;
}

}  // namespace offloadzero::cpu_adam
