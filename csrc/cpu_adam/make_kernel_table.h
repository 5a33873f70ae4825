// The table of one instruction set, out of the kernel bodies. Included after them; see kernel_body.h.

#define OFFLOADZERO_ACCUMULATE_GRADS(V, ACC) \
    {accumulate_range<V, ACC, Bf16>, accumulate_range<V, ACC, Fp16>, accumulate_range<V, ACC, Fp32>}

#define OFFLOADZERO_BY_GRAD(KERNEL, V, WEIGHT) \
    {KERNEL<V, WEIGHT, Bf16>, KERNEL<V, WEIGHT, Fp16>, KERNEL<V, WEIGHT, Fp32>}

#define OFFLOADZERO_BY_WEIGHT(KERNEL, V)                                                       \
    {OFFLOADZERO_BY_GRAD(KERNEL, V, SplitWeight), OFFLOADZERO_BY_GRAD(KERNEL, V, PlainWeight), \
     OFFLOADZERO_BY_GRAD(KERNEL, V, MasterWeight<Fp16>), OFFLOADZERO_BY_GRAD(KERNEL, V, MasterWeight<Bf16>)}

#define OFFLOADZERO_BY_GRAD_AND_L2(KERNEL, V, WEIGHT)                    \
    {                                                                    \
        {KERNEL<V, WEIGHT, Bf16, false>, KERNEL<V, WEIGHT, Bf16, true>}, \
        {KERNEL<V, WEIGHT, Fp16, false>, KERNEL<V, WEIGHT, Fp16, true>}, \
        {KERNEL<V, WEIGHT, Fp32, false>, KERNEL<V, WEIGHT, Fp32, true>}, \
    }

#define OFFLOADZERO_BY_WEIGHT_AND_L2(KERNEL, V)                                                              \
    {OFFLOADZERO_BY_GRAD_AND_L2(KERNEL, V, SplitWeight), OFFLOADZERO_BY_GRAD_AND_L2(KERNEL, V, PlainWeight), \
     OFFLOADZERO_BY_GRAD_AND_L2(KERNEL, V, MasterWeight<Fp16>),                                              \
     OFFLOADZERO_BY_GRAD_AND_L2(KERNEL, V, MasterWeight<Bf16>)}

#define OFFLOADZERO_COMPACT_GRADS(V)                                             \
    {                                                                            \
        {compact_adam_range<V, Bf16, false>, compact_adam_range<V, Bf16, true>}, \
        {compact_adam_range<V, Fp16, false>, compact_adam_range<V, Fp16, true>}, \
        {compact_adam_range<V, Fp32, false>, compact_adam_range<V, Fp32, true>}, \
    }

// In the order of the enums in cpu_adam.h.
template <class V>
constexpr KernelTable make_kernel_table() {
    return KernelTable{
        OFFLOADZERO_BY_WEIGHT_AND_L2(adam_range, V),
        {sq_norm_range<V, Bf16>, sq_norm_range<V, Fp16>, sq_norm_range<V, Fp32>},
        {OFFLOADZERO_ACCUMULATE_GRADS(V, Bf16), OFFLOADZERO_ACCUMULATE_GRADS(V, Fp16),
         OFFLOADZERO_ACCUMULATE_GRADS(V, Fp32)},
        split_range<V>,
        join_range<V>,
        OFFLOADZERO_BY_WEIGHT(lion_range, V),
        OFFLOADZERO_BY_WEIGHT_AND_L2(adagrad_range, V),
        OFFLOADZERO_BY_WEIGHT_AND_L2(sgd_range, V),
        OFFLOADZERO_COMPACT_GRADS(V),
        compact_element<V>,
        compact_encode_range<V>,
        compact_decode_range<V>,
        stream_range,
    };
}
