#include "registry.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace offloadzero::aio {

int QueueSlots::apply(KernelQueue* queue, const SlotUpdate& update) {
    if (!update.is_buffer) {
        uint64_t& file_id = file_ids_[static_cast<size_t>(update.slot)];
        // A slot that was never taken needs no clearing.
        if (update.file_id == 0 && file_id == 0) return 0;
        int status = queue->set_file(update.slot, update.fd);
        file_id = status == 0 ? update.file_id : 0;
        return status;
    }
    auto is_same = [&update](const Range& range) { return range.slot == update.slot; };
    auto taken = std::find_if(ranges_.begin(), ranges_.end(), is_same);
    if (taken != ranges_.end()) ranges_.erase(taken);
    int status = queue->set_buffer(update.slot, update.data, update.num_bytes);
    if (status < 0 || update.data == nullptr) return status;
    auto begin = reinterpret_cast<uintptr_t>(update.data);
    Range range = {begin, begin + update.num_bytes, update.slot};
    auto is_before = [](const Range& a, const Range& b) { return a.begin < b.begin; };
    ranges_.insert(std::upper_bound(ranges_.begin(), ranges_.end(), range, is_before), range);
    return 0;
}

int QueueSlots::buffer_slot(const char* data, size_t num_bytes) const {
    auto begin = reinterpret_cast<uintptr_t>(data);
    auto after =
        std::upper_bound(ranges_.begin(), ranges_.end(), begin,
                         [](uintptr_t address, const Range& range) { return address < range.begin; });
    if (after == ranges_.begin()) return NO_SLOT;
    const Range& range = *std::prev(after);
    return begin + num_bytes <= range.end ? range.slot : NO_SLOT;
}

void QueueSlots::clear_buffers(KernelQueue* queue) {
    for (const Range& range : ranges_) queue->set_buffer(range.slot, nullptr, 0);
    ranges_.clear();
}

Registry::Registry(size_t num_workers) : pid_(getpid()), queues_(num_workers) {
    for (int slot = NUM_FILE_SLOTS; slot-- > 0;) free_file_slots_.push_back(slot);
    for (int slot = NUM_BUFFER_SLOTS; slot-- > 0;) free_buffer_slots_.push_back(slot);
}

int Registry::add_file(uint64_t file_id, int fd) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (free_file_slots_.empty()) return NO_SLOT;
    SlotUpdate update;
    update.slot = free_file_slots_.back();
    update.file_id = file_id;
    update.fd = fd;
    free_file_slots_.pop_back();
    ask(update);
    return update.slot;
}

void Registry::remove_file(int slot) {
    // A forked child has neither the workers nor a mutex it could trust.
    if (getpid() != pid_) return;
    std::lock_guard<std::mutex> guard(mutex_);
    SlotUpdate update;
    update.slot = slot;
    ask(update);
    free_file_slots_.push_back(slot);
}

int Registry::add_buffer(char* data, size_t num_bytes) {
    std::lock_guard<std::mutex> one_at_a_time(buffer_mutex_);
    std::unique_lock<std::mutex> lock(mutex_);
    Buffer buffer;
    int status = take_buffer_slots(data, num_bytes, &buffer);
    if (status == 0) status = wait_until_applied(&lock);
    if (status < 0) {
        clear_buffer_slots(buffer, &lock);
        return status;
    }
    num_registered_bytes_ += num_bytes;
    buffers_.push_back(std::move(buffer));
    return 0;
}

bool Registry::remove_buffer(char* data) {
    std::lock_guard<std::mutex> one_at_a_time(buffer_mutex_);
    std::unique_lock<std::mutex> lock(mutex_);
    auto is_same = [data](const Buffer& buffer) { return buffer.data == data; };
    auto found = std::find_if(buffers_.begin(), buffers_.end(), is_same);
    if (found == buffers_.end()) return false;
    Buffer buffer = std::move(*found);
    buffers_.erase(found);
    num_registered_bytes_ -= buffer.num_bytes;
    clear_buffer_slots(buffer, &lock);
    return true;
}

void Registry::forget_buffers() {
    std::lock_guard<std::mutex> guard(mutex_);
    buffers_.clear();
    num_registered_bytes_ = 0;
}

int Registry::take_buffer_slots(char* data, size_t num_bytes, Buffer* buffer) {
    size_t num_slots = (num_bytes + MAX_BUFFER_NUM_BYTES - 1) / MAX_BUFFER_NUM_BYTES;
    if (num_slots > free_buffer_slots_.size()) return -ENOSPC;
    *buffer = {data, num_bytes, {}};
    for (size_t begin = 0; begin < num_bytes; begin += MAX_BUFFER_NUM_BYTES) {
        SlotUpdate update;
        update.is_buffer = true;
        update.slot = free_buffer_slots_.back();
        update.data = data + begin;
        update.num_bytes = std::min(MAX_BUFFER_NUM_BYTES, num_bytes - begin);
        free_buffer_slots_.pop_back();
        buffer->slots.push_back(update.slot);
        ask(update);
    }
    return 0;
}

void Registry::clear_buffer_slots(const Buffer& buffer, std::unique_lock<std::mutex>* lock) {
    for (int slot : buffer.slots) {
        SlotUpdate update;
        update.is_buffer = true;
        update.slot = slot;
        ask(update);
        free_buffer_slots_.push_back(slot);
    }
    wait_until_applied(lock);
}

void Registry::ask(const SlotUpdate& update) {
    for (Queue& queue : queues_) {
        if (queue.queue == nullptr) continue;
        queue.updates.push_back(update);
        ++queue.num_asked;
        queue.has_updates.store(true, std::memory_order_release);
        // New files wait for the first transfer; pinned memory and open files must not.
        if (update.is_buffer || update.file_id == 0) queue.queue->wake();
    }
}

// Returns the first refusal of a buffer, or 0.
int Registry::wait_until_applied(std::unique_lock<std::mutex>* lock) {
    int error = 0;
    bool is_anybody_there = false;
    for (Queue& queue : queues_) {
        uint64_t target = queue.num_asked;
        applied_.wait(*lock, [&] { return queue.queue == nullptr || queue.num_applied >= target; });
        if (queue.queue == nullptr) continue;
        is_anybody_there = true;
        if (error == 0) error = queue.error;
        queue.error = 0;
    }
    return is_anybody_there ? error : -ESHUTDOWN;
}

void Registry::join(size_t index, KernelQueue* queue) {
    std::lock_guard<std::mutex> guard(mutex_);
    queues_[index].queue = queue;
}

void Registry::apply_updates(size_t index, QueueSlots* slots) {
    Queue& mine = queues_[index];
    std::unique_lock<std::mutex> lock(mutex_);
    while (!mine.updates.empty()) {
        std::vector<SlotUpdate> updates;
        updates.swap(mine.updates);
        mine.has_updates.store(false, std::memory_order_release);
        // Pinning a gigabyte takes a while: it is not done under the mutex.
        lock.unlock();
        int error = 0;
        for (const SlotUpdate& update : updates) {
            int status = slots->apply(mine.queue, update);
            if (update.is_buffer && update.data != nullptr && error == 0) error = status;
        }
        lock.lock();
        if (mine.error == 0) mine.error = error;
        mine.num_applied += updates.size();
    }
    applied_.notify_all();
}

void Registry::leave(size_t index) {
    std::lock_guard<std::mutex> guard(mutex_);
    queues_[index].queue = nullptr;
    queues_[index].updates.clear();
    applied_.notify_all();
}

}  // namespace offloadzero::aio
