#include "uring_ring.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>

namespace offloadzero::aio::uring {

Ring::~Ring() {
    if (sqes_ != nullptr) munmap(sqes_, sqes_num_bytes_);
    if (rings_ != nullptr) munmap(rings_, rings_num_bytes_);
    if (fd_ >= 0) close(fd_);
}

int Ring::init(unsigned num_entries, uint32_t setup_flags) {
    Params params;
    memset(&params, 0, sizeof params);
    params.flags = setup_flags;
    // The CQ has twice the entries: it cannot overflow.
    long fd = syscall(SYS_SETUP, num_entries, &params);
    if (fd < 0) return -errno;
    fd_ = static_cast<int>(fd);
    setup_flags_ = setup_flags;
    features_ = params.features;
    int status = check_opcodes();
    return status < 0 ? status : map(params);
}

int Ring::enable() {
    return setup_flags_ & SETUP_DISABLED ? register_resource(REGISTER_ENABLE_RINGS, nullptr, 0) : 0;
}

// IORING_OP_READ and WRITE came with 5.6, as did the probe itself.
int Ring::check_opcodes() const {
    Probe probe;
    memset(&probe, 0, sizeof probe);
    int status = register_resource(REGISTER_PROBE, &probe, sizeof probe.ops / sizeof probe.ops[0]);
    if (status < 0) return status == -EINVAL ? -EOPNOTSUPP : status;
    for (unsigned op : {unsigned(OP_READ), unsigned(OP_WRITE)}) {
        if (op > probe.last_op || !(probe.ops[op].flags & 1)) return -EOPNOTSUPP;
    }
    return 0;
}

int Ring::map(const Params& params) {
    if (!(params.features & FEATURE_SINGLE_MMAP)) return -EOPNOTSUPP;
    size_t sq_num_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    size_t cq_num_bytes = params.cq_off.cqes + params.cq_entries * sizeof(Cqe);
    rings_num_bytes_ = std::max(sq_num_bytes, cq_num_bytes);
    sqes_num_bytes_ = params.sq_entries * sizeof(Sqe);
    constexpr int PROTECTION = PROT_READ | PROT_WRITE, SHARING = MAP_SHARED | MAP_POPULATE;
    void* rings = mmap(nullptr, rings_num_bytes_, PROTECTION, SHARING, fd_, OFFSET_RINGS);
    if (rings == MAP_FAILED) return -errno;
    rings_ = rings;
    void* sqes = mmap(nullptr, sqes_num_bytes_, PROTECTION, SHARING, fd_, OFFSET_SQES);
    if (sqes == MAP_FAILED) return -errno;
    sqes_ = sqes;
    // A forked child must not be able to touch the parent's ring.
    madvise(rings_, rings_num_bytes_, MADV_DONTFORK);
    madvise(sqes_, sqes_num_bytes_, MADV_DONTFORK);

    char* base = static_cast<char*>(rings_);
    sq_head_ = reinterpret_cast<unsigned*>(base + params.sq_off.head);
    sq_tail_ = reinterpret_cast<unsigned*>(base + params.sq_off.tail);
    sq_mask_ = *reinterpret_cast<unsigned*>(base + params.sq_off.ring_mask);
    sq_array_ = reinterpret_cast<unsigned*>(base + params.sq_off.array);
    cq_head_ = reinterpret_cast<unsigned*>(base + params.cq_off.head);
    cq_tail_ = reinterpret_cast<unsigned*>(base + params.cq_off.tail);
    cq_mask_ = *reinterpret_cast<unsigned*>(base + params.cq_off.ring_mask);
    cqes_ = reinterpret_cast<Cqe*>(base + params.cq_off.cqes);
    return 0;
}

Sqe* Ring::next_sqe() {
    unsigned index = sq_local_tail_++ & sq_mask_;
    sq_array_[index] = index;
    auto* sqe = static_cast<Sqe*>(sqes_) + index;
    memset(sqe, 0, sizeof *sqe);
    return sqe;
}

// Returns the number of entries that a call of the kernel has to submit.
unsigned Ring::announce_staged() {
    // The entries must be visible to the kernel before the tail that announces them.
    store_release(sq_tail_, sq_local_tail_);
    return sq_local_tail_ - load_acquire(sq_head_);
}

int Ring::enter(int64_t timeout_ns) {
    unsigned num_staged = announce_staged();
    if (has_completion()) timeout_ns = 0;
    // Where completions are delivered inside this call, no other call brings them in.
    bool must_enter = setup_flags_ & SETUP_DEFER_TASKRUN || num_staged > 0;
    if (!must_enter && timeout_ns == 0) return 0;
    bool can_wait_inside = timeout_ns <= 0 || features_ & FEATURE_EXT_ARG;
    int status = enter_kernel(num_staged, can_wait_inside ? timeout_ns : 0);
    if (status == -EINTR || status == -ETIME) status = 0;
    if (status < 0 || can_wait_inside) return status;
    return poll_completion(timeout_ns);
}

int Ring::enter_kernel(unsigned num_submit, int64_t timeout_ns) const {
    KernelTimespec limit = {timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
    GetEventsArg wait = {0, 0, 0, reinterpret_cast<uint64_t>(&limit)};
    uint32_t flags = 0;
    if (timeout_ns != 0 || setup_flags_ & SETUP_DEFER_TASKRUN) flags |= ENTER_GET_EVENTS;
    if (timeout_ns > 0) flags |= ENTER_EXT_ARG;
    long status = syscall(SYS_ENTER, fd_, num_submit, timeout_ns != 0 ? 1 : 0, flags,
                          timeout_ns > 0 ? &wait : nullptr, timeout_ns > 0 ? sizeof wait : 0);
    return status < 0 ? -errno : 0;
}

// Kernels before 5.11 cannot limit the wait.
int Ring::poll_completion(int64_t timeout_ns) const {
    if (has_completion()) return 0;
    pollfd ring = {fd_, POLLIN, 0};
    timespec timeout = {timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
    return ppoll(&ring, 1, &timeout, nullptr) < 0 && errno != EINTR ? -errno : 0;
}

int Ring::register_resource(unsigned op, void* argument, unsigned num) const {
    long status;
    do {
        status = syscall(SYS_REGISTER, fd_, op, argument, num);
    } while (status < 0 && errno == EINTR);
    return status < 0 ? -errno : 0;
}

}  // namespace offloadzero::aio::uring
