#include "engine.h"

#include <algorithm>
#include <cerrno>

#include "worker.h"

namespace offloadzero::aio {

Engine::Engine(const EngineOptions& options)
    : options_(options), pid_(getpid()), registry_(std::make_shared<Registry>(options.num_threads)) {}

int Engine::create(const EngineOptions& options, std::unique_ptr<Engine>* engine) {
    std::unique_ptr<Engine> made(new Engine(options));
    unsigned depth = (options.queue_depth + options.num_threads - 1) / options.num_threads;
    std::vector<std::unique_ptr<Worker>> workers;
    for (unsigned i = 0; i < options.num_threads; ++i) {
        std::unique_ptr<KernelQueue> kernel;
        bool is_uring = options.kernel == KernelInterface::URING;
        int status = is_uring ? make_uring_queue(depth, options.uring, &kernel)
                              : make_native_aio_queue(depth, &kernel);
        if (status < 0) return status;
        workers.push_back(std::make_unique<Worker>(made.get(), i, std::move(kernel), depth));
    }
    made->workers_ = std::move(workers);
    for (auto& worker : made->workers_) {
        int status = worker->start_thread();
        if (status < 0) return status;
    }
    *engine = std::move(made);
    return 0;
}

Engine::~Engine() { close(true); }

int Engine::open(const std::string& path, OpenOptions options, std::shared_ptr<File>* file) {
    options.block_size = options_.block_size;
    int status = File::open(path, options, file);
    if (status == 0) (*file)->join(registry_);
    return status;
}

int Engine::submit(OperationRequest request, std::shared_ptr<Operation>* operation) {
    auto submitted = std::make_shared<Operation>(std::move(request));
    size_t num_bytes = submitted->request.num_bytes;
    std::lock_guard<std::mutex> guard(mutex_);
    if (is_closing_) return -ESHUTDOWN;
    if (abandoned_ != 0) return -abandoned_;
    *operation = submitted;
    submitted->sequence = next_sequence_++;
    if (options_.operation_timeout_ns > 0) submitted->deadline_ns = now_ns() + options_.operation_timeout_ns;
    outstanding_.emplace(submitted.get(), submitted);
    if (num_bytes == 0) {
        complete(submitted);
        return 0;
    }
    queue_.push(submitted);
    wake_for((num_bytes + options_.block_size - 1) / options_.block_size);
    return 0;
}

int Engine::wait(Operation* operation, int64_t timeout_ns) {
    int64_t deadline_ns = operation->deadline_ns;
    if (deadline_ns != 0) {
        int64_t left_ns = std::max<int64_t>(deadline_ns - now_ns(), 0);
        if (timeout_ns < 0 || left_ns <= timeout_ns) {
            int status = operation->done.wait(left_ns);
            if (status != -ETIMEDOUT || is_done(operation)) return status == -EINTR ? status : 0;
        }
    }
    return operation->done.wait(timeout_ns);
}

bool Engine::is_done(Operation* operation) {
    if (operation->done.is_set() || !operation->is_late()) return operation->done.is_set();
    std::lock_guard<std::mutex> guard(mutex_);
    return drop_if_late(operation);
}

// Returns whether the operation is done now.
bool Engine::drop_if_late(Operation* operation) {
    if (operation->done.is_set()) return true;
    if (!operation->is_late()) return false;
    operation->expire();
    if (operation->num_live > 0) {
        operation->done.set();
    } else {
        complete(outstanding_.at(operation));
    }
    return true;
}

std::vector<uint64_t> Engine::collect_finished() {
    std::vector<uint64_t> tokens;
    std::lock_guard<std::mutex> guard(mutex_);
    tokens.swap(finished_);
    return tokens;
}

void Engine::close(bool should_cancel) {
    std::lock_guard<std::mutex> close_guard(close_mutex_);
    {
        std::lock_guard<std::mutex> guard(mutex_);
        is_closing_ = true;
        if (should_cancel) {
            is_cancelling_ = true;
            // A copy of the list: an operation without a block in flight completes, and leaves outstanding_,
            // at once.
            auto outstanding = outstanding_;
            for (auto& [key, operation] : outstanding) {
                if (operation->is_fully_cut()) continue;
                operation->fail(ECANCELED, operation->cut_offset());
                complete_if_finished(operation);
            }
        }
        for (auto& worker : workers_) worker->wake();
    }
    for (auto& worker : workers_) worker->join();
    workers_.clear();
    registry_->forget_buffers();
}

EngineStats Engine::stats() const {
    EngineStats stats;
    stats.bytes_read = bytes_read_;
    stats.bytes_written = bytes_written_;
    stats.operations = num_operations_;
    stats.blocks = num_blocks_;
    stats.retries = num_retries_;
    stats.bounced = num_bounced_;
    stats.fixed = num_fixed_;
    stats.registered_bytes = registry_->num_registered_bytes();
    return stats;
}

BlockPtr Engine::take_block(Worker* worker) {
    std::lock_guard<std::mutex> guard(mutex_);
    worker->is_waiting = false;
    if (!worker->granted.empty()) {
        BlockPtr block = std::move(worker->granted.front());
        worker->granted.pop_front();
        return block;
    }
    while (!queue_.empty()) {
        // Failed, late and cancelled operations leave the queue here.
        drop_if_late(queue_.top().get());
        if (queue_.top()->is_fully_cut()) {
            queue_.pop();
        } else if (BlockPtr block = cut_block(worker)) {
            return block;
        }
    }
    worker->is_waiting = true;
    return nullptr;
}

// Returns the next block of the first operation; null when it has to wait for its granule's lock.
BlockPtr Engine::cut_block(Worker* worker) {
    auto block = std::make_unique<Block>();
    block->operation = queue_.top();
    if (block->operation->begun_ns == 0) block->operation->begun_ns = now_ns();
    block->piece = cut_piece(block->operation.get(), options_.block_size);
    ++block->operation->num_live;
    if (block->piece.path != Path::PART_GRANULE) return block;
    GranuleKey key = granule_key(*block->operation->request.file, block->piece.offset);
    Waiter waiter = {worker, std::move(block)};
    return granule_locks_.acquire(key, &waiter) ? std::move(waiter.block) : nullptr;
}

void Engine::release_granule(const Block& block) {
    Waiter next;
    if (!granule_locks_.release(granule_key(*block.operation->request.file, block.piece.offset), &next))
        return;
    next.worker->granted.push_back(std::move(next.block));
    wake(next.worker);
}

void Engine::block_finished(BlockPtr block, int error, int64_t error_offset) {
    std::lock_guard<std::mutex> guard(mutex_);
    const std::shared_ptr<Operation>& operation = block->operation;
    if (error != 0) operation->fail(error, error_offset);
    if (block->piece.path == Path::PART_GRANULE) release_granule(*block);
    --operation->num_live;
    complete_if_finished(operation);
}

void Engine::complete_if_finished(const std::shared_ptr<Operation>& operation) {
    if (operation->is_fully_cut() && operation->num_live == 0) complete(operation);
}

void Engine::complete(const std::shared_ptr<Operation>& operation) {
    const OperationRequest& request = operation->request;
    if (!operation->has_failed()) (request.is_write ? bytes_written_ : bytes_read_) += request.num_bytes;
    ++num_operations_;
    finished_.push_back(request.token);
    // The argument may be the caller's reference itself: only the events may follow.
    std::shared_ptr<Operation> kept = operation;
    outstanding_.erase(kept.get());
    kept->request.file.reset();
    kept->ended_ns = now_ns();
    kept->released.set();
    kept->done.set();
    if (is_closing_ && outstanding_.empty()) {
        for (auto& worker : workers_) worker->wake();
    }
}

void Engine::wake(Worker* worker) {
    if (!worker->is_waiting) return;
    worker->is_waiting = false;
    worker->wake();
}

void Engine::wake_for(size_t num_blocks) {
    for (auto& worker : workers_) {
        if (num_blocks == 0) return;
        if (!worker->is_waiting) continue;
        wake(worker.get());
        --num_blocks;
    }
}

bool Engine::should_exit() {
    std::lock_guard<std::mutex> guard(mutex_);
    return is_closing_ && outstanding_.empty();
}

void Engine::abandon(int error) {
    std::lock_guard<std::mutex> guard(mutex_);
    abandoned_ = error;
    for (auto& [key, operation] : outstanding_) {
        operation->fail(error, operation->request.offset);
        if (operation->num_live == 0) {
            finished_.push_back(operation->request.token);
            operation->ended_ns = now_ns();
            operation->released.set();
        }
        operation->done.set();
    }
    outstanding_.clear();
    for (auto& worker : workers_) worker->wake();
}

}  // namespace offloadzero::aio
