// The kernels of one instruction set, as function pointers over an element range [begin, end).
#pragma once

#include "cpu_adam.h"

namespace offloadzero::cpu_adam {

using AdamKernel = void (*)(const AdamBuffers&, const StepScalars&, size_t begin, size_t end);
using SqNormKernel = double (*)(const void* grad, size_t begin, size_t end);
using AccumulateKernel = void (*)(void* acc, const void* grad, size_t begin, size_t end);
using SplitKernel = void (*)(const float* master, uint16_t* param, int16_t* remainder, size_t begin,
                             size_t end);
using JoinKernel = void (*)(const uint16_t* param, const int16_t* remainder, float* master, size_t begin,
                            size_t end);

// The factors that [Note: compact arithmetic] computes once per call.
struct CompactScalars {
    float grad_scale;
    float grad_m;
    float grad_s;
    float root;
    float floor;
    float beta1;
    float sqrt_beta2;
    float decay;
    float weight_decay;
};

constexpr uint32_t BITS_OF_1 = 0x3F800000u;  // in fp32

// The numbers added to the patterns before they are cut to codes, less the pattern of 1: [Note: dithered
// codes]. Entry k is for the element of slot k: KernelTable::compact_element.
struct Dither {
    alignas(64) uint32_t exp_avg[COMPACT_BLOCK];
    alignas(64) uint32_t exp_avg_sq[COMPACT_BLOCK];
};

using MomentKernel = void (*)(const MomentBuffers&, const StepScalars&, size_t begin, size_t end);
using CompactKernel = void (*)(const CompactBuffers&, const CompactScalars&, const Dither&, size_t begin,
                               size_t end);
using EncodeKernel = void (*)(const Fp32State&, const CompactBuffers&, size_t begin, size_t end);
using DecodeKernel = void (*)(const CompactBuffers&, const Fp32State&, size_t begin, size_t end);
using StreamKernel = uint64_t (*)(const StreamArrays&, size_t begin, size_t end);

struct KernelTable {
    AdamKernel adam[NUM_LAYOUTS][NUM_DTYPES][2];  // [layout][grad][0: decoupled or no decay, 1: L2]
    SqNormKernel sq_norm[NUM_DTYPES];
    AccumulateKernel accumulate[NUM_DTYPES][NUM_DTYPES];  // [acc][grad]
    SplitKernel split;
    JoinKernel join;
    MomentKernel lion[NUM_LAYOUTS][NUM_DTYPES];
    MomentKernel adagrad[NUM_LAYOUTS][NUM_DTYPES][2];  // last as for adam
    MomentKernel sgd[NUM_LAYOUTS][NUM_DTYPES][2];      // likewise
    CompactKernel compact[NUM_DTYPES][2];              // last as for adam
    size_t (*compact_element)(size_t slot);            // of a block, by its place in a block's vectors
    EncodeKernel compact_encode;
    DecodeKernel compact_decode;
    StreamKernel stream;
};

const KernelTable& scalar_kernels();
#if defined(__x86_64__)
const KernelTable& avx2_kernels();
const KernelTable& avx512_kernels();
#endif

// Returns null when this CPU or this build lacks the instruction set.
const KernelTable* kernels_for(Isa isa);

}  // namespace offloadzero::cpu_adam
