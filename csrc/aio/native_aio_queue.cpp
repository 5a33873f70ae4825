// Linux native AIO (the kernel interface under libaio) through raw system calls.
#include <linux/aio_abi.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>

#include "kernel_queue.h"

namespace offloadzero::aio {
namespace {

// One eventfd carries both completions (IOCB_FLAG_RESFD) and wake(): a blocking read of it waits for either.
class NativeAioQueue final : public KernelQueue {
  public:
    ~NativeAioQueue() override;
    int init(unsigned depth);

    void stage(const Transfer& transfer) override;
    int submit_and_wait(int64_t timeout_ns) override;
    void reap(std::vector<Completion>* completions) override;
    void wake() override;

  private:
    bool submit_staged();
    int wait(int64_t timeout_ns) const;

    aio_context_t context_ = 0;
    int event_fd_ = -1;
    std::vector<iocb> iocbs_;     // one per slot; the kernel copies them in io_submit
    std::vector<iocb*> staged_;   // in order
    std::vector<unsigned> free_;  // slots not staged
    std::vector<io_event> events_;
    std::vector<Completion> refused_;  // what io_submit itself turned down
};

NativeAioQueue::~NativeAioQueue() {
    if (context_ != 0) syscall(SYS_io_destroy, context_);
    if (event_fd_ >= 0) close(event_fd_);
}

int NativeAioQueue::init(unsigned depth) {
    if (syscall(SYS_io_setup, depth, &context_) < 0) return -errno;
    event_fd_ = eventfd(0, EFD_CLOEXEC);
    if (event_fd_ < 0) return -errno;
    iocbs_.resize(depth);
    events_.resize(depth);
    for (unsigned slot = 0; slot < depth; ++slot) free_.push_back(slot);
    return 0;
}

void NativeAioQueue::stage(const Transfer& transfer) {
    iocb* request = &iocbs_[free_.back()];
    free_.pop_back();
    memset(request, 0, sizeof *request);
    request->aio_lio_opcode = transfer.is_write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
    request->aio_fildes = static_cast<uint32_t>(transfer.fd);
    request->aio_buf = reinterpret_cast<uint64_t>(transfer.data);
    request->aio_nbytes = transfer.num_bytes;
    request->aio_offset = transfer.offset;
    request->aio_data = transfer.tag;
    request->aio_flags = IOCB_FLAG_RESFD;
    request->aio_resfd = static_cast<uint32_t>(event_fd_);
    staged_.push_back(request);
}

// Returns false when the kernel takes no more for the moment. io_submit stops at the first request it refuses
// and reports the reason only when that request is the first of the call.
bool NativeAioQueue::submit_staged() {
    size_t num_taken = 0;
    bool is_busy = false;
    while (num_taken < staged_.size() && !is_busy) {
        long status = syscall(SYS_io_submit, context_, staged_.size() - num_taken, &staged_[num_taken]);
        long num_done = status;
        if (status < 0) {
            is_busy = errno == EAGAIN;
            num_done = is_busy ? 0 : 1;
            if (!is_busy) refused_.push_back({staged_[num_taken]->aio_data, -errno});
        }
        for (long i = 0; i < num_done; ++i, ++num_taken) {
            free_.push_back(static_cast<unsigned>(staged_[num_taken] - iocbs_.data()));
        }
    }
    staged_.erase(staged_.begin(), staged_.begin() + static_cast<ptrdiff_t>(num_taken));
    return !is_busy;
}

int NativeAioQueue::wait(int64_t timeout_ns) const {
    if (timeout_ns > 0) {
        pollfd events = {event_fd_, POLLIN, 0};
        timespec timeout = {timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
        int num_ready = ppoll(&events, 1, &timeout, nullptr);
        if (num_ready < 0) return errno == EINTR ? 0 : -errno;
        if (num_ready == 0) return 0;
    }
    uint64_t count;
    // Zeroes the counter before reap() looks: a later completion makes the next read return at once.
    if (read(event_fd_, &count, sizeof count) < 0 && errno != EINTR) return -errno;
    return 0;
}

int NativeAioQueue::submit_and_wait(int64_t timeout_ns) {
    bool is_taken = submit_staged();
    if (timeout_ns == 0 || !refused_.empty()) return 0;
    // Some requests are left over: wait for a completion that makes room, or back off a millisecond.
    return wait(is_taken ? timeout_ns : 1'000'000);
}

void NativeAioQueue::reap(std::vector<Completion>* completions) {
    completions->insert(completions->end(), refused_.begin(), refused_.end());
    refused_.clear();
    timespec no_time = {0, 0};
    long num_events = syscall(SYS_io_getevents, context_, 0, events_.size(), events_.data(), &no_time);
    for (long i = 0; i < num_events; ++i) completions->push_back({events_[i].data, events_[i].res});
}

void NativeAioQueue::wake() {
    uint64_t one = 1;
    // Fails only when the counter is full, and then the queue is awake anyway.
    [[maybe_unused]] ssize_t written = write(event_fd_, &one, sizeof one);
}

}  // namespace

int make_native_aio_queue(unsigned depth, std::unique_ptr<KernelQueue>* queue) {
    auto made = std::make_unique<NativeAioQueue>();
    int status = made->init(depth);
    if (status == 0) *queue = std::move(made);
    return status;
}

}  // namespace offloadzero::aio
