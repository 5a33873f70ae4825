// [Note: speed of CRC-32C]
// The instruction takes 8 bytes per cycle but gives its result after three. Blocks are independent, so three
// of them are summed in turn, and no sums of parts need combining.
#include "crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace offloadzero::aio {
namespace {

constexpr uint32_t POLYNOMIAL = 0x82F63B78;  // reflected

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// tables[k][b]: byte b followed by k zero bytes ("slicing by 8", Kounavis and Berry 2005).
constexpr Tables make_tables() {
    Tables tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t sum = byte;
        for (int bit = 0; bit < 8; ++bit) sum = sum >> 1 ^ (sum & 1 ? POLYNOMIAL : 0);
        tables[0][byte] = sum;
    }
    for (size_t k = 1; k < 8; ++k) {
        for (size_t byte = 0; byte < 256; ++byte) {
            const uint32_t before = tables[k - 1][byte];
            tables[k][byte] = before >> 8 ^ tables[0][before & 0xFF];
        }
    }
    return tables;
}

constexpr Tables TABLES = make_tables();

uint32_t sum_with_tables(const char* data, size_t num_bytes) {
    uint32_t sum = ~0u;
    for (; num_bytes >= 8; num_bytes -= 8, data += 8) {
        unsigned char bytes[8];
        memcpy(bytes, data, 8);
        for (size_t i = 0; i < 4; ++i) bytes[i] ^= static_cast<unsigned char>(sum >> 8 * i);
        sum = 0;
        for (size_t i = 0; i < 8; ++i) sum ^= TABLES[7 - i][bytes[i]];
    }
    for (; num_bytes > 0; --num_bytes, ++data)
        sum = sum >> 8 ^ TABLES[0][(sum ^ static_cast<unsigned char>(*data)) & 0xFF];
    return ~sum;
}

constexpr size_t LANES = 3;

// Computes the sums of up to LANES blocks of one size.
using Kernel = void (*)(const char* data, size_t block_size, size_t num_blocks, uint32_t* sums);

void sum_blocks_with_tables(const char* data, size_t block_size, size_t num_blocks, uint32_t* sums) {
    for (size_t i = 0; i < num_blocks; ++i) sums[i] = sum_with_tables(data + i * block_size, block_size);
}

#if defined(__x86_64__)
// For GCC the instruction is a part of sse4.2, for clang a feature of its own.
#if defined(__clang__)
#define SSE42 __attribute__((target("sse4.2,crc32")))
#else
#define SSE42 __attribute__((target("sse4.2")))
#endif

SSE42 uint64_t load(const char* data) {
    uint64_t word;
    memcpy(&word, data, sizeof word);
    return word;
}

SSE42 uint32_t sum_rest(uint64_t sum, const char* data, size_t num_bytes) {
    for (; num_bytes >= 8; num_bytes -= 8, data += 8) sum = _mm_crc32_u64(sum, load(data));
    auto narrow = static_cast<uint32_t>(sum);
    for (; num_bytes > 0; --num_bytes, ++data)
        narrow = _mm_crc32_u8(narrow, static_cast<unsigned char>(*data));
    return ~narrow;
}

SSE42 void sum_blocks_with_sse42(const char* data, size_t block_size, size_t num_blocks, uint32_t* sums) {
    constexpr uint64_t START = 0xFFFFFFFF;
    constexpr size_t LINE = 64;
    if (num_blocks < LANES) {
        for (size_t i = 0; i < num_blocks; ++i) sums[i] = sum_rest(START, data + i * block_size, block_size);
        return;
    }
    uint64_t a = START, b = START, c = START;
    const size_t num_whole = block_size / 8 * 8;
    for (size_t at = 0; at < num_whole; at += 8) {
        if (at % LINE == 0) {
            const uintptr_t next = reinterpret_cast<uintptr_t>(data) + LANES * block_size + at;
            for (size_t lane = 0; lane < LANES; ++lane)
                __builtin_prefetch(reinterpret_cast<const void*>(next + lane * block_size));
        }
        a = _mm_crc32_u64(a, load(data + at));
        b = _mm_crc32_u64(b, load(data + at + block_size));
        c = _mm_crc32_u64(c, load(data + at + 2 * block_size));
    }
    const char* rest = data + num_whole;
    sums[0] = sum_rest(a, rest, block_size - num_whole);
    sums[1] = sum_rest(b, rest + block_size, block_size - num_whole);
    sums[2] = sum_rest(c, rest + 2 * block_size, block_size - num_whole);
}

bool has_sse42() { return __builtin_cpu_supports("sse4.2"); }
#else
bool has_sse42() { return false; }
constexpr Kernel sum_blocks_with_sse42 = sum_blocks_with_tables;
#endif

Kernel kernel() { return has_sse42() ? sum_blocks_with_sse42 : sum_blocks_with_tables; }

// Calls visit(index of the first, number, sums) for all blocks, up to LANES at a time, until it returns
// false.
template <class Visit>
void for_sums(Kernel sum_blocks, const char* data, size_t num_bytes, size_t block_size, const Visit& visit) {
    const size_t num_whole = num_bytes / block_size;
    uint32_t sums[LANES];
    for (size_t i = 0; i < num_whole; i += LANES) {
        const size_t count = std::min(LANES, num_whole - i);
        sum_blocks(data + i * block_size, block_size, count, sums);
        if (!visit(i, count, sums)) return;
    }
    if (num_bytes % block_size == 0) return;
    sum_blocks(data + num_whole * block_size, num_bytes % block_size, 1, sums);
    visit(num_whole, 1, sums);
}

}  // namespace

void crc32c_blocks(const char* data, size_t num_bytes, size_t block_size, uint32_t* sums, bool with_tables) {
    const Kernel sum_blocks = with_tables ? sum_blocks_with_tables : kernel();
    for_sums(sum_blocks, data, num_bytes, block_size, [&](size_t first, size_t count, const uint32_t* found) {
        std::copy(found, found + count, sums + first);
        return true;
    });
}

int64_t crc32c_find_mismatch(const char* data, size_t num_bytes, size_t block_size,
                             const uint32_t* expected) {
    int64_t mismatch = -1;
    for_sums(kernel(), data, num_bytes, block_size, [&](size_t first, size_t count, const uint32_t* found) {
        for (size_t i = 0; i < count && mismatch < 0; ++i) {
            if (found[i] != expected[first + i]) mismatch = static_cast<int64_t>(first + i);
        }
        return mismatch < 0;
    });
    return mismatch;
}

const char* crc32c_implementation() { return has_sse42() ? "sse4.2" : "tables"; }

}  // namespace offloadzero::aio
