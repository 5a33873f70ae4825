// One read or write of any size, as the caller sees it, and the pieces it is cut into.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "clock.h"
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

// A flag that threads wait for, once: a futex, not a condition variable, so that a waiting thread learns of
// signals, and Ctrl-C reaches the caller.
class Event {
  public:
    bool is_set() const { return state_.load(std::memory_order_acquire) == SET; }
    void set();
    // Returns 0 when set, -ETIMEDOUT, or -EINTR when a signal came first. A negative limit is none.
    int wait(int64_t timeout_ns);

  private:
    enum State : uint32_t { CLEAR, CLEAR_WITH_WAITERS, SET };

    std::atomic<uint32_t> state_{CLEAR};
};

class Operation {
  public:
    explicit Operation(OperationRequest what) : request(std::move(what)) {}

    // All fields are constant but the file, which the engine lets go of when the operation is complete: a
    // caller that keeps the result does not keep the file open.
    OperationRequest request;
    int64_t deadline_ns = 0;  // on now_ns()'s clock; 0: none

    // Set when the result is known...
    Event done;
    // ...and when neither engine nor kernel will touch the caller's memory again: the same moment, but for an
    // operation that missed its deadline with blocks in the kernel.
    Event released;

    // The first error, 0 if none, and its file offset. Valid once done.
    int error() const { return error_.load(std::memory_order_relaxed); }
    int64_t error_offset() const { return error_offset_; }

    // The times at which its first block was taken up and its last was finished, on now_ns()'s clock. Valid
    // once released.
    int64_t begun_ns = 0;
    int64_t ended_ns = 0;

    bool has_failed() const { return error() != 0; }

    // The engine's mutex guards these.
    uint64_t sequence = 0;
    size_t num_cut = 0;   // bytes already cut into blocks
    size_t num_live = 0;  // blocks cut and not finished
    bool is_fully_cut() const { return num_cut == request.num_bytes; }
    // Keeps the first error and cancels the bytes that are not cut yet.
    void fail(int error, int64_t offset);
    // The deadline has passed: the error is ETIMEDOUT even after another one, as blocks may still be in
    // flight.
    void expire();
    bool is_late() const { return deadline_ns != 0 && now_ns() >= deadline_ns; }
    // The begin of the next block.
    int64_t cut_offset() const { return request.offset + static_cast<int64_t>(num_cut); }

  private:
    std::atomic<int> error_{0};
    int64_t error_offset_ = 0;
};

// The way of one piece of an operation to the file.
enum class Path {
    PLAIN,         // straight between the caller's memory and the file
    BOUNCE,        // whole granules through an aligned buffer
    PART_GRANULE,  // part of one granule of a direct file: read, modify, write under the granule's lock
};

struct Piece {
    Path path = Path::PLAIN;
    int64_t offset = 0;  // of the bytes asked for
    size_t num_bytes = 0;
    char* data = nullptr;
};

// Returns the next piece from operation.num_cut on: the rest where that is at most about `block_size` bytes,
// else a block of the file; advances num_cut.
Piece cut_piece(Operation* operation, size_t block_size);

}  // namespace offloadzero::aio
