// One thread with one kernel queue: takes blocks from the engine, moves them, checks every completion.
#pragma once

#include <deque>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "bounce.h"
#include "engine.h"
#include "kernel_queue.h"

namespace offloadzero::aio {

// A piece of an operation on its way.
struct Block {
    enum class Phase {
        TRANSFER,       // the bytes asked for, direct or through the bounce buffer
        READ_GRANULE,   // part of a granule, step 1: read the granule
        WRITE_GRANULE,  // step 2: write it back, changed
        APPEND,         // step 2 where the file ends inside the granule
    };

    // The range that the kernel is asked to move. A transfer is complete when `num_needed` bytes are there; a
    // short one continues at a multiple of `granularity`.
    struct Window {
        bool is_write = false;
        int fd = -1;
        char* data = nullptr;
        int64_t offset = 0;
        size_t num_bytes = 0;
        size_t num_needed = 0;
        size_t granularity = 1;
    };

    std::shared_ptr<Operation> operation;
    Piece piece;
    Phase phase = Phase::TRANSFER;
    Window window;
    size_t num_done = 0;  // of the window
    Bounce bounce;
    bool is_prepared = false;
    bool is_fixed = false;    // last staged to or from registered memory
    unsigned num_stalls = 0;  // short transfers in a row that got no further
    unsigned num_busy = 0;    // EINTR and EAGAIN
    BlockFault fault;
};

class Worker {
  public:
    Worker(Engine* engine, size_t index, std::unique_ptr<KernelQueue> kernel, unsigned depth);
    // The thread must have been joined.
    ~Worker() = default;

    int start_thread();  // 0 when it is running, or -errno
    void join() {
        if (thread_.joinable()) thread_.join();
    }
    void wake() { kernel_->wake(); }

    // The engine's mutex guards these.
    bool is_waiting = false;       // in the kernel with room for more: needs a wake() to see new work
    std::deque<BlockPtr> granted;  // blocks of this worker whose granule lock came free

  private:
    struct Deferred {
        int64_t due_ns;
        BlockPtr block;
        bool is_retry;  // run it again; otherwise deliver `result`, and until then its place in the queue is
                        // taken
        int64_t result;
    };

    void run(std::promise<int> begun);
    int serve();
    void fill();
    void reap();
    void run_deferred();
    int64_t wait_timeout_ns() const;
    bool is_idle() const { return num_in_kernel_ == 0 && deferred_.empty() && ready_.empty(); }

    void start(BlockPtr block);
    int prepare(Block* block);
    int take_bounce(Block* block, size_t num_bytes);
    void stage(BlockPtr block);
    void on_completion(BlockPtr block, int64_t result);
    void on_result(BlockPtr block, int64_t result);
    void on_short(BlockPtr block, int64_t result);
    void retry_busy(BlockPtr block, int error);
    void end_phase(BlockPtr block);
    void append(BlockPtr block);
    void finish(BlockPtr block, int error);
    void resume(BlockPtr block) { ready_.push_front(std::move(block)); }
    void defer(BlockPtr block, int64_t delay_ns, bool is_retry, int64_t result);

    Engine& engine_;
    const size_t index_;
    QueueSlots slots_;
    std::unique_ptr<KernelQueue> kernel_;
    const unsigned depth_;
    unsigned num_in_kernel_ = 0;  // with the blocks whose injected delay makes them look so
    std::vector<Completion> completions_;
    // Declared before the lists of blocks, which hold buffers of the pool.
    BouncePool granule_pool_;
    BouncePool block_pool_;
    std::deque<BlockPtr> ready_;  // blocks begun, with more to transfer
    std::vector<Deferred> deferred_;
    std::thread thread_;
};

}  // namespace offloadzero::aio
