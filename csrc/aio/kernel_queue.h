// One kernel submission queue: io_uring or Linux native AIO behind the same few calls.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace offloadzero::aio {

constexpr int NO_SLOT = -1;

struct Transfer {
    bool is_write;
    int fd;
    int file_slot;    // set_file() put `fd` there, or NO_SLOT
    int buffer_slot;  // all of `data` lies in what set_buffer() put there, or NO_SLOT
    char* data;
    size_t num_bytes;
    int64_t offset;
    uint64_t tag;  // comes back in the completion; never 0
};

struct Completion {
    uint64_t tag;
    int64_t result;  // bytes transferred, or -errno
};

constexpr int64_t WAIT_FOREVER = -1;

// All methods but wake() belong to the one thread that called begin().
class KernelQueue {
  public:
    virtual ~KernelQueue() = default;

    // The first and the last call of the owning thread; no transfer is in flight at end(). They return 0 or
    // -errno.
    virtual int begin() { return 0; }
    virtual void end() {}

    // Registers a descriptor or memory under a slot, which stage() may then name; a negative fd and a null
    // address clear it. Returns 0 or -errno (EOPNOTSUPP: the queue has no such slots; ENOMEM:
    // RLIMIT_MEMLOCK).
    virtual int set_file(int /*slot*/, int /*fd*/) { return -EOPNOTSUPP; }
    virtual int set_buffer(int /*slot*/, char* /*data*/, size_t /*num_bytes*/) { return -EOPNOTSUPP; }

    // Prepares one transfer. The caller keeps at most `depth` transfers between stage() and reap().
    virtual void stage(const Transfer& transfer) = 0;

    // Hands staged transfers to the kernel, then blocks until a completion, a wake() or the timeout
    // (0: does not block). May return early. Returns 0, or -errno when the queue is beyond repair.
    virtual int submit_and_wait(int64_t timeout_ns) = 0;

    // Appends the completed transfers; never blocks.
    virtual void reap(std::vector<Completion>* completions) = 0;

    // Ends a submit_and_wait() in progress, or the next one. Any thread may call it.
    virtual void wake() = 0;
};

// Features of newer kernels. A queue works without those that its kernel lacks.
struct UringOptions {
    bool has_fixed_files = true;
    bool has_fixed_buffers = true;
    bool has_defer_taskrun = true;  // completions are delivered where the owner waits, not by interrupting it
};

// The slots of one queue.
constexpr int NUM_FILE_SLOTS = 256;
constexpr int NUM_BUFFER_SLOTS = 1024;
constexpr size_t MAX_BUFFER_NUM_BYTES = 1 << 30;  // of one slot, the kernel's limit

// Returns 0, or -errno when the kernel refuses (EPERM: a seccomp filter; ENOSYS: not built in; ...).
int make_uring_queue(unsigned depth, const UringOptions& options, std::unique_ptr<KernelQueue>* queue);
int make_native_aio_queue(unsigned depth, std::unique_ptr<KernelQueue>* queue);

}  // namespace offloadzero::aio
