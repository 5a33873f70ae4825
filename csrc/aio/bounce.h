// Aligned buffers for what cannot go straight between the caller's memory and the disk. One pool per worker.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <vector>

namespace offloadzero::aio {

class BouncePool {
  public:
    explicit BouncePool(size_t buffer_num_bytes) : buffer_num_bytes_(buffer_num_bytes) {}
    ~BouncePool() {
        for (char* buffer : all_) munmap(buffer, buffer_num_bytes_);
    }
    BouncePool(const BouncePool&) = delete;
    BouncePool& operator=(const BouncePool&) = delete;

    size_t buffer_num_bytes() const { return buffer_num_bytes_; }

    // Page-aligned; null when memory is out.
    char* take() {
        if (free_.empty()) {
            void* buffer =
                mmap(nullptr, buffer_num_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (buffer == MAP_FAILED) return nullptr;
            // Keeps a fork from sharing pages that the kernel is writing to.
            madvise(buffer, buffer_num_bytes_, MADV_DONTFORK);
            all_.push_back(static_cast<char*>(buffer));
            free_.push_back(static_cast<char*>(buffer));
        }
        char* buffer = free_.back();
        free_.pop_back();
        return buffer;
    }

    void give_back(char* buffer) { free_.push_back(buffer); }

  private:
    const size_t buffer_num_bytes_;
    std::vector<char*> all_;
    std::vector<char*> free_;
};

}  // namespace offloadzero::aio
