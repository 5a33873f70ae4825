// SGD with momentum, written once over a vector type V. Included after kernel_lion_adagrad.h.
// [Note: SGD arithmetic] in cpu_adam.h fixes the operations and their order.

enum class Momentum { NONE, PLAIN, NESTEROV };

template <class V, class Weight, class Grad, bool L2, Momentum MOMENTUM>
OFFLOADZERO_INLINE size_t sgd_span(const MomentBuffers& buffers, const AdamScalars& scalars, size_t i,
                                   size_t end) {
    using F = typename V::F;
    const auto* grad = static_cast<const typename Grad::Element*>(buffers.grad);
    const F grad_scale = V::set(scalars.grad_scale), weight_decay = V::set(scalars.weight_decay);
    const F beta1 = V::set(scalars.beta1), one_minus_beta1 = V::set(scalars.one_minus_beta1);
    const F step_size = V::set(scalars.step_size);
    for (; i + V::WIDTH <= end; i += V::WIDTH) {
        if (MOMENTUM != Momentum::NONE) prefetch_moment<V, Weight, Grad>(buffers, i);
        const F p = Weight::template load<V>(buffers.param, buffers.master, i);
        F g = V::mul(Grad::template load<V>(grad + i), grad_scale);
        if (L2) g = V::add(g, V::mul(weight_decay, p));
        if (MOMENTUM != Momentum::NONE) {
            const F m =
                V::add(V::mul(beta1, V::load_fp32(buffers.moment + i)), V::mul(one_minus_beta1, g));
            V::store_fp32(buffers.moment + i, m);
            g = MOMENTUM == Momentum::NESTEROV ? V::add(g, V::mul(beta1, m)) : m;
        }
        Weight::template store<V>(buffers.param, buffers.master, i, V::sub(p, V::mul(step_size, g)));
    }
    return i;
}

template <class V, class Weight, class Grad, bool L2, Momentum MOMENTUM>
static void sgd_range_with(const MomentBuffers& buffers, const AdamScalars& scalars, size_t begin,
                           size_t end) {
    const size_t rest = sgd_span<V, Weight, Grad, L2, MOMENTUM>(buffers, scalars, begin, end);
    sgd_span<Scalar, Weight, Grad, L2, MOMENTUM>(buffers, scalars, rest, end);
}

template <class V, class Weight, class Grad, bool L2>
static void sgd_range(const MomentBuffers& buffers, const AdamScalars& scalars, size_t begin, size_t end) {
    if (scalars.beta1 == 0.0f) {
        sgd_range_with<V, Weight, Grad, L2, Momentum::NONE>(buffers, scalars, begin, end);
    } else if (scalars.beta2 == 0.0f) {
        sgd_range_with<V, Weight, Grad, L2, Momentum::PLAIN>(buffers, scalars, begin, end);
    } else {
        sgd_range_with<V, Weight, Grad, L2, Momentum::NESTEROV>(buffers, scalars, begin, end);
    }
}
