// The kernels for AVX2 with FMA and F16C.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernel_table.h"
#include "target.h"

OFFLOADZERO_TARGET_BEGIN("avx2,fma,f16c")

namespace offloadzero::cpu_adam {
namespace avx2 {
// The body needs the vector types: keep this order.
// clang-format off
#include "vec_scalar.h"
#include "vec_avx2.h"
#include "remainders.h"
#include "kernel_body.h"
#include "kernel_compact.h"
#include "kernel_lion_adagrad.h"
#include "kernel_sgd.h"
#include "kernel_stream.h"
#include "make_kernel_table.h"
// clang-format on

static constexpr KernelTable TABLE = make_kernel_table<Avx2>();
}  // namespace avx2
}  // namespace offloadzero::cpu_adam

OFFLOADZERO_TARGET_END

namespace offloadzero::cpu_adam {
const KernelTable& avx2_kernels() { return avx2::TABLE; }
}  // namespace offloadzero::cpu_adam

#endif  // __x86_64__
