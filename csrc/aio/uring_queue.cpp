// io_uring as a kernel queue: reads and writes, and one read of an eventfd for wake().
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <unordered_map>

#include "clock.h"
#include "kernel_queue.h"
#include "uring_ring.h"

namespace offloadzero::aio {
namespace {

using namespace uring;

constexpr uint64_t kWakeTag = 0;
constexpr int64_t kBackOffNs = 1'000'000;

// [Note: the polled ring]
// A ring made with IORING_SETUP_IOPOLL takes direct transfers only, and nothing can end a wait on it: not an
// eventfd, not another ring. So with has_iopoll there are two rings; while polled transfers are in flight the
// owner spins over both, otherwise it sleeps on the main one. A file or a drive without polling answers
// EOPNOTSUPP, and the transfer goes again through the main ring.
class UringQueue final : public KernelQueue {
  public:
    ~UringQueue() override;
    int init(unsigned depth, const UringOptions& options);

    int begin() override;
    void end() override;
    int set_file(int slot, int fd) override;
    int set_buffer(int slot, char* data, size_t num_bytes) override;
    void stage(const Transfer& transfer) override;
    int submit_and_wait(int64_t timeout_ns) override;
    void reap(std::vector<Completion>* completions) override;
    void wake() override;

  private:
    int init_main_ring(unsigned num_entries, const UringOptions& options);
    void register_tables(const UringOptions& options);
    int register_on_all(unsigned op, void* argument, unsigned num);
    void stage_wake_read();
    static void fill(Sqe* sqe, const Transfer& transfer);
    int spin(int64_t timeout_ns);
    void reap_polled(std::vector<Completion>* completions);

