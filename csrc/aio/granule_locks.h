// Exclusive access to one granule of a file for a read-modify-write. Not thread-safe: the engine's
// mutex guards it.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <tuple>
#include <utility>

#include "file.h"

namespace offloadzero::aio {

using GranuleKey = std::tuple<dev_t, ino_t, int64_t>;

inline GranuleKey granule_key(const File& file, int64_t offset) {
    return {file.device(), file.inode(), offset / static_cast<int64_t>(file.alignment())};
}

// Waiter: the data that the owner needs to resume a block; a queued one belongs to the lock.
template <typename Waiter>
class GranuleLocks {
  public:
    // Returns false when *waiter was moved into the queue, and a later release() of the granule hands it the
    // lock.
    bool acquire(const GranuleKey& key, Waiter* waiter) {
        auto [held, is_new] = held_.try_emplace(key);
        if (!is_new) held->second.push_back(std::move(*waiter));
        return is_new;
    }

    // Returns true when the lock passed on to *next.
    bool release(const GranuleKey& key, Waiter* next) {
        auto held = held_.find(key);
        if (held->second.empty()) {
            held_.erase(held);
            return false;
        }
        *next = std::move(held->second.front());
        held->second.pop_front();
        return true;
    }

  private:
    std::map<GranuleKey, std::deque<Waiter>> held_;
};

}  // namespace offloadzero::aio
