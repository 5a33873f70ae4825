// The instruction sets that this CPU and its operating system offer.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernel_table.h"

namespace offloadzero::cpu_adam {

#if defined(__x86_64__)
namespace {

struct CpuFeatures {
    bool avx2 = false;
    bool avx512 = false;
};

// The register states the operating system saves (XCR0); only callable when OSXSAVE is set.
uint64_t saved_states() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (static_cast<uint64_t>(high) << 32) | low;
}

// Bit numbers from the Intel SDM, volume 2, CPUID (bit_* macros of cpuid.h), and volume 1, 13.3 for XCR0.
CpuFeatures detect() {
    constexpr uint64_t YMM_STATES = 0x06, ZMM_STATES = 0xE6;
    constexpr unsigned AVX512_BITS = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
    CpuFeatures features;
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return features;
    if (!(ecx & bit_OSXSAVE) || !(ecx & bit_AVX) || !(ecx & bit_F16C) || !(ecx & bit_FMA)) return features;
    const uint64_t states = saved_states();
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return features;
    features.avx2 = (ebx & bit_AVX2) && (states & YMM_STATES) == YMM_STATES;
    features.avx512 =
        features.avx2 && (ebx & AVX512_BITS) == AVX512_BITS && (states & ZMM_STATES) == ZMM_STATES;
    return features;
}

}  // namespace

const KernelTable* kernels_for(Isa isa) {
    static const CpuFeatures features = detect();
    switch (isa) {
        case Isa::SCALAR:
            return &scalar_kernels();
        case Isa::AVX2:
            return features.avx2 ? &avx2_kernels() : nullptr;
        case Isa::AVX512:
            return features.avx512 ? &avx512_kernels() : nullptr;
    }
    return nullptr;
}
#else
const KernelTable* kernels_for(Isa isa) { return isa == Isa::SCALAR ? &scalar_kernels() : nullptr; }
#endif

bool isa_supported(Isa isa) { return kernels_for(isa) != nullptr; }

}  // namespace offloadzero::cpu_adam
