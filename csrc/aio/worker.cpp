// [Note: the end of the file]
// A direct write moves whole granules, so part of a granule is read, changed in a bounce buffer and
// written back, under the granule's lock. Where the file ends inside that granule (or before it), writing the
// whole granule would make the file too long, and cutting it back could cut what another operation has just
// appended. There the bytes asked for, and no others, go through a second, buffered descriptor: the kernel
// grows the file exactly. That is coherent because a granule is at least a page, the granule's lock keeps
// every other partial write away from the page, and the kernel writes the page back before a later direct
// transfer touches it.
#include "worker.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <system_error>
#include <utility>

namespace offloadzero::aio {
namespace {

constexpr unsigned MAX_STALLS = 16;
constexpr unsigned MAX_BUSY = 64;
constexpr unsigned MAX_BUSY_AT_ONCE = 3;  // retried without a pause
constexpr size_t GRANULE_POOL_NUM_BYTES = 4096;

int64_t round_down(int64_t value, size_t step) { return value - value % static_cast<int64_t>(step); }

int64_t round_up(int64_t value, size_t step) {
    return round_down(value + static_cast<int64_t>(step) - 1, step);
}

}  // namespace

Worker::Worker(Engine* engine, size_t index, std::unique_ptr<KernelQueue> kernel, unsigned depth)
    : engine_(*engine),
      index_(index),
      kernel_(std::move(kernel)),
      depth_(depth),
      granule_pool_(GRANULE_POOL_NUM_BYTES),
      block_pool_(engine->block_size()) {}

int Worker::start_thread() {
    // Signals are for the caller's threads: a new thread inherits the mask it is created under.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int status = 0;
    try {
        std::promise<int> promise;
        std::future<int> begun = promise.get_future();
        thread_ = std::thread([this, owned = std::move(promise)]() mutable { run(std::move(owned)); });
        status = begun.get();
    } catch (const std::system_error& error) {
        status = -error.code().value();
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return status;
}

void Worker::run(std::promise<int> begun) {
    int status = kernel_->begin();
    if (status == 0) engine_.registry_->join(index_, kernel_.get());
    begun.set_value(status);
    if (status < 0) return;
    status = serve();
    // The kernel unpins what a closed queue has registered some time later, and while a forked child has the
    // queue's descriptor never: the memory must be the caller's again, and out of its limit, with close().
    if (status == 0) slots_.clear_buffers(kernel_.get());
    engine_.registry_->leave(index_);
    if (status == 0) {
        kernel_->end();
    } else {
        engine_.abandon(-status);
    }
}

// Returns 0 when there is nothing left to do, -errno when the kernel queue broke.
int Worker::serve() {
    for (;;) {
        if (engine_.registry_->has_updates(index_)) engine_.registry_->apply_updates(index_, &slots_);
        fill();
        if (is_idle() && engine_.should_exit()) return 0;
        int status = kernel_->submit_and_wait(wait_timeout_ns());
        if (status < 0) return status;
        reap();
        run_deferred();
    }
}

void Worker::fill() {
    while (num_in_kernel_ < depth_) {
        BlockPtr block;
        if (!ready_.empty()) {
            block = std::move(ready_.front());
            ready_.pop_front();
        } else {
            block = engine_.take_block(this);
            if (block == nullptr) return;
        }
        start(std::move(block));
    }
}

void Worker::reap() {
    completions_.clear();
    kernel_->reap(&completions_);
    num_in_kernel_ -= static_cast<unsigned>(completions_.size());
    for (const Completion& completion : completions_) {
        on_completion(BlockPtr(reinterpret_cast<Block*>(completion.tag)), completion.result);
    }
}

void Worker::run_deferred() {
    if (deferred_.empty()) return;
    int64_t now = engine_.is_cancelling_ ? INT64_MAX : now_ns();
    std::vector<Deferred> due;
    auto is_later = [now](const Deferred& deferred) { return deferred.due_ns > now; };
    auto first_due = std::stable_partition(deferred_.begin(), deferred_.end(), is_later);
    std::move(first_due, deferred_.end(), std::back_inserter(due));
    deferred_.erase(first_due, deferred_.end());
    for (Deferred& deferred : due) {
        if (deferred.is_retry) {
            resume(std::move(deferred.block));
        } else {
            --num_in_kernel_;
            on_result(std::move(deferred.block), deferred.result);
        }
    }
}

int64_t Worker::wait_timeout_ns() const {
    if (deferred_.empty()) return WAIT_FOREVER;
    int64_t first = INT64_MAX;
    for (const Deferred& deferred : deferred_) first = std::min(first, deferred.due_ns);
    return std::max<int64_t>(first - now_ns(), 0);
}

void Worker::defer(BlockPtr block, int64_t delay_ns, bool is_retry, int64_t result) {
    deferred_.push_back({now_ns() + delay_ns, std::move(block), is_retry, result});
    if (!is_retry) ++num_in_kernel_;
}

void Worker::start(BlockPtr block) {
    if (!block->is_prepared) {
        block->is_prepared = true;
        engine_.num_blocks_.fetch_add(1, std::memory_order_relaxed);
        block->fault = engine_.faults_.next_block();
        int error = prepare(block.get());
        if (error != 0) return finish(std::move(block), error);
    }
    if (block->operation->has_failed()) return finish(std::move(block), 0);
    if (block->fault.error != 0) {
        const BlockFault fault = std::exchange(block->fault, BlockFault());
        return defer(std::move(block), fault.delay_ns, false, -fault.error);
    }
    stage(std::move(block));
}

void Worker::stage(BlockPtr block) {
    const Block::Window& window = block->window;
    size_t num_bytes = window.num_bytes - block->num_done;
    if (block->fault.short_bytes >= 0) {
        size_t limit = static_cast<size_t>(round_up(block->fault.short_bytes, window.granularity));
        if (limit == 0) {
            block->fault.short_bytes = -1;
            return defer(std::move(block), 0, false, 0);
        }
        num_bytes = std::min(num_bytes, limit);
    }
    const File& file = *block->operation->request.file;
    Transfer transfer;
    transfer.is_write = window.is_write;
    transfer.fd = window.fd;
    transfer.file_slot = window.fd == file.fd() ? slots_.file_slot(file.slot(), file.id()) : NO_SLOT;
    transfer.data = window.data + block->num_done;
    transfer.num_bytes = num_bytes;
    transfer.buffer_slot = slots_.buffer_slot(transfer.data, num_bytes);
    transfer.offset = window.offset + static_cast<int64_t>(block->num_done);
    block->is_fixed = transfer.buffer_slot != NO_SLOT;
    if (block->is_fixed) engine_.num_fixed_.fetch_add(1, std::memory_order_relaxed);
    ++num_in_kernel_;
    transfer.tag = reinterpret_cast<uint64_t>(block.release());
    kernel_->stage(transfer);
}

int Worker::take_bounce(Block* block, size_t num_bytes) {
    block->bounce = (num_bytes <= GRANULE_POOL_NUM_BYTES ? granule_pool_ : block_pool_).take();
    if (block->bounce == nullptr) return ENOMEM;
    engine_.num_bounced_.fetch_add(1, std::memory_order_relaxed);
    return 0;
}

// Sets up the block's first window. Returns 0 or errno.
int Worker::prepare(Block* block) {
    const OperationRequest& request = block->operation->request;
    const File& file = *request.file;
    const Piece& piece = block->piece;
    Block::Window& window = block->window;
    window.is_write = request.is_write;
    window.fd = file.fd();
    window.data = piece.data;
    window.offset = piece.offset;
    window.num_bytes = window.num_needed = piece.num_bytes;
    window.granularity = request.is_write ? file.alignment() : file.read_alignment();
    if (piece.path == Path::PLAIN) return 0;

    int64_t end = piece.offset + static_cast<int64_t>(piece.num_bytes);
    window.offset = round_down(piece.offset, window.granularity);
    window.num_bytes = static_cast<size_t>(round_up(end, window.granularity) - window.offset);
    window.num_needed = static_cast<size_t>(end - window.offset);
    int error = take_bounce(block, window.num_bytes);
    if (error != 0) return error;
    window.data = block->bounce.get();
    if (piece.path == Path::PART_GRANULE) {
        block->phase = Block::Phase::READ_GRANULE;
        window.is_write = false;
        window.num_needed = window.num_bytes;
    } else if (request.is_write) {
        memcpy(block->bounce.get(), piece.data, piece.num_bytes);
    }
    return 0;
}

void Worker::on_completion(BlockPtr block, int64_t result) {
    const BlockFault fault = std::exchange(block->fault, BlockFault());
    if (fault.short_bytes >= 0) result = std::min(result, fault.short_bytes);
    if (fault.delay_ns > 0) return defer(std::move(block), fault.delay_ns, false, result);
    on_result(std::move(block), result);
}

void Worker::on_result(BlockPtr block, int64_t result) {
    if (result == -EINTR || result == -EAGAIN) return retry_busy(std::move(block), static_cast<int>(-result));
    if (result == -EFAULT && block->is_fixed) {
        // The memory was unregistered between stage() and the kernel's look at the slot: again, without it.
        const char* data = block->window.data + block->num_done;
        bool is_registered = slots_.buffer_slot(data, block->window.num_bytes - block->num_done) != NO_SLOT;
        if (!is_registered) return resume(std::move(block));
    }
    if (result < 0) return finish(std::move(block), static_cast<int>(-result));
    block->num_busy = 0;
    if (!block->window.is_write) {
        // A direct read over the file's end has been seen to count bytes behind it.
        int64_t begin = block->window.offset + static_cast<int64_t>(block->num_done);
        int64_t size = block->operation->request.file->size_to(begin + result);
        if (size >= 0) result = std::clamp<int64_t>(size - begin, 0, result);
    }
    if (block->num_done + static_cast<size_t>(result) < block->window.num_needed)
        return on_short(std::move(block), result);
    block->num_done = block->window.num_needed;
    end_phase(std::move(block));
}

void Worker::on_short(BlockPtr block, int64_t result) {
    const Block::Window& window = block->window;
    size_t num_before = block->num_done;
    block->num_done += static_cast<size_t>(result);
    int64_t position = window.offset + static_cast<int64_t>(block->num_done);
    int64_t end = window.is_write ? INT64_MAX : block->operation->request.file->num_bytes();
    if (!window.is_write && (result == 0 || position >= end)) {
        if (block->phase == Block::Phase::READ_GRANULE) return append(std::move(block));
        return finish(std::move(block), ENODATA);
    }
    block->num_done -= block->num_done % window.granularity;
    block->num_stalls = block->num_done > num_before ? 0 : block->num_stalls + 1;
    if (block->num_stalls > MAX_STALLS) return finish(std::move(block), EIO);
    engine_.num_retries_.fetch_add(1, std::memory_order_relaxed);
    resume(std::move(block));
}

void Worker::retry_busy(BlockPtr block, int error) {
    if (++block->num_busy > MAX_BUSY) return finish(std::move(block), error);
    engine_.num_retries_.fetch_add(1, std::memory_order_relaxed);
    if (block->num_busy <= MAX_BUSY_AT_ONCE) return resume(std::move(block));
    const int64_t pause_ns = 1'000'000LL << std::min(block->num_busy - MAX_BUSY_AT_ONCE, 6u);
    defer(std::move(block), pause_ns, true, 0);
}

void Worker::end_phase(BlockPtr block) {
    const Piece& piece = block->piece;
    Block::Window& window = block->window;
    size_t skip = static_cast<size_t>(piece.offset - window.offset);
    if (block->phase == Block::Phase::READ_GRANULE) {
        memcpy(block->bounce.get() + skip, piece.data, piece.num_bytes);
        block->phase = Block::Phase::WRITE_GRANULE;
        window.is_write = true;
        block->num_done = 0;
        return resume(std::move(block));
    }
    if (piece.path == Path::BOUNCE && !window.is_write)
        memcpy(piece.data, block->bounce.get() + skip, piece.num_bytes);
    finish(std::move(block), 0);
}

void Worker::append(BlockPtr block) {
    const Piece& piece = block->piece;
    block->num_done = 0;
    int fd = block->operation->request.file->buffered_fd();
    if (fd < 0) return finish(std::move(block), -fd);
    block->phase = Block::Phase::APPEND;
    block->window = {true, fd, piece.data, piece.offset, piece.num_bytes, piece.num_bytes, 1};
    resume(std::move(block));
}

void Worker::finish(BlockPtr block, int error) {
    int64_t reached = block->window.offset + static_cast<int64_t>(block->num_done);
    reached = std::max(reached, block->piece.offset);
    engine_.block_finished(std::move(block), error, reached);
}

}  // namespace offloadzero::aio
