// The kernels for any CPU.
#include <cstddef>
#include <cstdint>

#include "kernel_table.h"
#include "target.h"

namespace offloadzero::cpu_adam {
namespace scalar {
// The body needs the vector types: keep this order.
// clang-format off
#include "vec_scalar.h"
#include "remainders.h"
#include "kernel_body.h"
#include "kernel_compact.h"
#include "kernel_lion_adagrad.h"
#include "kernel_sgd.h"
#include "kernel_stream.h"
#include "make_kernel_table.h"
// clang-format on

static constexpr KernelTable TABLE = make_kernel_table<Scalar>();
}  // namespace scalar

const KernelTable& scalar_kernels() { return scalar::TABLE; }
}  // namespace offloadzero::cpu_adam
