// One kernel submission queue: io_uring or Linux native AIO behind the same four verbs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace offloadzero::aio {

struct Transfer {
    bool is_write;
    int fd;
    char* data;
    size_t num_bytes;
    int64_t offset;
    uint64_t tag;  // comes back in the completion; never 0
};

struct Completion {
    uint64_t tag;
    int64_t result;  // bytes transferred, or -errno
};

constexpr int64_t kWaitForever = -1;

// All methods but wake() belong to the one thread that owns the queue.
class KernelQueue {
  public:
    virtual ~KernelQueue() = default;

    // Prepares one transfer. The caller keeps at most `depth` transfers between stage() and reap().
    virtual void stage(const Transfer& transfer) = 0;

    // Hands staged transfers to the kernel, then blocks until a completion, a wake() or the timeout
    // (0: does not block). May return early for no reason. 0, or -errno when the queue is beyond repair.
    virtual int submit_and_wait(int64_t timeout_ns) = 0;

    // Appends what has completed; never blocks.
    virtual void reap(std::vector<Completion>* completions) = 0;

    // Ends a submit_and_wait() in progress, or the next one. Any thread.
    virtual void wake() = 0;
};

// 0, or -errno when the kernel refuses (EPERM: a seccomp filter; ENOSYS: not built in; ...).
int make_uring_queue(unsigned depth, std::unique_ptr<KernelQueue>* queue);
int make_native_aio_queue(unsigned depth, std::unique_ptr<KernelQueue>* queue);

}  // namespace offloadzero::aio
