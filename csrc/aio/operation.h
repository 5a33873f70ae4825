// One read or write of any size, as the caller sees it, and the pieces it is cut into.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "file.h"

namespace offloadzero::aio {

struct OperationRequest {
    bool is_write = false;
    std::shared_ptr<File> file;
    char* data = nullptr;  // the caller keeps it alive until the operation's token is collected
    size_t num_bytes = 0;
    int64_t offset = 0;
    int64_t priority = 0;  // lower runs first
    uint64_t token = 0;    // the caller's name for it
};

class Operation {
  public:
    explicit Operation(OperationRequest what) : request(std::move(what)) {}

    const OperationRequest request;

    bool is_done() const { return state_.load(std::memory_order_acquire) == kDone; }
    // 0 when done, -ETIMEDOUT, or -EINTR when a signal came first. Negative: no limit.
    int wait(int64_t timeout_ns);
    // By the engine, after the last touch of the caller's memory.
    void publish_done();

    // The first error, 0 if none, and the file offset where it struck. Valid once done.
    int error() const { return error_.load(std::memory_order_relaxed); }
    int64_t error_offset() const { return error_offset_; }

    bool has_failed() const { return error() != 0; }

    // Guarded by the engine's mutex.
    uint64_t sequence = 0;
    size_t num_cut = 0;   // bytes already cut into blocks
    size_t num_live = 0;  // blocks cut and not finished
    bool is_fully_cut() const { return num_cut == request.num_bytes; }
    // Keeps the first error and cancels what is not cut yet.
    void fail(int error, int64_t offset);

  private:
    enum State : uint32_t { kRunning, kRunningWithWaiters, kDone };

    std::atomic<uint32_t> state_{kRunning};  // a futex
    std::atomic<int> error_{0};
    int64_t error_offset_ = 0;
};

// How one piece of an operation reaches the file.
enum class Path {
    kPlain,     // straight between the caller's memory and the file
    kBounce,    // whole alignment units through an aligned buffer
    kPartUnit,  // part of one alignment unit of a direct file: read, modify, write under the unit's lock
};

struct Piece {
    Path path = Path::kPlain;
    int64_t offset = 0;  // of the bytes asked for
    size_t num_bytes = 0;
    char* data = nullptr;
};

// The next piece of at most about `block_size` bytes from operation.num_cut on; advances num_cut.
Piece cut_piece(Operation* operation, size_t block_size);

}  // namespace offloadzero::aio