    Ring main_;
    std::unique_ptr<Ring> polled_;
    std::unordered_map<uint64_t, Transfer> polled_transfers_;  // in flight on the polled ring, by tag
    bool is_polling_refused_ = false;
    int num_file_slots_ = 0;
    int num_buffer_slots_ = 0;
    int wake_fd_ = -1;
    uint64_t wake_value_ = 0;
    bool is_waking_ = false;  // the wake read is in flight
    bool is_ending_ = false;
};

UringQueue::~UringQueue() {
    if (wake_fd_ >= 0) close(wake_fd_);
}

int UringQueue::init(unsigned depth, const UringOptions& options) {
    if (options.has_sqpoll && options.has_iopoll) return -EINVAL;
    // One entry more than the transfers, for the eventfd read.
    int status = init_main_ring(depth + 1, options);
    if (status < 0) return status;
    if (options.has_iopoll) {
        polled_ = std::make_unique<Ring>();
        status = polled_->init(depth, kSetupIoPoll);
        if (status < 0) return status;
    }
    register_tables(options);
    wake_fd_ = eventfd(0, EFD_CLOEXEC);
    return wake_fd_ < 0 ? -errno : 0;
}

int UringQueue::init_main_ring(unsigned num_entries, const UringOptions& options) {
    constexpr uint32_t kDeferred = kSetupSingleIssuer | kSetupDeferTaskrun | kSetupDisabled;
    if (options.has_sqpoll) return main_.init(num_entries, kSetupSqPoll);
    // Deferred completions would cost the spinning owner one more system call in each turn.
    if (options.has_defer_taskrun && !options.has_iopoll) {
        int status = main_.init(num_entries, kDeferred);
        if (status != -EINVAL) return status;
        status = main_.init(num_entries, kSetupCoopTaskrun);
        if (status != -EINVAL) return status;
    }
    return main_.init(num_entries, 0);
}

// The tables start empty. What is refused is done without: stage() is then never given a slot.
void UringQueue::register_tables(const UringOptions& options) {
    rlimit limit;
    if (options.has_fixed_files && getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        int num = static_cast<int>(std::min<rlim_t>(kNumFileSlots, limit.rlim_cur));
        std::vector<int> empty(static_cast<size_t>(num), -1);
        int status = register_on_all(kRegisterFiles, empty.data(), static_cast<unsigned>(num));
        num_file_slots_ = status == 0 ? num : 0;
    }
    if (options.has_fixed_buffers) {
        ResourceRegister sparse = {kNumBufferSlots, kRegisterSparse, 0, 0, 0};
        int status = register_on_all(kRegisterBuffers2, &sparse, sizeof sparse);
        num_buffer_slots_ = status == 0 ? kNumBufferSlots : 0;
    }
}

int UringQueue::begin() {
    int status = main_.enable();
    if (status == 0) stage_wake_read();
    return status;
}

// The eventfd read must not outlive `wake_value_`.
void UringQueue::end() {
    is_ending_ = true;
    wake();
    std::vector<Completion> none;
    while (is_waking_ && submit_and_wait(kWaitForever) == 0) reap(&none);
}

int UringQueue::register_on_all(unsigned op, void* argument, unsigned num) {
    int status = main_.register_resource(op, argument, num);
    return status == 0 && polled_ ? polled_->register_resource(op, argument, num) : status;
}

int UringQueue::set_file(int slot, int fd) {
    if (slot >= num_file_slots_) return -EOPNOTSUPP;
    FilesUpdate update = {static_cast<uint32_t>(slot), 0, reinterpret_cast<uint64_t>(&fd)};
    return register_on_all(kRegisterFilesUpdate, &update, 1);
}

int UringQueue::set_buffer(int slot, char* data, size_t num_bytes) {
    if (slot >= num_buffer_slots_) return -EOPNOTSUPP;
    iovec memory = {data, num_bytes};
    ResourceUpdate update = {static_cast<uint32_t>(slot), 0, reinterpret_cast<uint64_t>(&memory), 0, 1, 0};
    return register_on_all(kRegisterBuffersUpdate, &update, sizeof update);
}

void UringQueue::stage_wake_read() {
    Sqe* sqe = main_.next_sqe();
    sqe->opcode = kOpRead;
    sqe->fd = wake_fd_;
    sqe->address = reinterpret_cast<uint64_t>(&wake_value_);
    sqe->num_bytes = sizeof wake_value_;
    sqe->user_data = kWakeTag;
    is_waking_ = true;
}

void UringQueue::fill(Sqe* sqe, const Transfer& transfer) {
    bool is_fixed = transfer.buffer_slot != kNoSlot;
    if (transfer.is_write) {
        sqe->opcode = is_fixed ? kOpWriteFixed : kOpWrite;
    } else {
        sqe->opcode = is_fixed ? kOpReadFixed : kOpRead;
    }
    if (is_fixed) sqe->buffer_slot = static_cast<uint16_t>(transfer.buffer_slot);
    bool has_slot = transfer.file_slot != kNoSlot;
    sqe->flags = has_slot ? kSqeFixedFile : 0;
    sqe->fd = has_slot ? transfer.file_slot : transfer.fd;
    sqe->address = reinterpret_cast<uint64_t>(transfer.data);
    sqe->num_bytes = static_cast<uint32_t>(transfer.num_bytes);
    sqe->offset = static_cast<uint64_t>(transfer.offset);
    sqe->user_data = transfer.tag;
}

void UringQueue::stage(const Transfer& transfer) {
    bool is_polled = polled_ && transfer.is_direct && !is_polling_refused_;
    if (is_polled) polled_transfers_.emplace(transfer.tag, transfer);
    fill((is_polled ? *polled_ : main_).next_sqe(), transfer);
}

int UringQueue::submit_and_wait(int64_t timeout_ns) {
    int status = polled_transfers_.empty() ? main_.enter(timeout_ns) : spin(timeout_ns);
    if (status != -EAGAIN && status != -EBUSY) return status;
    // The kernel lacks memory for more requests: what it has must complete first. With nothing to complete,
    // the millisecond is the back-off; either way the entries stay staged.
    timespec pause = {0, kBackOffNs};
    nanosleep(&pause, nullptr);
    return 0;
}

int UringQueue::spin(int64_t timeout_ns) {
    int64_t deadline = timeout_ns < 0 ? INT64_MAX : now_ns() + timeout_ns;
    do {
        int status = main_.enter(0);
        if (status == 0) status = polled_->enter(0);
        if (status < 0) return status;
        if (main_.has_completion() || polled_->has_completion()) return 0;
    } while (now_ns() < deadline);
    return 0;
}

void UringQueue::reap(std::vector<Completion>* completions) {
    if (polled_) reap_polled(completions);
    bool is_woken = false;
    main_.reap([&](const Cqe& cqe) {
        if (cqe.user_data == kWakeTag) {
            is_woken = true;
        } else {
            completions->push_back({cqe.user_data, cqe.result});
        }
    });
    if (!is_woken) return;
    is_waking_ = false;
    if (!is_ending_) stage_wake_read();
}

void UringQueue::reap_polled(std::vector<Completion>* completions) {
    polled_->reap([&](const Cqe& cqe) {
        auto transfer = polled_transfers_.extract(cqe.user_data);
        if (cqe.result == -EOPNOTSUPP) {
            is_polling_refused_ = true;
            transfer.mapped().buffer_slot = kNoSlot;  // may have been cleared since
            fill(main_.next_sqe(), transfer.mapped());
        } else {
            completions->push_back({cqe.user_data, cqe.result});
        }
    });
}

void UringQueue::wake() {
    uint64_t one = 1;
    // Fails only when the counter is full, and then the queue is awake anyway.
    [[maybe_unused]] ssize_t written = write(wake_fd_, &one, sizeof one);
}

}  // namespace

int make_uring_queue(unsigned depth, const UringOptions& options, std::unique_ptr<KernelQueue>* queue) {
    auto made = std::make_unique<UringQueue>();
    int status = made->init(depth, options);
    if (status == 0) *queue = std::move(made);
    return status;
}

}  // namespace offloadzero::aio
