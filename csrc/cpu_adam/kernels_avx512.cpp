// The kernels for AVX-512 F, BW, VL and DQ.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernel_table.h"
#include "target.h"

#if defined(__GNUC__) && !defined(__clang__)
// GCC's own AVX-512 header warns about its deliberately undefined pass-through operands (GCC PR 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

OFFLOADZERO_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")

namespace offloadzero::cpu_adam {
namespace avx512 {
// The body needs the vector types: keep this order.
// clang-format off
#include "vec_scalar.h"
#include "vec_avx512.h"
#include "remainders.h"
#include "kernel_body.h"
#include "kernel_compact.h"
#include "kernel_lion_adagrad.h"
#include "kernel_sgd.h"
#include "kernel_stream.h"
#include "make_kernel_table.h"
// clang-format on

static constexpr KernelTable TABLE = make_kernel_table<Avx512>();
}  // namespace avx512
}  // namespace offloadzero::cpu_adam

OFFLOADZERO_TARGET_END

namespace offloadzero::cpu_adam {
const KernelTable& avx512_kernels() { return avx512::TABLE; }
}  // namespace offloadzero::cpu_adam

#endif  // __x86_64__
