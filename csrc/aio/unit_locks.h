// Exclusive access to one alignment unit of a file for a read-modify-write. Not thread-safe: the engine's
// mutex guards it.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <tuple>

#include "file.h"

namespace offloadzero::aio {

using UnitKey = std::tuple<dev_t, ino_t, int64_t>;

inline UnitKey unit_key(const File& file, int64_t offset) {
    return {file.device(), file.inode(), offset / static_cast<int64_t>(file.alignment())};
}

// Waiter: whatever the owner needs to resume a block.
template <typename Waiter>
class UnitLocks {
  public:
    // False: the waiter is queued, and a later release() of the unit hands it the lock.
    bool acquire(const UnitKey& key, const Waiter& waiter) {
        auto [held, is_new] = held_.try_emplace(key);
        if (!is_new) held->second.push_back(waiter);
        return is_new;
    }

    // True: the lock passed on to *next.
    bool release(const UnitKey& key, Waiter* next) {
        auto held = held_.find(key);
        if (held->second.empty()) {
            held_.erase(held);
            return false;
        }
        *next = held->second.front();
        held->second.pop_front();
        return true;
    }

  private:
    std::map<UnitKey, std::deque<Waiter>> held_;
};

}  // namespace offloadzero::aio
