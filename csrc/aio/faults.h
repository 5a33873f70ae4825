// Faults that tests inject: the nth block from now fails, is cut short, or is late.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace offloadzero::aio {

enum class FaultKind { ERRNO, SHORT, DELAY };

// The sum of the faults that hit one block.
struct BlockFault {
    int error = 0;             // errno; 0: none. The block does not reach the kernel.
    int64_t short_bytes = -1;  // its first transfer moves at most this many; -1: all
    int64_t delay_ns = 0;      // its first completion is seen this much later
};

class Faults {
  public:
    void inject(FaultKind kind, uint64_t nth, int64_t value) {
        std::lock_guard<std::mutex> guard(mutex_);
        armed_.push_back({kind, nth, value});
        is_armed_.store(true, std::memory_order_release);
    }

    void clear() {
        std::lock_guard<std::mutex> guard(mutex_);
        armed_.clear();
        is_armed_.store(false, std::memory_order_release);
    }

    // Counts one block.
    BlockFault next_block() {
        BlockFault fault;
        if (!is_armed_.load(std::memory_order_acquire)) return fault;
        std::lock_guard<std::mutex> guard(mutex_);
        std::vector<Armed> still_armed;
        for (Armed& armed : armed_) {
            if (--armed.countdown > 0) {
                still_armed.push_back(armed);
            } else if (armed.kind == FaultKind::ERRNO) {
                fault.error = static_cast<int>(armed.value);
            } else if (armed.kind == FaultKind::SHORT) {
                fault.short_bytes = armed.value;
            } else {
                fault.delay_ns = armed.value * 1'000'000;
            }
        }
        armed_.swap(still_armed);
        is_armed_.store(!armed_.empty(), std::memory_order_release);
        return fault;
    }

  private:
    struct Armed {
        FaultKind kind;
        uint64_t countdown;
        int64_t value;
    };

    std::mutex mutex_;
    std::vector<Armed> armed_;
    std::atomic<bool> is_armed_{false};
};

}  // namespace offloadzero::aio
