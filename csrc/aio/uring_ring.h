// One io_uring instance: its mappings, its two rings and their memory ordering. Its content is the queue's
// business.
#pragma once

#include <cstddef>
#include <cstdint>

#include "uring_abi.h"

namespace offloadzero::aio::uring {

template <typename T>
T load_acquire(const T* address) {
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

template <typename T>
void store_release(T* address, T value) {
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

class Ring {
  public:
    Ring() = default;
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // Returns 0 or -errno (EINVAL: the kernel does not know one of the flags). Any thread may make it; a ring
    // with SETUP_DISABLED belongs to the thread that calls enable().
    int init(unsigned num_entries, uint32_t setup_flags);
    int enable();

    // Returns a zeroed entry. The caller keeps the number in flight within `num_entries`.
    Sqe* next_sqe();
    // Submits the entries of next_sqe() and, unless timeout_ns is 0, waits for a completion; negative: no
    // limit. Returns 0, or -errno. EAGAIN and EBUSY: the kernel lacks memory for more, the entries stay
    // staged.
    int enter(int64_t timeout_ns);
    bool has_completion() const { return *cq_head_ != load_acquire(cq_tail_); }

    // Calls visit(cqe) for each completion; never blocks.
    template <typename Visit>
    void reap(Visit visit) {
        unsigned head = *cq_head_;
        // Entries up to the tail are complete only once the tail has been seen.
        unsigned tail = load_acquire(cq_tail_);
        for (; head != tail; ++head) visit(cqes_[head & cq_mask_]);
        // The kernel may reuse the entries from here on.
        store_release(cq_head_, head);
    }

    int register_resource(unsigned op, void* argument, unsigned num) const;  // 0 or -errno

  private:
    int check_opcodes() const;
    int map(const Params& params);
    unsigned announce_staged();
    int enter_kernel(unsigned num_submit, int64_t timeout_ns) const;
    int poll_completion(int64_t timeout_ns) const;

    int fd_ = -1;
    uint32_t setup_flags_ = 0;
    uint32_t features_ = 0;
    void* rings_ = nullptr;
    size_t rings_num_bytes_ = 0;
    void* sqes_ = nullptr;
    size_t sqes_num_bytes_ = 0;
    unsigned* sq_head_ = nullptr;
    unsigned* sq_tail_ = nullptr;
    unsigned* sq_array_ = nullptr;
    unsigned sq_mask_ = 0;
    unsigned sq_local_tail_ = 0;
    unsigned* cq_head_ = nullptr;
    unsigned* cq_tail_ = nullptr;
    Cqe* cqes_ = nullptr;
    unsigned cq_mask_ = 0;
};

}  // namespace offloadzero::aio::uring
