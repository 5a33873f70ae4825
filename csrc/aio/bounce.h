// Aligned buffers for transfers that cannot go straight between the caller's memory and the disk. One pool
// per worker.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace offloadzero::aio {

class BouncePool;

struct GiveBack {
    BouncePool* pool = nullptr;
    inline void operator()(char* buffer) const;
};

// A buffer on loan: goes back to its pool, which must outlive it, in the thread of the pool.
using Bounce = std::unique_ptr<char, GiveBack>;

class BouncePool {
  public:
    explicit BouncePool(size_t buffer_num_bytes) : buffer_num_bytes_(buffer_num_bytes) {}
    ~BouncePool() {
        for (char* buffer : all_) munmap(buffer, buffer_num_bytes_);
    }
    BouncePool(const BouncePool&) = delete;
    BouncePool& operator=(const BouncePool&) = delete;

    size_t buffer_num_bytes() const { return buffer_num_bytes_; }

    // Returns a page-aligned buffer; null when memory is out.
    Bounce take() {
        if (free_.empty()) {
            void* buffer =
                mmap(nullptr, buffer_num_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (buffer == MAP_FAILED) return Bounce();
            // Keeps a fork from sharing pages that the kernel is writing to.
            madvise(buffer, buffer_num_bytes_, MADV_DONTFORK);
            all_.push_back(static_cast<char*>(buffer));
            free_.push_back(static_cast<char*>(buffer));
        }
        char* buffer = free_.back();
        free_.pop_back();
        return Bounce(buffer, GiveBack{this});
    }

  private:
    friend struct GiveBack;

    const size_t buffer_num_bytes_;
    std::vector<char*> all_;
    std::vector<char*> free_;
};

inline void GiveBack::operator()(char* buffer) const { pool->free_.push_back(buffer); }

}  // namespace offloadzero::aio
