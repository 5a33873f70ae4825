#include "file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "device_limits.h"
#include "registry.h"

namespace offloadzero::aio {
namespace {

constexpr size_t DEFAULT_ALIGNMENT = 4096;

std::atomic<uint64_t> next_file_id{1};

int open_retrying(const std::string& path, int flags) {
    int fd;
    do {
        fd = ::open(path.c_str(), flags | O_CLOEXEC, 0600);
    } while (fd < 0 && errno == EINTR);
    return fd < 0 ? -errno : fd;
}

struct DirectAlignment {
    bool is_known = false;
    uint32_t memory = 0;
    uint32_t offset = 0;  // 0: no direct I/O on this file
};

// STATX_DIOALIGN (Linux 6.1), by number: the headers the package is built with may be older.
DirectAlignment query_direct_alignment(int fd) {
    constexpr unsigned STATX_DIO_ALIGN = 0x2000;
    constexpr size_t MASK_AT = 0, MEMORY_ALIGN_AT = 0x98, OFFSET_ALIGN_AT = 0x9c;
    char statx_memory[256] = {};
    DirectAlignment found;
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIO_ALIGN, statx_memory) < 0) return found;
    uint32_t mask;
    memcpy(&mask, statx_memory + MASK_AT, sizeof mask);
    if (!(mask & STATX_DIO_ALIGN)) return found;
    found.is_known = true;
    memcpy(&found.memory, statx_memory + MEMORY_ALIGN_AT, sizeof found.memory);
    memcpy(&found.offset, statx_memory + OFFSET_ALIGN_AT, sizeof found.offset);
    return found;
}

}  // namespace

int File::open(const std::string& path, const OpenOptions& options, std::shared_ptr<File>* file) {
    int flags = (options.is_readonly ? O_RDONLY : O_RDWR) | (options.can_create ? O_CREAT : 0);
    std::shared_ptr<File> opened(new File());
    opened->path_ = path;
    opened->is_readonly_ = options.is_readonly;
    if (options.can_be_direct) {
        int fd = open_retrying(path, flags | O_DIRECT);
        if (fd >= 0) {
            opened->fd_ = fd;
            opened->direct_refusal_ = opened->query_alignment(options.block_size);
            opened->is_direct_ = opened->direct_refusal_ == 0;
        } else if (fd == -EINVAL) {
            opened->direct_refusal_ = fd;
        } else {
            return fd;
        }
    }
    if (!opened->is_direct_) {
        if (opened->fd_ >= 0) ::close(opened->fd_);
        opened->fd_ = open_retrying(path, flags);
        if (opened->fd_ < 0) return opened->fd_;
    }
    struct stat status;
    if (fstat(opened->fd_, &status) < 0) return -errno;
    if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode))
        return S_ISDIR(status.st_mode) ? -EISDIR : -EINVAL;
    opened->device_ = status.st_dev;
    opened->inode_ = status.st_ino;
    opened->block_size_ = options.block_size;
    if (opened->is_direct_) {
        const dev_t device = S_ISBLK(status.st_mode) ? status.st_rdev : status.st_dev;
        const size_t fitted = fit_requests(options.block_size, request_num_bytes(device));
        if (fitted % opened->alignment_ == 0) opened->block_size_ = fitted;
    }
    *file = std::move(opened);
    return 0;
}

File::File() : id_(next_file_id++) {}

void File::join(std::shared_ptr<Registry> registry) {
    registry_ = std::move(registry);
    slot_ = registry_->add_file(id_, fd_);
}

File::~File() {
    // In this order: a queue that has the file in its slot would keep it open.
    if (slot_ != NO_SLOT) registry_->remove_file(slot_);
    if (fd_ >= 0) ::close(fd_);
    if (buffered_fd_ >= 0) ::close(buffered_fd_);
}

int File::query_alignment(size_t block_size) {
    DirectAlignment demand = query_direct_alignment(fd_);
    if (demand.is_known && demand.offset == 0) return -EOPNOTSUPP;
    size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    alignment_ = std::max({DEFAULT_ALIGNMENT, page, static_cast<size_t>(demand.offset)});
    read_alignment_ = demand.is_known ? demand.offset : alignment_;
    memory_alignment_ = demand.is_known ? std::max<size_t>(demand.memory, 1) : alignment_;
    if (block_size % alignment_ == 0) return 0;
    alignment_ = read_alignment_ = memory_alignment_ = 1;
    return -EOPNOTSUPP;
}

int64_t File::num_bytes() const {
    struct stat status;
    if (fstat(fd_, &status) < 0) return -errno;
    if (S_ISBLK(status.st_mode)) {
        // A block device has no size of its own in stat.
        off_t end = lseek(fd_, 0, SEEK_END);
        return end < 0 ? -errno : end;
    }
    return status.st_size;
}

int64_t File::size_to(int64_t end) {
    int64_t seen = seen_num_bytes_.load(std::memory_order_relaxed);
    if (end <= seen) return seen;
    seen = num_bytes();
    seen_num_bytes_.store(seen, std::memory_order_relaxed);
    return seen;
}

int File::preallocate(int64_t start, int64_t num_bytes) const {
    struct stat status;
    struct statvfs space;
    if (fstat(fd_, &status) < 0 || fstatvfs(fd_, &space) < 0) return -errno;
    int64_t num_missing = num_bytes - (start > 0 ? start : static_cast<int64_t>(status.st_blocks) * 512);
    auto num_bytes_of = [&space](fsblkcnt_t blocks) {
        return static_cast<int64_t>(blocks) * static_cast<int64_t>(space.f_frsize);
    };
    if (num_bytes == 0 || S_ISBLK(status.st_mode)) return num_bytes > this->num_bytes() ? -ENOSPC : 0;
    // Sizes that cannot fit are refused here: some filesystems would first fill the disk and then fail.
    if (num_missing > num_bytes_of(space.f_bfree)) return -ENOSPC;
    int error;
    do {
        error = fallocate(fd_, 0, start, num_bytes - start) < 0 ? errno : 0;
    } while (error == EINTR);
    if (error == EOPNOTSUPP || error == ENOSYS) {
        if (num_missing > num_bytes_of(space.f_bavail)) return -ENOSPC;
        error = num_bytes > status.st_size && ftruncate(fd_, num_bytes) < 0 ? errno : 0;
    } else if (error != 0 && this->num_bytes() > status.st_size && ftruncate(fd_, status.st_size) < 0) {
        // The filesystem had grown the file before it ran out of space, which cannot be undone.
        return -errno;
    }
    return -error;
}

int File::sync() const {
    int status;
    do {
        status = fdatasync(fd_);
    } while (status < 0 && errno == EINTR);
    return status < 0 ? -errno : 0;
}

int File::buffered_fd() {
    std::lock_guard<std::mutex> guard(buffered_mutex_);
    if (buffered_fd_ >= 0) return buffered_fd_;
    int flags = is_readonly_ ? O_RDONLY : O_RDWR;
    // Through /proc the file is found even after a rename or an unlink.
    int fd = open_retrying("/proc/self/fd/" + std::to_string(fd_), flags);
    if (fd < 0) fd = open_retrying(path_, flags);
    if (fd < 0) return fd;
    struct stat status;
    if (fstat(fd, &status) < 0 || status.st_dev != device_ || status.st_ino != inode_) {
        ::close(fd);
        return -ESTALE;
    }
    buffered_fd_ = fd;
    return fd;
}

}  // namespace offloadzero::aio
