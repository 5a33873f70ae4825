// io_uring as a kernel queue: reads and writes, and one read of an eventfd for wake().
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "kernel_queue.h"
#include "uring_ring.h"

namespace offloadzero::aio {
namespace {

using namespace uring;

constexpr uint64_t WAKE_TAG = 0;
constexpr int64_t BACK_OFF_NS = 1'000'000;

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
    int init_ring(unsigned num_entries, const UringOptions& options);
    void register_tables(const UringOptions& options);
    void stage_wake_read();

    Ring ring_;
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
    // One entry more than the transfers, for the eventfd read.
    int status = init_ring(depth + 1, options);
    if (status < 0) return status;
    register_tables(options);
    wake_fd_ = eventfd(0, EFD_CLOEXEC);
    return wake_fd_ < 0 ? -errno : 0;
}

int UringQueue::init_ring(unsigned num_entries, const UringOptions& options) {
    constexpr uint32_t DEFERRED = SETUP_SINGLE_ISSUER | SETUP_DEFER_TASKRUN | SETUP_DISABLED;
    if (options.has_defer_taskrun) {
        int status = ring_.init(num_entries, DEFERRED);
        if (status != -EINVAL) return status;
        status = ring_.init(num_entries, SETUP_COOP_TASKRUN);
        if (status != -EINVAL) return status;
    }
    return ring_.init(num_entries, 0);
}

// The tables start empty. If the kernel refuses one the queue works without it: stage() then never gets a
// slot.
void UringQueue::register_tables(const UringOptions& options) {
    rlimit limit;
    if (options.has_fixed_files && getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        int num = static_cast<int>(std::min<rlim_t>(NUM_FILE_SLOTS, limit.rlim_cur));
        std::vector<int> empty(static_cast<size_t>(num), -1);
        int status = ring_.register_resource(REGISTER_FILES, empty.data(), static_cast<unsigned>(num));
        num_file_slots_ = status == 0 ? num : 0;
    }
    if (options.has_fixed_buffers) {
        ResourceRegister sparse = {NUM_BUFFER_SLOTS, REGISTER_SPARSE, 0, 0, 0};
        int status = ring_.register_resource(REGISTER_BUFFERS2, &sparse, sizeof sparse);
        num_buffer_slots_ = status == 0 ? NUM_BUFFER_SLOTS : 0;
    }
}

int UringQueue::begin() {
    int status = ring_.enable();
    if (status == 0) stage_wake_read();
    return status;
}

// The eventfd read must not outlive `wake_value_`.
void UringQueue::end() {
    is_ending_ = true;
    wake();
    std::vector<Completion> none;
    while (is_waking_ && submit_and_wait(WAIT_FOREVER) == 0) reap(&none);
}

int UringQueue::set_file(int slot, int fd) {
    if (slot >= num_file_slots_) return -EOPNOTSUPP;
    FilesUpdate update = {static_cast<uint32_t>(slot), 0, reinterpret_cast<uint64_t>(&fd)};
    return ring_.register_resource(REGISTER_FILES_UPDATE, &update, 1);
}

int UringQueue::set_buffer(int slot, char* data, size_t num_bytes) {
    if (slot >= num_buffer_slots_) return -EOPNOTSUPP;
    iovec memory = {data, num_bytes};
    ResourceUpdate update = {static_cast<uint32_t>(slot), 0, reinterpret_cast<uint64_t>(&memory), 0, 1, 0};
    return ring_.register_resource(REGISTER_BUFFERS_UPDATE, &update, sizeof update);
}

void UringQueue::stage_wake_read() {
    Sqe* sqe = ring_.next_sqe();
    sqe->opcode = OP_READ;
    sqe->fd = wake_fd_;
    sqe->address = reinterpret_cast<uint64_t>(&wake_value_);
    sqe->num_bytes = sizeof wake_value_;
    sqe->user_data = WAKE_TAG;
    is_waking_ = true;
}

void UringQueue::stage(const Transfer& transfer) {
    Sqe* sqe = ring_.next_sqe();
    bool is_fixed = transfer.buffer_slot != NO_SLOT;
    if (transfer.is_write) {
        sqe->opcode = is_fixed ? OP_WRITE_FIXED : OP_WRITE;
    } else {
        sqe->opcode = is_fixed ? OP_READ_FIXED : OP_READ;
    }
    if (is_fixed) sqe->buffer_slot = static_cast<uint16_t>(transfer.buffer_slot);
    bool has_slot = transfer.file_slot != NO_SLOT;
    sqe->flags = has_slot ? SQE_FIXED_FILE : 0;
    sqe->fd = has_slot ? transfer.file_slot : transfer.fd;
    sqe->address = reinterpret_cast<uint64_t>(transfer.data);
    sqe->num_bytes = static_cast<uint32_t>(transfer.num_bytes);
    sqe->offset = static_cast<uint64_t>(transfer.offset);
    sqe->user_data = transfer.tag;
}

int UringQueue::submit_and_wait(int64_t timeout_ns) {
    int status = ring_.enter(timeout_ns);
    if (status != -EAGAIN && status != -EBUSY) return status;
    // The kernel lacks memory for more requests: what it has must complete first. With nothing to complete,
    // the millisecond is the back-off; either way the entries stay staged.
    timespec pause = {0, BACK_OFF_NS};
    nanosleep(&pause, nullptr);
    return 0;
}

void UringQueue::reap(std::vector<Completion>* completions) {
    bool is_woken = false;
    ring_.reap([&](const Cqe& cqe) {
        if (cqe.user_data == WAKE_TAG) {
            is_woken = true;
        } else {
            completions->push_back({cqe.user_data, cqe.result});
        }
    });
    if (!is_woken) return;
    is_waking_ = false;
    if (!is_ending_) stage_wake_read();
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
