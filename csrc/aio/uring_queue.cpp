// io_uring through raw system calls: one ring, plain reads and writes, one read of an eventfd for wake().
#include <cerrno>

#include "kernel_queue.h"

#if __has_include(<linux/io_uring.h>)

#include <linux/io_uring.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <ctime>

namespace offloadzero::aio {
namespace {

constexpr uint64_t kWakeTag = 0;

template <typename T>
T load_acquire(const T* address) {
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

template <typename T>
void store_release(T* address, T value) {
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

class UringQueue final : public KernelQueue {
  public:
    ~UringQueue() override;
    int init(unsigned depth);

    void stage(const Transfer& transfer) override;
    int submit_and_wait(int64_t timeout_ns) override;
    void reap(std::vector<Completion>* completions) override;
    void wake() override;

  private:
    int map_rings(const io_uring_params& params);
    int check_opcodes() const;
    io_uring_sqe* next_sqe();
    void stage_wake_read();
    int enter(unsigned num_submit, unsigned min_complete) const;
    bool has_completion() const { return *cq_head_ != load_acquire(cq_tail_); }

    int ring_fd_ = -1;
    int wake_fd_ = -1;
    uint64_t wake_value_ = 0;
    void* ring_ = MAP_FAILED;
    size_t ring_num_bytes_ = 0;
    void* sqes_ = MAP_FAILED;
    size_t sqes_num_bytes_ = 0;
    unsigned* sq_head_ = nullptr;
    unsigned* sq_tail_ = nullptr;
    unsigned* sq_array_ = nullptr;
    unsigned sq_mask_ = 0;
    unsigned sq_local_tail_ = 0;
    unsigned* cq_head_ = nullptr;
    unsigned* cq_tail_ = nullptr;
    io_uring_cqe* cqes_ = nullptr;
    unsigned cq_mask_ = 0;
};

UringQueue::~UringQueue() {
    // The kernel cancelled the pending eventfd read when the owning thread exited.
    if (sqes_ != MAP_FAILED) munmap(sqes_, sqes_num_bytes_);
    if (ring_ != MAP_FAILED) munmap(ring_, ring_num_bytes_);
    if (ring_fd_ >= 0) close(ring_fd_);
    if (wake_fd_ >= 0) close(wake_fd_);
}

int UringQueue::init(unsigned depth) {
    io_uring_params params;
    memset(&params, 0, sizeof params);
    // One entry more than the transfers, for the eventfd read. The CQ has twice the entries: it cannot
    // overflow.
    long fd = syscall(__NR_io_uring_setup, depth + 1, &params);
    if (fd < 0) return -errno;
    ring_fd_ = static_cast<int>(fd);
    int status = check_opcodes();
    if (status == 0) status = map_rings(params);
    if (status < 0) return status;
    wake_fd_ = eventfd(0, EFD_CLOEXEC);
    if (wake_fd_ < 0) return -errno;
    stage_wake_read();
    return 0;
}

// IORING_OP_READ and WRITE came with 5.6, as did the probe itself.
int UringQueue::check_opcodes() const {
    constexpr unsigned kNumOps = 64;
    alignas(io_uring_probe) char memory[sizeof(io_uring_probe) + kNumOps * sizeof(io_uring_probe_op)] = {};
    auto* probe = reinterpret_cast<io_uring_probe*>(memory);
    if (syscall(__NR_io_uring_register, ring_fd_, IORING_REGISTER_PROBE, probe, kNumOps) < 0) {
        return errno == EINVAL ? -EOPNOTSUPP : -errno;
    }
    for (unsigned op : {unsigned(IORING_OP_READ), unsigned(IORING_OP_WRITE)}) {
        if (op > probe->last_op || !(probe->ops[op].flags & IO_URING_OP_SUPPORTED)) return -EOPNOTSUPP;
    }
    return 0;
}

int UringQueue::map_rings(const io_uring_params& params) {
    if (!(params.features & IORING_FEAT_SINGLE_MMAP)) return -EOPNOTSUPP;
    size_t sq_num_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    size_t cq_num_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    ring_num_bytes_ = sq_num_bytes > cq_num_bytes ? sq_num_bytes : cq_num_bytes;
    sqes_num_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    constexpr int kProtection = PROT_READ | PROT_WRITE;
    ring_ =
        mmap(nullptr, ring_num_bytes_, kProtection, MAP_SHARED | MAP_POPULATE, ring_fd_, IORING_OFF_SQ_RING);
    if (ring_ == MAP_FAILED) return -errno;
    sqes_ = mmap(nullptr, sqes_num_bytes_, kProtection, MAP_SHARED | MAP_POPULATE, ring_fd_, IORING_OFF_SQES);
    if (sqes_ == MAP_FAILED) return -errno;
    // A forked child must not be able to touch the parent's ring.
    madvise(ring_, ring_num_bytes_, MADV_DONTFORK);
    madvise(sqes_, sqes_num_bytes_, MADV_DONTFORK);

    char* base = static_cast<char*>(ring_);
    sq_head_ = reinterpret_cast<unsigned*>(base + params.sq_off.head);
    sq_tail_ = reinterpret_cast<unsigned*>(base + params.sq_off.tail);
    sq_mask_ = *reinterpret_cast<unsigned*>(base + params.sq_off.ring_mask);
    sq_array_ = reinterpret_cast<unsigned*>(base + params.sq_off.array);
    cq_head_ = reinterpret_cast<unsigned*>(base + params.cq_off.head);
    cq_tail_ = reinterpret_cast<unsigned*>(base + params.cq_off.tail);
    cq_mask_ = *reinterpret_cast<unsigned*>(base + params.cq_off.ring_mask);
    cqes_ = reinterpret_cast<io_uring_cqe*>(base + params.cq_off.cqes);
    return 0;
}

io_uring_sqe* UringQueue::next_sqe() {
    unsigned index = sq_local_tail_++ & sq_mask_;
    sq_array_[index] = index;
    auto* sqe = static_cast<io_uring_sqe*>(sqes_) + index;
    memset(sqe, 0, sizeof *sqe);
    return sqe;
}

void UringQueue::stage_wake_read() {
    io_uring_sqe* sqe = next_sqe();
    sqe->opcode = IORING_OP_READ;
    sqe->fd = wake_fd_;
    sqe->addr = reinterpret_cast<uint64_t>(&wake_value_);
    sqe->len = sizeof wake_value_;
    sqe->user_data = kWakeTag;
}

// Registered files and buffers would enter here: opcode, flags and buf_index depend on nothing else.
void UringQueue::stage(const Transfer& transfer) {
    io_uring_sqe* sqe = next_sqe();
    sqe->opcode = transfer.is_write ? IORING_OP_WRITE : IORING_OP_READ;
    sqe->fd = transfer.fd;
    sqe->addr = reinterpret_cast<uint64_t>(transfer.data);
    sqe->len = static_cast<uint32_t>(transfer.num_bytes);
    sqe->off = static_cast<uint64_t>(transfer.offset);
    sqe->user_data = transfer.tag;
}

int UringQueue::enter(unsigned num_submit, unsigned min_complete) const {
    unsigned flags = min_complete ? IORING_ENTER_GETEVENTS : 0;
    long status = syscall(__NR_io_uring_enter, ring_fd_, num_submit, min_complete, flags, nullptr, 0);
    return status < 0 ? -errno : static_cast<int>(status);
}

int UringQueue::submit_and_wait(int64_t timeout_ns) {
    // The entries must be visible to the kernel before the tail that announces them.
    store_release(sq_tail_, sq_local_tail_);
    unsigned num_staged = sq_local_tail_ - load_acquire(sq_head_);
    bool is_forever = timeout_ns < 0;
    if (num_staged == 0 && (timeout_ns == 0 || has_completion())) return 0;
    if (num_staged > 0 || is_forever) {
        int status = enter(num_staged, is_forever ? 1 : 0);
        if (status == -EAGAIN || status == -EBUSY) {
            // The kernel lacks memory for more requests: what it has must complete first. With nothing
            // to complete, the millisecond is the back-off; either way the entries stay staged.
            timeout_ns = 1'000'000;
        } else if (status < 0) {
            return status == -EINTR ? 0 : status;
        } else if (is_forever) {
            return 0;
        }
    }
    if (timeout_ns > 0 && !has_completion()) {
        pollfd ring = {ring_fd_, POLLIN, 0};
        timespec timeout = {timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
        if (ppoll(&ring, 1, &timeout, nullptr) < 0 && errno != EINTR) return -errno;
    }
    return 0;
}

void UringQueue::reap(std::vector<Completion>* completions) {
    unsigned head = *cq_head_;
    // Entries up to the tail are complete only once the tail has been seen.
    unsigned tail = load_acquire(cq_tail_);
    for (; head != tail; ++head) {
        const io_uring_cqe& cqe = cqes_[head & cq_mask_];
        if (cqe.user_data == kWakeTag) {
            stage_wake_read();
        } else {
            completions->push_back({cqe.user_data, cqe.res});
        }
    }
    // The kernel may reuse the entries from here on.
    store_release(cq_head_, head);
}

void UringQueue::wake() {
    uint64_t one = 1;
    // Fails only when the counter is full, and then the queue is awake anyway.
    [[maybe_unused]] ssize_t written = write(wake_fd_, &one, sizeof one);
}

}  // namespace

int make_uring_queue(unsigned depth, std::unique_ptr<KernelQueue>* queue) {
    auto made = std::make_unique<UringQueue>();
    int status = made->init(depth);
    if (status == 0) *queue = std::move(made);
    return status;
}

}  // namespace offloadzero::aio

#else  // headers older than io_uring

namespace offloadzero::aio {

int make_uring_queue(unsigned, std::unique_ptr<KernelQueue>*) { return -ENOSYS; }

}  // namespace offloadzero::aio

#endif
