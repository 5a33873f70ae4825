// Memory traffic without arithmetic: see stream() in cpu_adam.h. Included inside an ISA's namespace and
// target region, like kernel_body.h.

// One cache line; the compiler uses the registers of the instruction set.
using StreamLine = uint64_t __attribute__((vector_size(64), aligned(8), may_alias));

static uint64_t stream_range(const StreamArrays& arrays, size_t begin, size_t end) {
    StreamLine sum = {};
    for (size_t i = begin; i < end; i += STREAM_CHUNK) {
        for (size_t k = 0; k < arrays.num_arrays; ++k) {
            const size_t element_size = arrays.element_size[k];
            char* bytes = static_cast<char*>(arrays.address[k]) + i * element_size;
            for (size_t at = 0; at < STREAM_CHUNK * element_size; at += sizeof(StreamLine)) {
                auto* line = reinterpret_cast<StreamLine*>(bytes + at);
                if (arrays.prefetch) {
                    const uintptr_t address = reinterpret_cast<uintptr_t>(line);
                    const uintptr_t ahead = PREFETCH_ELEMENTS * element_size;
                    __builtin_prefetch(reinterpret_cast<const void*>(address + ahead));
                }
                const StreamLine value = *line;
                sum += value;
                if (k < arrays.num_written) *line = ~value;
            }
        }
    }
    uint64_t total = 0;
    for (size_t lane = 0; lane < 8; ++lane) total += sum[lane];
    return total;
}
