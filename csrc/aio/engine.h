// The engine: one queue over all operations and files, served in blocks by one or more workers.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <queue>
#include <unordered_map>
#include <vector>

#include "faults.h"
#include "granule_locks.h"
#include "kernel_queue.h"
#include "operation.h"
#include "registry.h"

namespace offloadzero::aio {

class Worker;
struct Block;
// The owner of this pointer has the block. The kernel has a bare pointer, the transfer's tag: Worker::stage()
// gives it away and Worker::reap() takes it back.
using BlockPtr = std::unique_ptr<Block>;

enum class KernelInterface { URING, NATIVE_AIO };

struct EngineOptions {
    KernelInterface kernel = KernelInterface::URING;
    size_t block_size = 1 << 20;       // a multiple of 4096
    unsigned queue_depth = 32;         // transfers in the kernel at once, over all workers
    unsigned num_threads = 1;          // workers; each has its own kernel queue and its share of the depth
    int64_t operation_timeout_ns = 0;  // an operation that takes longer fails with ETIMEDOUT; 0: no limit
    UringOptions uring;
};

struct EngineStats {
    uint64_t bytes_read = 0;
    uint64_t bytes_written = 0;
    uint64_t operations = 0;
    uint64_t blocks = 0;
    uint64_t retries = 0;  // transfers repeated or continued: short, EINTR, EAGAIN
    uint64_t bounced = 0;  // blocks that went through a bounce buffer
    uint64_t fixed = 0;    // transfers to or from registered memory
    uint64_t registered_bytes = 0;
};

class Engine {
  public:
    // Returns 0, or -errno when the kernel refuses the interface.
    static int create(const EngineOptions& options, std::unique_ptr<Engine>* engine);
    // Cancels operations that have not started, waits for the others.
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    size_t block_size() const { return options_.block_size; }
    // False in a forked child: no other method may be called there, not even the destructor.
    bool is_in_own_process() const { return getpid() == pid_; }

    // Opens a file as File::open does, and makes it known to the kernel queues.
    int open(const std::string& path, OpenOptions options, std::shared_ptr<File>* file);
    // Returns whether the file was opened by this engine.
    bool owns(const File& file) const { return file.is_known_to(*registry_); }
    // These are the methods of Registry.
    int register_buffer(char* data, size_t num_bytes) { return registry_->add_buffer(data, num_bytes); }
    bool unregister_buffer(char* data) { return registry_->remove_buffer(data); }

    // Returns 0 or -ESHUTDOWN. Operations in flight together must not overlap unless both read.
    int submit(OperationRequest request, std::shared_ptr<Operation>* operation);
    // Waits with Event::wait() on `done`. An operation whose deadline passes is failed with ETIMEDOUT here,
    // in the caller's thread, so that a device that hangs and blocks the worker cannot delay the news.
    int wait(Operation* operation, int64_t timeout_ns);
    bool is_done(Operation* operation);
    // Moves the tokens of operations whose memory the engine will not touch again.
    std::vector<uint64_t> collect_finished();
    // Ends all operations and the threads. `should_cancel`: blocks that have not reached the kernel are
    // dropped, and their operations end with ECANCELED as soon as the other blocks are over. Idempotent.
    void close(bool should_cancel);

    Faults& faults() { return faults_; }
    EngineStats stats() const;

  private:
    friend class Worker;

    struct RunsLater {
        bool operator()(const std::shared_ptr<Operation>& a, const std::shared_ptr<Operation>& b) const {
            if (a->request.priority != b->request.priority) return a->request.priority > b->request.priority;
            return a->sequence > b->sequence;
        }
    };

    struct Waiter {
        Worker* worker;
        BlockPtr block;
    };

    explicit Engine(const EngineOptions& options);

    // For workers: the next block to run, new or with a granule's lock just granted; null when there is none,
    // and the worker is then marked as waiting: the thread that brings work wakes it.
    BlockPtr take_block(Worker* worker);
    void block_finished(BlockPtr block, int error, int64_t error_offset);
    // The queues are idle and close() was called: the worker may leave.
    bool should_exit();
    // A worker's kernel queue broke: every operation ends with `error`, and no token of one that was running
    // is ever collected, as the kernel may still write to its memory.
    void abandon(int error);

    // These are called with the mutex held.
    BlockPtr cut_block(Worker* worker);
    void release_granule(const Block& block);
    bool drop_if_late(Operation* operation);
    void complete(const std::shared_ptr<Operation>& operation);
    void complete_if_finished(const std::shared_ptr<Operation>& operation);
    void wake(Worker* worker);
    void wake_for(size_t num_blocks);

    const EngineOptions options_;
    const pid_t pid_;
    const std::shared_ptr<Registry> registry_;
    std::vector<std::unique_ptr<Worker>> workers_;
    Faults faults_;

    std::mutex mutex_;
    std::priority_queue<std::shared_ptr<Operation>, std::vector<std::shared_ptr<Operation>>, RunsLater>
        queue_;
    GranuleLocks<Waiter> granule_locks_;
    std::vector<uint64_t> finished_;
    std::unordered_map<Operation*, std::shared_ptr<Operation>> outstanding_;
    uint64_t next_sequence_ = 0;
    int abandoned_ = 0;
    bool is_closing_ = false;
    std::atomic<bool> is_cancelling_{false};

    std::mutex close_mutex_;

    std::atomic<uint64_t> bytes_read_{0};
    std::atomic<uint64_t> bytes_written_{0};
    std::atomic<uint64_t> num_operations_{0};
    std::atomic<uint64_t> num_blocks_{0};
    std::atomic<uint64_t> num_retries_{0};
    std::atomic<uint64_t> num_bounced_{0};
    std::atomic<uint64_t> num_fixed_{0};
};

}  // namespace offloadzero::aio
