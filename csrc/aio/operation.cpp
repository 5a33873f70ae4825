#include "operation.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>

namespace offloadzero::aio {
namespace {

bool is_multiple(const char* address, size_t alignment) {
    return reinterpret_cast<uintptr_t>(address) % alignment == 0;
}

}  // namespace

int Event::wait(int64_t timeout_ns) {
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain 32-bit word");
    // A deadline that overflows counts as none.
    int64_t deadline = timeout_ns < 0 || timeout_ns > INT64_MAX / 2 ? -1 : now_ns() + timeout_ns;
    while (!is_set()) {
        timespec left = {0, 0};
        if (deadline >= 0) {
            int64_t left_ns = deadline - now_ns();
            if (left_ns <= 0) return -ETIMEDOUT;
            left = {left_ns / 1'000'000'000, left_ns % 1'000'000'000};
        }
        const timespec* limit = deadline >= 0 ? &left : nullptr;
        uint32_t clear = CLEAR;
        if (!state_.compare_exchange_strong(clear, CLEAR_WITH_WAITERS) && clear == SET) return 0;
        long status = syscall(SYS_futex, &state_, FUTEX_WAIT_PRIVATE, CLEAR_WITH_WAITERS, limit, nullptr, 0);
        if (status < 0 && errno == EINTR && !is_set()) return -EINTR;
    }
    return 0;
}

void Event::set() {
    if (state_.exchange(SET, std::memory_order_acq_rel) != CLEAR_WITH_WAITERS) return;
    syscall(SYS_futex, &state_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void Operation::fail(int error, int64_t offset) {
    if (!has_failed()) {
        error_offset_ = offset;
        error_.store(error, std::memory_order_relaxed);
    }
    num_cut = request.num_bytes;
}

void Operation::expire() {
    error_offset_ = cut_offset();
    error_.store(ETIMEDOUT, std::memory_order_relaxed);
    num_cut = request.num_bytes;
}

Piece cut_piece(Operation* operation, size_t block_size) {
    const OperationRequest& request = operation->request;
    const File& file = *request.file;
    size_t alignment = request.is_write ? file.alignment() : file.read_alignment();
    Piece piece;
    piece.offset = request.offset + static_cast<int64_t>(operation->num_cut);
    piece.data = request.data + operation->num_cut;
    size_t left = request.num_bytes - operation->num_cut;
    size_t misalignment = static_cast<size_t>(piece.offset) % alignment;
    size_t to_boundary = alignment - misalignment;
    size_t memory_alignment = file.memory_alignment();

    if (misalignment == 0 && left >= alignment &&
        (request.is_write || is_multiple(piece.data, memory_alignment))) {
        // The rests of blocks that were cut short go with the last one, up to eight of them; through a bounce
        // buffer no more than fits there.
        const bool is_plain = is_multiple(piece.data, memory_alignment);
        const size_t num_spared = block_size - file.block_size();
        const size_t num_whole = left - left % alignment;
        const size_t limit = is_plain ? block_size + 8 * num_spared : block_size;
        piece.num_bytes = num_whole <= limit ? num_whole : file.block_size();
        piece.path = is_plain ? Path::PLAIN : Path::BOUNCE;
    } else if (request.is_write) {
        piece.num_bytes = std::min(to_boundary, left);
        piece.path = Path::PART_GRANULE;
    } else {
        // A read bounces up to the next boundary if from there on it can go straight, else a whole block.
        bool can_go_straight = left > to_boundary && is_multiple(piece.data + to_boundary, memory_alignment);
        piece.num_bytes = std::min(can_go_straight ? to_boundary : block_size - misalignment, left);
        piece.path = Path::BOUNCE;
    }
    operation->num_cut += piece.num_bytes;
    return piece;
}

}  // namespace offloadzero::aio
