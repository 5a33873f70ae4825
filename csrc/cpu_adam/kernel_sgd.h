// SGD with momentum, written once over a vector type V. Included after kernel_lion_adagrad.h.
// [Note: SGD arithmetic] in cpu_adam.h fixes the operations and their order.

template <class V, class Weight, class Grad, bool L2>
OFFLOADZERO_INLINE size_t sgd_span(const MomentBuffers& buffers, const StepScalars& scalars, size_t i,
                                   size_t end) {
    using F = typename V::F;
    const auto* grad = static_cast<const typename Grad::Element*>(buffers.grad);
    const F grad_scale = V::set(scalars.grad_scale), weight_decay = V::set(scalars.weight_decay);
    const F beta1 = V::set(scalars.beta1), one_minus_beta1 = V::set(scalars.one_minus_beta1);
    const F beta2 = V::set(scalars.beta2), one_minus_beta2 = V::set(scalars.one_minus_beta2);
    const F step_size = V::set(scalars.step_size);
    const bool has_momentum = scalars.beta2 != 0.0f;
    for (; i + V::WIDTH <= end; i += V::WIDTH) {
        prefetch_moment<V, Weight, Grad>(buffers, i);
        const F p = Weight::template load<V>(buffers.param, buffers.master, i);
        F g = V::mul(Grad::template load<V>(grad + i), grad_scale);
        if (L2) g = V::add(g, V::mul(weight_decay, p));
        F u = g;
        if (has_momentum) {
            const F before = V::load_fp32(buffers.moment + i);
            const F m = V::add(V::mul(beta1, before), V::mul(one_minus_beta1, g));
            u = V::add(V::mul(beta2, m), V::mul(one_minus_beta2, g));
            V::store_fp32(buffers.moment + i, m);
        }
        Weight::template store<V>(buffers.param, buffers.master, i, V::sub(p, V::mul(step_size, u)));
    }
    return i;
}

template <class V, class Weight, class Grad, bool L2>
static void sgd_range(const MomentBuffers& buffers, const StepScalars& scalars, size_t begin, size_t end) {
    const size_t rest = sgd_span<V, Weight, Grad, L2>(buffers, scalars, begin, end);
    sgd_span<Scalar, Weight, Grad, L2>(buffers, scalars, rest, end);
}
