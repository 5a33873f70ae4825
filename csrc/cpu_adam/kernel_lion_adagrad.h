// Lion and Adagrad, written once over a vector type V. Included after kernel_body.h, like it.
// [Note: Lion and Adagrad arithmetic] in cpu_adam.h fixes the operations and their order.

template <class V, class Weight, class Grad>
OFFLOADZERO_INLINE void prefetch_moment(const MomentBuffers& buffers, size_t i) {
    if (V::WIDTH == 1) return;
    prefetch<float>(buffers.moment, i);
    prefetch<typename Grad::Element>(buffers.grad, i);
    prefetch<typename Weight::ParamElement>(buffers.param, i);
    if (Weight::HAS_MASTER) prefetch<typename Weight::MasterElement>(buffers.master, i);
}

template <class V, class Weight, class Grad>
OFFLOADZERO_INLINE size_t lion_span(const MomentBuffers& buffers, const StepScalars& scalars, size_t i,
                                    size_t end) {
    using F = typename V::F;
    const auto* grad = static_cast<const typename Grad::Element*>(buffers.grad);
    const F grad_scale = V::set(scalars.grad_scale), decay = V::set(scalars.decay);
    const F beta1 = V::set(scalars.beta1), one_minus_beta1 = V::set(scalars.one_minus_beta1);
    const F beta2 = V::set(scalars.beta2), one_minus_beta2 = V::set(scalars.one_minus_beta2);
    const F step_size = V::set(scalars.step_size);
    for (; i + V::WIDTH <= end; i += V::WIDTH) {
        prefetch_moment<V, Weight, Grad>(buffers, i);
        const F p = Weight::template load<V>(buffers.param, buffers.master, i);
        const F g = V::mul(Grad::template load<V>(grad + i), grad_scale);
        const F m = V::load_fp32(buffers.moment + i);
        const F u = V::add(V::mul(beta1, m), V::mul(one_minus_beta1, g));
        V::store_fp32(buffers.moment + i, V::add(V::mul(beta2, m), V::mul(one_minus_beta2, g)));
        Weight::template store<V>(buffers.param, buffers.master, i,
                                  V::sub(V::mul(p, decay), V::mul(step_size, V::sign(u))));
    }
    return i;
}

template <class V, class Weight, class Grad>
static void lion_range(const MomentBuffers& buffers, const StepScalars& scalars, size_t begin, size_t end) {
    const size_t rest = lion_span<V, Weight, Grad>(buffers, scalars, begin, end);
    lion_span<Scalar, Weight, Grad>(buffers, scalars, rest, end);
}

template <class V, class Weight, class Grad, bool L2>
OFFLOADZERO_INLINE size_t adagrad_span(const MomentBuffers& buffers, const StepScalars& scalars, size_t i,
                                       size_t end) {
    using F = typename V::F;
    const auto* grad = static_cast<const typename Grad::Element*>(buffers.grad);
    const F grad_scale = V::set(scalars.grad_scale), weight_decay = V::set(scalars.weight_decay);
    const F step_size = V::set(scalars.step_size), eps = V::set(scalars.eps);
    for (; i + V::WIDTH <= end; i += V::WIDTH) {
        prefetch_moment<V, Weight, Grad>(buffers, i);
        const F p = Weight::template load<V>(buffers.param, buffers.master, i);
        F g = V::mul(Grad::template load<V>(grad + i), grad_scale);
        if (L2) g = V::add(g, V::mul(weight_decay, p));
        const F v = V::add(V::load_fp32(buffers.moment + i), V::mul(g, g));
        const F denom = V::add(V::sqrt(v), eps);
        V::store_fp32(buffers.moment + i, v);
        Weight::template store<V>(buffers.param, buffers.master, i,
                                  V::sub(p, V::div(V::mul(step_size, g), denom)));
    }
    return i;
}

template <class V, class Weight, class Grad, bool L2>
static void adagrad_range(const MomentBuffers& buffers, const StepScalars& scalars, size_t begin,
                          size_t end) {
    const size_t rest = adagrad_span<V, Weight, Grad, L2>(buffers, scalars, begin, end);
    adagrad_span<Scalar, Weight, Grad, L2>(buffers, scalars, rest, end);
}
