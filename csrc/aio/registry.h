// The entries of an engine's kernel queues by slot: open files, and memory that is pinned once instead of at
// every transfer. Any thread adds and removes; each worker brings its own queue up to date.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernel_queue.h"

namespace offloadzero::aio {

// One change of one slot of a queue.
struct SlotUpdate {
    bool is_buffer = false;
    int slot = 0;
    uint64_t file_id = 0;  // of the file that takes the slot; 0: it becomes free
    int fd = -1;
    char* data = nullptr;
    size_t num_bytes = 0;
};

// A queue's share of the registry; the methods belong to the worker that owns the queue.
class QueueSlots {
  public:
    // Returns 0 or -errno of the queue.
    int apply(KernelQueue* queue, const SlotUpdate& update);

    // The slot where the queue has this very file, not one that had its slot before; or NO_SLOT.
    int file_slot(int slot, uint64_t file_id) const {
        bool is_there = slot != NO_SLOT && file_ids_[static_cast<size_t>(slot)] == file_id;
        return is_there ? slot : NO_SLOT;
    }
    // The slot of the memory that holds all of the range, or NO_SLOT.
    int buffer_slot(const char* data, size_t num_bytes) const;
    // Unpins all memory.
    void clear_buffers(KernelQueue* queue);

  private:
    struct Range {
        uintptr_t begin;
        uintptr_t end;
        int slot;
    };

    std::vector<uint64_t> file_ids_ = std::vector<uint64_t>(NUM_FILE_SLOTS, 0);
    std::vector<Range> ranges_;  // by address
};

class Registry {
  public:
    explicit Registry(size_t num_workers);

    // Takes a free slot, which every queue gets sooner or later, or NO_SLOT. The descriptor stays the
    // caller's.
    int add_file(uint64_t file_id, int fd);
    // Called when the file's last transfer is over.
    void remove_file(int slot);

    // Returns 0 when every queue has the memory, or -errno of the first that refused, and then none has it.
    // The pages stay pinned until remove_buffer() or close(). Memory must not be registered twice.
    int add_buffer(char* data, size_t num_bytes);
    // Returns when no queue uses it for another transfer. Returns false when it is not registered.
    bool remove_buffer(char* data);
    // Called when no queue has any memory any more.
    void forget_buffers();
    uint64_t num_registered_bytes() const { return num_registered_bytes_.load(std::memory_order_relaxed); }

    // Called by the worker `index`.
    void join(size_t index, KernelQueue* queue);
    bool has_updates(size_t index) const {
        return queues_[index].has_updates.load(std::memory_order_acquire);
    }
    void apply_updates(size_t index, QueueSlots* slots);
    void leave(size_t index);

  private:
    struct Queue {
        KernelQueue* queue = nullptr;  // null: not begun, or gone
        std::vector<SlotUpdate> updates;
        uint64_t num_asked = 0;
        uint64_t num_applied = 0;
        int error = 0;  // first refusal of a buffer since it was last cleared; -errno
        std::atomic<bool> has_updates{false};
    };

    struct Buffer {
        char* data;
        size_t num_bytes;
        std::vector<int> slots;
    };

    // These are called with the mutex held.
    void ask(const SlotUpdate& update);
    int wait_until_applied(std::unique_lock<std::mutex>* lock);
    int take_buffer_slots(char* data, size_t num_bytes, Buffer* buffer);
    void clear_buffer_slots(const Buffer& buffer, std::unique_lock<std::mutex>* lock);

    const pid_t pid_;
    std::mutex mutex_;
    std::mutex buffer_mutex_;  // one add_buffer() or remove_buffer() at a time
    std::condition_variable applied_;
    std::vector<Queue> queues_;
    std::vector<int> free_file_slots_;
    std::vector<int> free_buffer_slots_;
    std::vector<Buffer> buffers_;
    std::atomic<uint64_t> num_registered_bytes_{0};
};

}  // namespace offloadzero::aio
